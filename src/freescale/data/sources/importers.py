"""Public data sets and plain event logs, opened as one lazy table of events."""

import shutil
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from freescale.data.sources import times
from freescale.data.sources.events import FILE, NUMBER, ORDER, Columns, Events
from freescale.data.sources.files import CsvStyle, expand, one_kind
from freescale.data.sources.text import TextFile
from freescale.data.store.columns import REQUIRED, is_candidate
from freescale.data.store.quarantine import Quarantine
from freescale.data.store.writer import output_errors
from freescale.errors import DataError, UsageError, nearest, reason
from freescale.log import warning_once

_KUAIRAND = Columns("user_id", "video_id", "time_ms", ("is_click", "long_view", "play_time_ms", "duration_ms"))
_MOVIELENS = Columns("userId", "movieId", "timestamp", ("rating",))
_ML1M = ("user", "_1", "item", "_2", "rating", "_3", "time")  # "::" is read as two separators
_SAMPLE = 10_000
_OTHER_WAY_TO_WRITE_A_NUMBER = r"^(\+|-?0\d|-0$)"


class Job(NamedTuple):
    """What every format gets."""

    sources: Sequence[Path]
    """Files, folders and globs."""
    scratch: Path
    """A folder for unpacked files."""
    quarantine: Quarantine
    columns: Columns = Columns()
    style: CsvStyle = CsvStyle()
    unit: times.Unit = "auto"

    def text(self, number: int, source: Path) -> TextFile:
        """One of the files, as text."""
        return TextFile(source, self.scratch / f"text-{number}.parquet", self.quarantine, name=self.name(number))

    def name(self, number: int) -> str:
        """A file in an error: folders of a log often hold files of the same name."""
        source = self.sources[number]
        return source.name if len(self.sources) == 1 else str(source)

    def of(self, columns: Columns, unit: times.Unit) -> "Job":
        """The same for a format whose columns are known. Labels are read instead of its features."""
        labels = self.columns.labels
        return self._replace(unit=unit, columns=columns._replace(features=(), labels=labels) if labels else columns)


def open_log(name: str, job: Job) -> Events:
    """Open a log in a named format."""
    if name not in FORMATS:
        raise UsageError(f"no format is called '{name}'", remedy=nearest(name, FORMATS))
    job = job._replace(sources=expand(job.sources))
    try:
        return FORMATS[name](job)
    except DataError as error:
        error.where = error.where or ", ".join(map(str, job.sources))
        raise
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, UnicodeError, LookupError) as error:
        where, remedy = ", ".join(map(str, job.sources)), "check its format and --encoding, or fetch it again"
        raise DataError(f"the log cannot be read: {reason(error)}", where=where, remedy=remedy) from error


def _ml1m(job: Job) -> Events:
    columns, style = Columns("user", "item", "time", ("rating",)), CsvStyle(":", "")
    return _unpacked(job.of(columns, "s"), "ratings.dat", style, names=_ML1M)


def _movielens(job: Job) -> Events:
    return _unpacked(job.of(_MOVIELENS, "s"), "ratings.csv", CsvStyle(","))


def _kuairand(job: Job) -> Events:
    job = job.of(_KUAIRAND, "ms")
    files = [job.text(number, source) for number, source in enumerate(job.sources)]
    return _events(job, [file.read_csv(CsvStyle(","), job.columns.names) for file in files])


def _lists(job: Job) -> Events:
    """Lines of `user item item ...`; a line per event is the shortest of them."""
    line = pl.col("line").str.strip_chars()
    words = line.str.split(" ")
    parts = []
    for number, source in enumerate(job.sources):
        lines = job.text(number, source).read_lines()
        users = lines.filter(line != "").select(NUMBER, user=words.list.first(), item=words.list.slice(1))
        parts.append(users.explode("item").filter(pl.col("item").is_not_null()))  # a user may have no items
    return _events(job.of(Columns("user", "item", None), "auto"), parts)


def _generic(job: Job) -> Events:
    """Files whose columns the user names, of any one kind."""
    kind, names = one_kind(job.sources, job.style.encoding), job.columns.names
    if kind == "parquet":
        return _events(job, [_parquet(source, names) for source in job.sources], parquet=True)
    files = [job.text(number, source) for number, source in enumerate(job.sources)]
    if kind == "jsonl":
        return _events(job, [file.read_json(job.style.encoding, names) for file in files])
    return _events(job, [file.read_csv(job.style, names) for file in files])


FORMATS: dict[str, Callable[[Job], Events]] = {
    "ml-1m": _ml1m,
    "ml-20m": _movielens,
    "ml-latest": _movielens,
    "amazon": _lists,
    "kuairand": _kuairand,
    "events": _generic,
}


def _parquet(source: Path, names: Sequence[str]) -> pl.LazyFrame:
    rows = pl.scan_parquet(source)
    present = rows.collect_schema().names()
    for name in names:
        if name not in present:
            raise DataError(f"the log has no column '{name}'", where=str(source), remedy=nearest(name, present))
    return rows.select(names).with_row_index(NUMBER)


def _unpacked(job: Job, member: str, style: CsvStyle, names: Sequence[str] = ()) -> Events:
    """A text file that may be packed in an archive."""
    parts = []
    for number, source in enumerate(job.sources):
        path = _member(source, member, job.scratch) if source.suffix == ".zip" else source
        parts.append(job.text(number, path).read_csv(style, job.columns.names, names=names))
    return _events(job, parts)


def _events(job: Job, parts: Sequence[pl.LazyFrame], *, parquet: bool = False) -> Events:
    """Give the columns their common names and types. What does not convert becomes null."""
    columns = job.columns
    _refuse_names(columns)
    numbered = [part.with_columns(pl.lit(file, pl.Int32).alias(FILE)) for file, part in enumerate(parts)]
    table = pl.concat(numbered, how="vertical_relaxed")
    sample = table.select(columns.names).head(_SAMPLE).collect()
    ticks, time = 1, []
    if columns.time is None:
        warning_once("the log has no time: the order of its lines is taken for it, and timestamps are positions")
    else:
        clock = times.clock(table, sample[columns.time], job.unit)
        ticks, time = clock.per_second, [clock.ticks.alias("timestamp")]
    chosen = table.select(
        _key(sample[columns.user]).alias("user_id"),
        _key(sample[columns.item]).alias("item_id"),
        *time,
        *(_feature(sample[name]) for name in columns.features),
        *(_label(sample[name]) for name in columns.labels),
        FILE,
        pl.col(NUMBER).cast(pl.Int64),
    )
    order = pl.col(ORDER).cast(pl.Int64)
    files = tuple(job.name(number) for number in range(len(job.sources)))
    return Events(chosen.with_row_index(ORDER).with_columns(order), files, "row" if parquet else "line", ticks)


def _refuse_names(columns: Columns) -> None:
    """Features keep their names, so they may not be those that a data set gives a meaning to."""
    for name in columns.features:
        if name in REQUIRED or is_candidate(name) or name.startswith("_"):
            remedy = "rename that column, or leave it out of --features"
            raise DataError(f"a feature cannot be called '{name}', which means something else", remedy=remedy)


def _key(sample: pl.Series) -> pl.Expr:
    """Keys are integers where the whole sample is, and none would lose a leading zero; else text."""
    column, text = pl.col(sample.name), sample.cast(pl.String)
    if sample.dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if not text.count() or not text.cast(pl.Int64, strict=False).cast(pl.String).equals(text):
        return column.cast(pl.String, strict=False)
    text = column.cast(pl.String)
    return pl.when(~text.str.contains(_OTHER_WAY_TO_WRITE_A_NUMBER)).then(text.cast(pl.Int64, strict=False))


def _feature(sample: pl.Series) -> pl.Expr:
    """A number as it is stored; text becomes integers where it loses nothing by it, else 32-bit floats."""
    column = pl.col(sample.name)
    if sample.dtype.is_numeric() or sample.dtype == pl.Boolean:
        return column
    whole, real = column.cast(pl.Int64, strict=False), column.cast(pl.Float32, strict=False)
    if sample.dtype != pl.String or (sample.count() and not _kept(sample, real)):
        remedy = "leave it out, or give it numbers in the log"
        raise DataError(f"feature '{sample.name}' is not numeric", remedy=remedy)
    return whole if _kept(sample, whole) == _kept(sample, real) else real


def _label(sample: pl.Series) -> pl.Expr:
    """A number from 0 to 1; `true` and `false` are 1 and 0."""
    column = pl.col(sample.name)
    if sample.dtype == pl.String:
        flags = {"true": "1", "True": "1", "TRUE": "1", "false": "0", "False": "0", "FALSE": "0"}
        column = column.replace(flags)
    elif not (sample.dtype.is_numeric() or sample.dtype in (pl.Boolean, pl.Null)):
        raise DataError(f"label '{sample.name}' has type {sample.dtype}", remedy="give it numbers from 0 to 1")
    number = column.cast(pl.Float32, strict=False)
    name = sample.name if sample.name.startswith("label_") else f"label_{sample.name}"
    return pl.when(number.is_between(0, 1)).then(number).alias(name)


def _kept(sample: pl.Series, way: pl.Expr) -> int:
    """How many values of a sample convert this way; the others are bad rows."""
    return int(sample.to_frame().select(way.count()).item())


def _member(source: Path, name: str, scratch: Path) -> Path:
    """Take one file out of an archive, by its last name and into a name of ours, so that no path can lead elsewhere."""
    try:
        with zipfile.ZipFile(source) as archive:
            found = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] == name]
            if not found:
                remedy = "check that it is the right download"
                raise DataError(f"the archive holds no {name}", where=str(source), remedy=remedy)
            target = scratch / f"unpacked-{name}"
            with archive.open(found[0]) as packed, output_errors(scratch), target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
            return target
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        what = f"the archive cannot be read: {error}"
        raise DataError(what, where=str(source), remedy="download it again") from error
