"""An import keeps every event, in time order per user, with recoverable keys."""

import gzip
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from freescale.cli.main import main
from freescale.data import histories, importers
from freescale.data.event_log import LogColumns
from freescale.data.feature_columns import FeatureColumn
from freescale.data.text_log import CsvStyle
from freescale.data.validation import Quarantine
from freescale.errors import DataError, UsageError
from tests.support.datasets import loader

PUBLIC = Path(os.environ.get("FREESCALE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
"""Public logs that may not be redistributed. Without them only synthetic logs are tested."""


def run(
    tmp_path: Path, name: str, sources: list[Path], *, quarantine: Quarantine | None = None, **options: Any
) -> histories.ImportSummary:
    quarantine = quarantine or Quarantine()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    opened = {key: options.pop(key) for key in ("columns", "style", "unit") if key in options}
    vocabulary = options.pop("vocabulary", None)
    events = importers.open_log(name, importers.LogSpec(sources, scratch, quarantine, **opened))
    job = histories.ImportJob(events, scratch, quarantine, **options)
    return histories.write_histories(job, tmp_path / "out", vocabulary=vocabulary)


def read_back(tmp_path: Path, **config: Any) -> dict[int, list[tuple[Any, ...]]]:
    """Events by user: original item key, time and features."""
    keys = pl.read_parquet(tmp_path / "out" / "vocabulary.parquet")["key"].to_list()
    result = {}
    for batch in loader(tmp_path / "out", order="log", **config):
        offsets = batch.history.offsets.tolist()
        features = [batch.history[name].tolist() for name in config.get("columns", ())]
        for i, user in enumerate(batch.scalars["user_id"].tolist()):
            span = slice(offsets[i], offsets[i + 1])
            items = [keys[item] for item in batch.history["item_id"][span].tolist()]
            result[user] = list(
                zip(items, batch.history["timestamp"][span].tolist(), *(f[span] for f in features), strict=True)
            )
    return result


def log_of(rng: np.random.Generator, users: int = 40, events: int = 900) -> list[tuple[int, int, int, int]]:
    """(user, item, rating, time), unordered and with ties in time."""
    columns = [
        rng.integers(1, users + 1, events),
        rng.integers(1, 200, events) * 7,
        rng.integers(1, 6, events),
        rng.integers(0, 300, events),
    ]
    return [tuple(map(int, row)) for row in np.stack(columns, axis=1)]  # type: ignore[misc]


def expected(log: list[tuple[int, int, int, int]]) -> dict[int, list[tuple[Any, ...]]]:
    result: dict[int, list[tuple[Any, ...]]] = {}
    for user, item, rating, time in sorted(
        log, key=lambda event: (event[0], event[3])
    ):  # stable: ties keep their order
        result.setdefault(user, []).append((item, time, rating))
    return result


LOG = log_of(np.random.default_rng(5))
CSV = "userId,movieId,rating,timestamp\n" + "".join(",".join(map(str, row)) + "\n" for row in LOG)
DAT = "".join("::".join(map(str, row)) + "\n" for row in LOG)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def archive(path: Path, member: str, text: str) -> Path:
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("../../elsewhere/README", "not this")
        zipped.writestr(member, text)
    return path


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("ml-1m", lambda t: archive(t / "ml-1m.zip", "ml-1m/ratings.dat", DAT)),
        ("ml-20m", lambda t: archive(t / "ml-20m.zip", "ml-20m/ratings.csv", CSV)),
        ("ml-latest", lambda t: write(t / "ratings.csv", CSV)),
    ],
)
@pytest.mark.parametrize("memory", [1 << 30, 50_000])
def test_movielens_is_sorted_by_user_and_time_and_keeps_ties(tmp_path: Path, name: str, make: Any, memory: int) -> None:
    done = run(tmp_path, name, [make(tmp_path)], memory=memory)
    assert (done.users, done.events) == (len({e[0] for e in LOG}), len(LOG))
    assert read_back(tmp_path, columns=("rating",)) == expected(LOG)
    assert not (tmp_path.parent / "elsewhere").exists()


def test_rows_are_sorted_by_last_event_with_any_number_of_buckets(tmp_path: Path) -> None:
    run(tmp_path, "ml-latest", [write(tmp_path / "r.csv", CSV)], memory=30_000)
    last = [
        batch.history["timestamp"][end - 1].item()
        for batch in loader(tmp_path / "out", order="log")
        for end in batch.history.offsets[1:].tolist()
    ]
    assert last == sorted(last)


def test_lists_and_pairs_of_items_are_one_format(tmp_path: Path) -> None:
    text = "7 30 10 20\n8 10\n\n9 20 \n7 40\n5\n"
    done = run(tmp_path, "amazon", [write(tmp_path / "list.txt", text)])
    assert (done.users, done.items, done.events) == (3, 4, 6)
    assert read_back(tmp_path) == {7: [(30, 0), (10, 1), (20, 2), (40, 3)], 8: [(10, 0)], 9: [(20, 0)]}


def test_event_logs_are_read_from_csv_and_parquet(tmp_path: Path) -> None:
    frame = pl.DataFrame(
        {
            "who": ["b", "a", "b"],
            "sku": ["x", "y", "007"],
            "at": ["2026-01-02T00:00:00", "2026-01-01T00:00:00", "2026-01-01T00:00:00"],
            "price": [1.5, 2.5, 3.5],
        }
    )
    columns = LogColumns("who", "sku", "at", (FeatureColumn("price"),))
    frame.write_csv(tmp_path / "log.csv", separator=";")
    frame.with_columns(pl.col("at").str.to_datetime()).write_parquet(tmp_path / "log.parquet")
    with gzip.open(tmp_path / "log.csv.gz", "wb") as packed:
        packed.write((tmp_path / "log.csv").read_bytes())
    expected_rows = {0: [("y", 1767225600, 2.5)], 1: [("007", 1767225600, 3.5), ("x", 1767312000, 1.5)]}
    for source in ("log.csv", "log.parquet", "log.csv.gz"):
        folder = tmp_path / source.replace(".", "-")
        folder.mkdir()
        run(folder, "events", [tmp_path / source], columns=columns, style=CsvStyle(";"))
        assert read_back(folder, columns=("price",)) == expected_rows, source
        assert pl.read_parquet(folder / "out" / "users.parquet")["key"].to_list() == ["a", "b"]


def test_quotes_inside_fields_lose_no_line(tmp_path: Path) -> None:
    text = 'u;i;t\n"1";"\\"007";"1"\n' + "".join(f'"{n}";"k{n}";"5"\n' for n in range(2, 50))
    done = run(
        tmp_path, "events", [write(tmp_path / "q.csv", text)], columns=LogColumns("u", "i", "t"), style=CsvStyle(";")
    )
    assert done.events == 49


BAD_LINES = "user_id,item_id,timestamp\n1,5,10\n1,6,soon\n2,7,11\n,8,12\n3,9\n3,9,13,14\n"


def test_bad_lines_stop_the_import_with_their_location(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 fields instead of 3") as caught:
        run(tmp_path, "events", [write(tmp_path / "log.csv", BAD_LINES)])
    assert caught.value.where == "log.csv, line 6"
    assert not (tmp_path / "out").exists()


def test_bad_lines_can_be_counted_and_skipped(tmp_path: Path) -> None:
    quarantine = Quarantine("skip", tmp_path / "bad.jsonl")
    done = run(tmp_path, "events", [write(tmp_path / "log.csv", BAD_LINES)], quarantine=quarantine)
    assert (done.users, done.events) == (2, 2)
    assert quarantine.counts == {"malformed line": 2, "incomplete event": 2}
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 4


def test_a_later_log_keeps_the_ids_of_an_earlier_vocabulary(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    run(first, "amazon", [write(first / "a.txt", "1 a b c\n")])
    done = run(second, "amazon", [write(second / "b.txt", "1 c d a d\n")], vocabulary=first / "out")
    assert (done.items, done.unknown_events) == (3, 2)
    reading = loader(second / "out", oov_rows=4)
    (batch,) = list(reading)
    items = batch.history["item_id"].tolist()
    assert (items[0], items[2]) == (2, 0)
    assert items[1] == items[3]
    assert 3 <= items[1] < 7
    assert reading.unknown["item_id"] == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ml-1m", None, "no such file"),
        ("ml-latest", "a,b\n1,2\n", "no column 'userId'"),
        ("events", "", "file is empty"),
        ("events", "user_id,item_id,timestamp\n", "no usable event"),
    ],
)
def test_an_unusable_log_is_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    source = tmp_path / "log.csv" if text is None else write(tmp_path / "log.csv", text)
    with pytest.raises(DataError, match=message) as caught:
        run(tmp_path, name, [source])
    assert caught.value.where
    assert caught.value.remedy


def test_broken_archives_and_unknown_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(DataError, match="archive cannot be read"):
        run(tmp_path, "ml-1m", [tmp_path / "x.zip"])
    with pytest.raises(UsageError, match="ml-1n"):
        importers.open_log("ml-1n", importers.LogSpec([], tmp_path, Quarantine()))


@pytest.mark.parametrize(
    ("name", "files", "options", "counts"),
    [
        ("ml-1m", ["ml-1m/ml-1m.zip"], {}, (6_040, 3_706, 1_000_209)),
        ("ml-latest", ["ml-latest-small/ratings.csv"], {}, (671, 9_066, 100_004)),
        ("amazon", ["amazon-games/Video.txt"], {}, (31_013, 23_715, 287_107)),
        ("amazon", ["amazon-beauty/Beauty.txt"], {}, (22_363, 12_101, 198_502)),
        ("amazon", ["amazon-sports/Sports_and_Outdoors.txt"], {}, (35_598, 18_357, 296_337)),
        ("amazon", ["amazon-toys/Toys_and_Games.txt"], {}, (19_412, 11_924, 167_597)),
        ("amazon", ["gowalla/train.txt", "gowalla/valid.txt", "gowalla/test.txt"], {}, (29_858, 40_981, 1_027_370)),
        ("amazon", ["wikipedia/wikipedia.txt"], {}, (8_227, 1_000, 157_474)),
        (
            "events",
            ["ml-100k/ml-100k.inter"],
            {"columns": LogColumns("user_id:token", "item_id:token", "timestamp:float"), "style": CsvStyle("\t")},
            (943, 1_682, 100_000),
        ),
        (
            "events",
            ["book-crossing/BX-Book-Ratings.csv.gz"],
            {
                "columns": LogColumns("User-ID", "ISBN", None, (FeatureColumn("Book-Rating"),)),
                "style": CsvStyle(";", '"', "latin-1"),
            },
            (105_283, 340_556, 1_149_780),
        ),
    ],
)
def test_public_logs_have_their_published_counts(
    tmp_path: Path, name: str, files: list[str], options: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    if not PUBLIC.is_dir():
        pytest.skip("public logs are not here: set FREESCALE_TEST_DATA to a folder that holds them")
    done = run(tmp_path, name, [PUBLIC / file for file in files], **options)
    assert (done.users, done.items, done.events) == counts
    assert sum(len(batch.history["item_id"]) for batch in loader(tmp_path / "out", global_batch=4096)) == counts[2]


def test_an_undecodable_malformed_line_is_an_error_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.bin").write_bytes(b"1 2\n\xb5\x01\x02\n")
    assert main(["data", "import", "amazon", str(tmp_path / "log.bin"), str(tmp_path / "data")]) == 3
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    assert "check the file, --separator and --encoding" in printed


def test_the_current_folder_is_refused_as_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n1,2,3\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for target in (".", "", "../empty"):
        assert main(["data", "import", "events", "../log.csv", target]) == 3
        assert "the target is the current folder" in capsys.readouterr().err
