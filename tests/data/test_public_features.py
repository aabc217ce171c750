"""Public data sets are imported from their published layout with their features and labels."""

import zipfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from freescale.cli.main import main
from tests.data.imported import named_rows

RATINGS = "1::20::5::978300760\n1::10::3::978300700\n2::20::4::978300800\n"
USERS = "1::F::1::10::48067\n2::M::56::16::70072-1234\n3::M::25::15::55117\n"
MOVIES = "10::Am\xe9lie: A Story (2001)::Comedy|Romance\n20::Toys (1995)::Animation|Comedy\n30::Other (1900)::Drama\n"


def run(name: str, *words: Path | str) -> int:
    return main(["data", "import", name, *map(str, words)])


def values(row: dict[str, Any], *names: str) -> list[Any]:
    return [row[name] for name in names]


def ml1m(path: Path, **members: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(f"ml-1m/{member}.dat", text.encode("latin-1"))
    return path


def test_movielens_1m_has_features_of_users_and_movies_and_ratings_as_labels(tmp_path: Path) -> None:
    path = ml1m(tmp_path / "ml-1m.zip", ratings=RATINGS, users=USERS, movies=MOVIES)
    assert run("ml-1m", path, tmp_path / "data") == 0
    first, second = named_rows(tmp_path / "data")
    events = values(first, "item_id", "rating", "label_rating", "year", "genres")
    assert events == [[10, 20], [3, 5], [3, 5], [2001, 1995], [["Comedy", "Romance"], ["Animation", "Comedy"]]]
    assert values(first, "gender", "age", "occupation", "zip") == ["F", "1", "10", "48067"]
    assert values(second, "user_id", "gender", "zip", "genres") == [2, "M", "70072-1234", [["Animation", "Comedy"]]]
    assert pl.read_parquet(tmp_path / "data" / "vocabulary-genres.parquet").rows()[0] == ("Comedy", 3)


def test_movielens_1m_is_read_from_unpacked_files_and_without_side_tables(tmp_path: Path) -> None:
    path = ml1m(tmp_path / "bare.zip", ratings=RATINGS)
    assert run("ml-1m", path, tmp_path / "bare") == 0
    assert set(named_rows(tmp_path / "bare")[0]) == {"user_id", "item_id", "timestamp", "rating", "label_rating"}
    for name, text in (("ratings", RATINGS), ("users", USERS)):
        (tmp_path / f"{name}.dat").write_text(text)
    assert run("ml-1m", tmp_path / "ratings.dat", tmp_path / "data") == 0
    assert [values(row, "gender", "occupation") for row in named_rows(tmp_path / "data")] == [["F", "10"], ["M", "16"]]


KUAIRAND_LOG = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
    "0,11,20220421,700,1650495600100,1,0,0,0,0,0,0,900,3000,0,0,0,0,1\n"
    "0,12,20220421,600,1650495600000,0,1,0,0,0,0,1,3100,3000,0,0,0,0,4\n"
)
KUAIRAND_VIDEOS = (
    "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,"
    "music_id,music_type,tag\n"
    '11,901,NORMAL,2022-04-10,LongImport,0.0,87433.0,720.0,1280.0,77,9.0,"39,2"\n'
    "12,902,AD,2022-04-10,Web,0.0,87433.0,720.0,1280.0,,9.0,\n"
)
KUAIRAND_USERS = (
    "user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,follow_user_num,"
    "follow_user_num_range,fans_user_num,fans_user_num_range,friend_user_num,friend_user_num_range,register_days,"
    f"register_days_range,{','.join(f'onehot_feat{i}' for i in range(18))}\n"
    f'0,full_active,0,0,1,5,"(0,10]",4,"[1,10)",0,0,107,61-90,{",".join(map(str, range(17)))},\n'
)


def write_kuairand(folder: Path) -> Path:
    folder.mkdir()
    (folder / "log_standard_4_08_to_4_21_pure.csv").write_text(KUAIRAND_LOG)
    (folder / "log_random_4_22_to_5_08_pure.csv").write_text(KUAIRAND_LOG)
    (folder / "video_features_basic_pure.csv").write_text(KUAIRAND_VIDEOS)
    (folder / "video_features_statistic_pure.csv").write_text("video_id,counts\n11,1\n")
    (folder / "user_features_pure.csv").write_text(KUAIRAND_USERS)
    return folder


def test_kuairand_keeps_its_signals_and_reads_the_tables_beside_the_log(tmp_path: Path) -> None:
    folder = write_kuairand(tmp_path / "log")
    assert run("kuairand", folder, tmp_path / "data") == 0
    (row,) = named_rows(tmp_path / "data")
    assert values(row, "item_id", "timestamp", "tab") == [[12, 11], [1650495600, 1650495600], ["4", "1"]]
    assert values(row, "is_click", "is_like", "is_follow", "long_view") == [[0, 1], [1, 0], [0, 0], [1, 0]]
    assert values(row, "label_is_click", "label_is_like", "label_long_view") == [[0, 1], [1, 0], [1, 0]]
    assert values(row, "play_time_ms", "duration_ms") == [[3100, 900], [3000, 3000]]
    assert values(row, "author_id", "video_type") == [["902", "901"], ["AD", "NORMAL"]]
    assert values(row, "upload_type", "music_id", "tag") == [["Web", "LongImport"], [None, "77"], [None, ["39", "2"]]]
    assert values(row, "user_active_degree", "fans_user_num_range", "onehot_feat16") == ["full_active", "[1,10)", "16"]
    assert row["onehot_feat17"] is None


def test_kuairand_needs_no_tables_and_takes_given_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_kuairand(tmp_path / "log")
    (tmp_path / "log.csv").write_text(KUAIRAND_LOG)
    assert run("kuairand", tmp_path / "log.csv", tmp_path / "bare") == 0
    assert "author_id" not in named_rows(tmp_path / "bare")[0]
    items = ["--items", str(folder / "video_features_basic_pure.csv")]
    assert run("kuairand", tmp_path / "log.csv", tmp_path / "data", *items) == 0
    assert named_rows(tmp_path / "data")[0]["author_id"] == ["902", "901"]
    (folder / "user_features_1k.csv").write_text(KUAIRAND_USERS)
    assert run("kuairand", folder, tmp_path / "unclear") == 3
    assert "several files beside the log match user_features*.csv" in capsys.readouterr().err


def test_kuairand_ranks_candidates_with_the_features_of_their_videos(tmp_path: Path) -> None:
    folder = write_kuairand(tmp_path / "log")
    shown = ["--impressions", str(folder), "--labels", "is_click"]
    assert run("kuairand", folder, tmp_path / "data", *shown) == 0
    (row,) = named_rows(tmp_path / "data")
    assert values(row, "item_id", "is_like", "tag") == [[12], [1], [None]]
    assert values(row, "candidate_id", "candidate_tag", "label_is_click") == [[11], [["39", "2"]], [1]]
    assert [name for name in row if name.startswith("label_")] == ["label_is_click"]


def write_yambda(root: Path) -> Path:
    """The layout of the data set: events of one size in flat/50m, mappings at the top."""
    folder = root / "flat" / "50m"
    folder.mkdir(parents=True)
    ids = {"uid": pl.UInt32, "timestamp": pl.UInt32, "item_id": pl.UInt32, "is_organic": pl.UInt8}
    listens = {**ids, "played_ratio_pct": pl.UInt16, "track_length_seconds": pl.UInt32}
    played = [(7, 10, 501, 1, 100, 180), (7, 5, 502, 0, 49, 200), (7, 15, 501, 1, 50, 180)]
    events = {"listens": (listens, played), "likes": (ids, [(7, 10, 501, 1)]), "dislikes": (ids, [(7, 5, 502, 0)])}
    events["unlikes"] = (ids, [(7, 20, 501, 1)])
    for name, (schema, lines) in events.items():
        pl.DataFrame(lines, schema=schema, orient="row").write_parquet(folder / f"{name}.parquet")
    artists = pl.DataFrame({"artist_id": [31, 30, 32], "item_id": [501, 501, 999]})
    artists.write_parquet(root / "artist_item_mapping.parquet")
    pl.DataFrame({"album_id": [4, 5], "item_id": [501, 502]}).write_parquet(root / "album_item_mapping.parquet")
    return folder


LISTEN, FULL, LIKE, DISLIKE, ORGANIC = 1, 2, 4, 8, 16


def test_yambda_is_one_log_of_actions_with_labels_artists_and_albums(tmp_path: Path) -> None:
    assert run("yambda", write_yambda(tmp_path / "yambda"), tmp_path / "data") == 0
    (row,) = named_rows(tmp_path / "data")
    assert values(row, "user_id", "item_id", "timestamp") == [7, [502, 502, 501, 501, 501], [5, 5, 10, 10, 15]]
    full = LISTEN | FULL | ORGANIC
    assert row["action"] == [LISTEN, DISLIKE, full, LIKE | ORGANIC, full]
    assert values(row, "label_full_listen", "label_like") == [[0, None, 1, None, 1], [None, 0, None, 1, None]]
    assert row["played_ratio_pct"] == [49, None, 100, None, 50]
    assert row["track_length_seconds"] == [200, None, 180, None, 180]
    assert row["artist_id"] == [None, None, *["30"] * 3]
    assert row["album_id"] == ["5", "5", *["4"] * 3]


def test_yambda_needs_neither_likes_nor_mappings(tmp_path: Path) -> None:
    folder = write_yambda(tmp_path / "yambda")
    for name in ("artist_item_mapping", "album_item_mapping"):
        (tmp_path / "yambda" / f"{name}.parquet").rename(tmp_path / f"{name}.parquet.moved")
    assert run("yambda", folder / "listens.parquet", tmp_path / "data") == 0
    (row,) = named_rows(tmp_path / "data")
    assert "artist_id" not in row
    assert len(row["item_id"]) == 3
    given = tmp_path / "artist_item_mapping.parquet"
    (tmp_path / "artist_item_mapping.parquet.moved").rename(given)
    assert run("yambda", folder, tmp_path / "other", "--items", given) == 0
    assert named_rows(tmp_path / "other")[0]["artist_id"][2] == "30"


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (["flat/50m/likes.parquet"], [], "there is no listens.parquet"),
        (["flat", "flat/50m/listens.parquet"], [], "there are several files called listens.parquet"),
        (["flat"], ["--items", "flat/50m/likes.parquet"], "--items names no mapping of items to artists or albums"),
    ],
)
def test_an_unclear_yambda_log_is_refused(
    tmp_path: Path, sources: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_yambda(tmp_path / "yambda")
    located = [tmp_path / "yambda" / source for source in sources]
    options = [option if option.startswith("--") else str(tmp_path / "yambda" / option) for option in options]
    assert run("yambda", *located, tmp_path / "data", *options) == 3
    assert message in capsys.readouterr().err
