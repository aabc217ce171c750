"""Public data sets in their published layout, with the features and labels that they come with.

A side table that is not there is left out: its columns are then absent from the data set.
"""

import shutil
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from freescale.data.event_log import LOG_NUMBER, EventLog, LogColumns
from freescale.data.feature_columns import FeatureColumn, SideTable
from freescale.data.log_reader import (
    LogSpec,
    SideTableSpec,
    scan_parquet,
    to_event_log,
    to_side_table,
    with_side_tables,
)
from freescale.data.text_log import CsvStyle, find_log_files
from freescale.data.writer import output_errors
from freescale.errors import DataError
from freescale.log import info_once

_ML1M_FIELDS = ("user", "_1", "item", "_2", "rating", "_3", "time")  # "::" is parsed as two separators
_ML1M = LogColumns("user", "item", "time", (FeatureColumn("rating", "number"),), event_labels=("rating",))
_ML1M_USERS = tuple(FeatureColumn(name, "id") for name in ("gender", "age", "occupation", "zip"))
_ML1M_ITEMS = (FeatureColumn("genres", "set"), FeatureColumn("year", "number"))
_YEAR = r"\((\d{4})\)\s*$"
_MOVIELENS = LogColumns(
    "userId", "movieId", "timestamp", (FeatureColumn("rating", "number"),), event_labels=("rating",)
)

_KUAIRAND_LABELS = ("is_click", "is_like", "is_follow", "long_view")
_KUAIRAND = LogColumns(
    "user_id",
    "video_id",
    "time_ms",
    (
        *(FeatureColumn(n, "number") for n in (*_KUAIRAND_LABELS, "play_time_ms", "duration_ms")),
        FeatureColumn("tab", "id"),
    ),
    event_labels=_KUAIRAND_LABELS,
)
_KUAIRAND_ITEMS = (
    *(FeatureColumn(name, "id") for name in ("author_id", "video_type", "upload_type", "music_id")),
    FeatureColumn("tag", "set", ","),
)
_RANGES = ("follow_user_num_range", "fans_user_num_range", "friend_user_num_range", "register_days_range")
_FLAGS = ("is_lowactive_period", "is_live_streamer", "is_video_author")
_ENCODED = tuple(f"onehot_feat{number}" for number in range(18))
_KUAIRAND_USERS = tuple(FeatureColumn(name, "id") for name in ("user_active_degree", *_FLAGS, *_RANGES, *_ENCODED))

YAMBDA_ACTIONS = ("listen", "full_listen", "like", "dislike", "organic")
"""Actions of Yambda: bit i of `action` is action i."""
_FULL_LISTEN = 50  # percent of the track, as in the benchmark of the data set
_YAMBDA_LOGS = {"listens": "listen", "likes": "like", "dislikes": "dislike"}
_YAMBDA_NUMBERS = ("played_ratio_pct", "track_length_seconds")
_YAMBDA = LogColumns(
    "uid",
    "item_id",
    "timestamp",
    (
        FeatureColumn("action", "bits"),
        *(FeatureColumn(name, "number") for name in ("is_organic", *_YAMBDA_NUMBERS)),
    ),
    event_labels=("full_listen", "like"),
)
_YAMBDA_MAPPINGS = {"artist_id": "artist_item_mapping", "album_id": "album_item_mapping"}


def ml1m(job: LogSpec) -> EventLog:
    """MovieLens-1M: ratings.dat with users.dat and movies.dat, in their archive or beside each other."""
    style = CsvStyle(":", "")
    log = _unpacked(job.with_columns(_ML1M, "s"), "ratings.dat", style, names=_ML1M_FIELDS)
    if job.columns.labels:  # impressions: the events have the features
        return log
    title = pl.col("title").str.extract(_YEAR, 1)
    users = _dat(job, "users.dat", ("key", *(feature.name for feature in _ML1M_USERS)))
    items = _dat(job, "movies.dat", ("key", "title", "genres"), year=title)
    return log._replace(
        users=users and to_side_table(*users, key="key", features=_ML1M_USERS),
        items=items and to_side_table(*items, key="key", features=_ML1M_ITEMS),
    )


def movielens(job: LogSpec) -> EventLog:
    """Later MovieLens data sets: ratings.csv, possibly in an archive."""
    return _unpacked(job.with_columns(_MOVIELENS, "s"), "ratings.csv", CsvStyle(","))


def kuairand(job: LogSpec) -> EventLog:
    """KuaiRand: standard logs, with the features of videos and users if their files are given or beside the log."""
    job = job.with_columns(_KUAIRAND, "ms")._replace(style=CsvStyle(","))
    files = [job.text(number, source) for number, source in enumerate(job.sources)]
    log = to_event_log(job, [file.read_csv(job.style, job.columns.uses) for file in files])
    if job.columns.labels:
        return log
    items = _beside(job, job.items.files, "video_features_basic*.csv", "--items")
    users = _beside(job, job.users.files, "user_features*.csv", "--users")
    tables = {
        "items": SideTableSpec(items, _KUAIRAND_ITEMS if items else ()),
        "users": SideTableSpec(users, _KUAIRAND_USERS if users else ()),
    }
    return with_side_tables(job._replace(**tables), log)


def yambda(job: LogSpec) -> EventLog:
    """Yambda: flat Parquet files of listens, likes and dislikes as one log, with the artists and albums of a track.

    Label `full_listen` is there for listens, label `like` for likes (1) and dislikes (0).
    """
    job = job.with_columns(_YAMBDA, "s")
    job = job._replace(sources=_yambda_files(job.sources))
    log = to_event_log(job, [_yambda_part(source) for source in job.sources], "parquet")
    return log._replace(items=_yambda_items(job))


def _yambda_files(sources: Sequence[Path]) -> list[Path]:
    """Files of the log in a fixed order: a like follows the listen of the same time."""
    files: dict[str, Path] = {}
    for source in (source for source in sources if source.stem in _YAMBDA_LOGS):
        if source.stem in files:
            what = f"there are several files called {source.name}: {files[source.stem]} and {source}"
            raise DataError(what, where=str(source), remedy="give the folder of one size, such as flat/50m")
        files[source.stem] = source
    if "listens" not in files:
        remedy = "give listens.parquet, and likes.parquet and dislikes.parquet, of one size such as flat/50m"
        raise DataError("there is no listens.parquet", where=", ".join(map(str, sources)), remedy=remedy)
    return [files[name] for name in _YAMBDA_LOGS if name in files]


def _yambda_part(source: Path) -> pl.LazyFrame:
    kind = _YAMBDA_LOGS[source.stem]
    uses = {"uid": "the user", "timestamp": "the time", "item_id": "the item", "is_organic": "feature 'action'"}
    numbers = _YAMBDA_NUMBERS if kind == "listen" else ()
    events = scan_parquet(source, uses | {name: f"feature '{name}'" for name in numbers})
    if kind == "listen":
        full = (pl.col("played_ratio_pct") >= _FULL_LISTEN).cast(pl.Int64)
        labels = {"full_listen": full, "like": pl.lit(None, pl.Int64)}
    else:
        events = events.with_columns(pl.lit(None, pl.Int64).alias(name) for name in _YAMBDA_NUMBERS)
        labels = {"full_listen": pl.lit(None, pl.Int64), "like": pl.lit(int(kind == "like"), pl.Int64)}
    happened = {kind: pl.lit(1, pl.Int64), "organic": pl.col("is_organic").cast(pl.Int64)}
    happened |= {"full_listen": labels["full_listen"].fill_null(0)} if kind == "listen" else {}
    action = pl.sum_horizontal(bit * 2 ** YAMBDA_ACTIONS.index(name) for name, bit in happened.items())
    return events.with_columns(action=action, **labels).select(LOG_NUMBER, *_YAMBDA.uses)


def _yambda_items(job: LogSpec) -> SideTable | None:
    """The artist and the album of each track: the first by number, if it has several."""
    mappings = {column: _yambda_mapping(job, f"{stem}.parquet") for column, stem in _YAMBDA_MAPPINGS.items()}
    found = {column: path for column, path in mappings.items() if path is not None}
    if not found:
        if job.items.files:
            remedy = f"give {' or '.join(f'{stem}.parquet' for stem in _YAMBDA_MAPPINGS.values())}"
            what = "--items names no mapping of items to artists or albums"
            raise DataError(what, where=", ".join(map(str, job.items.files)), remedy=remedy)
        return None
    tables = []
    for column, path in found.items():
        pairs = scan_parquet(path, {"item_id": "the keys of the items", column: f"feature '{column}'"})
        tables.append(pairs.group_by("item_id").agg(pl.col(column).min()).collect())
    joined = tables[0]
    for table in tables[1:]:
        joined = joined.join(table, on="item_id", how="full", coalesce=True)
    features = tuple(FeatureColumn(column, "id") for column in found)
    parts = [joined.sort("item_id").with_row_index(LOG_NUMBER).lazy()]
    return to_side_table(job.of_files(list(found.values()), "items"), parts, key="item_id", features=features)


def _yambda_mapping(job: LogSpec, name: str) -> Path | None:
    """A mapping among the given files; without any, in the folder of the log or up to two levels above."""
    if job.items.files:
        return next((path for path in find_log_files(job.items.files) if path.name == name), None)
    folders = [folder for source in job.sources for folder in source.absolute().parents[:3]]  # flat/50m/listens.parquet
    found = next((path for folder in folders if (path := folder / name).exists()), None)
    if found is not None:
        info_once(f"features of the items are read from {found}; --items FILE states another file")
    return found


def _beside(job: LogSpec, given: tuple[Path, ...], pattern: str, option: str) -> tuple[Path, ...]:
    """Files of a side table: those given, or the only match of a pattern beside the log."""
    if given:
        return given
    found = sorted({path for source in job.sources for path in source.parent.glob(pattern)})
    if len(found) > 1:
        what = f"several files beside the log match {pattern}: {found[0].name} and {found[1].name}"
        raise DataError(what, where=str(found[0].parent), remedy=f"give the one that belongs to the log: {option} FILE")
    for path in found:
        info_once(f"features are read from {path}; {option} FILE states another file")
    return tuple(found)


def _dat(job: LogSpec, member: str, names: Sequence[str], **more: pl.Expr) -> tuple[LogSpec, list[pl.LazyFrame]] | None:
    """Fields of a file of MovieLens-1M, or None if it is not there. They are separated by "::" and in Latin-1."""
    folder = job.of_files(job.sources, member)
    for source in job.sources:
        path = _member(source, member, folder.scratch) if source.suffix == ".zip" else source.with_name(member)
        if path is None or not path.exists():
            continue
        folder = folder._replace(sources=[path])
        fields = pl.col("line").str.split("::")
        columns = {name: fields.list.get(number, null_on_oob=True) for number, name in enumerate(names)}
        lines = folder.text(0, path).read_lines("latin-1").select(LOG_NUMBER, **columns)
        return folder, [lines.with_columns(**more)]
    return None


def _unpacked(job: LogSpec, member: str, style: CsvStyle, names: Sequence[str] = ()) -> EventLog:
    """Read a text file, possibly from a zip archive."""
    parts = []
    for number, source in enumerate(job.sources):
        path = _member(source, member, job.scratch) if source.suffix == ".zip" else source
        if path is None:
            remedy = "check that it is the right download"
            raise DataError(f"the archive holds no {member}", where=str(source), remedy=remedy)
        parts.append(job.text(number, path).read_csv(style, job.columns.uses, names=names))
    return to_event_log(job, parts)


def _member(source: Path, name: str, scratch: Path) -> Path | None:
    """Extract one member of an archive by its base name, to a fixed file name, so that no path can escape."""
    try:
        with zipfile.ZipFile(source) as archive:
            entries = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] == name]
            if not entries:
                return None
            target = scratch / f"unpacked-{name}"
            with archive.open(entries[0]) as packed, output_errors(scratch), target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
            return target
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        what = f"the archive cannot be read: {error}"
        raise DataError(what, where=str(source), remedy="download it again") from error
