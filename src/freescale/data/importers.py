"""Log formats: open public data sets and generic event logs, and copy existing histories."""

import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa

from freescale.data import writer
from freescale.data.dataset import Dataset
from freescale.data.event_log import LOG_FILE, LOG_NUMBER, LOG_ORDER, EventLog, LogColumns, TimeUnit, infer_time_parser
from freescale.data.histories import ImportSummary
from freescale.data.synthetic import list_array
from freescale.data.text_log import CsvStyle, TextLog, detect_common_format, find_log_files
from freescale.data.validation import CANDIDATE, REQUIRED, Quarantine, RowGroup, is_candidate
from freescale.data.writer import output_errors
from freescale.errors import DataError, UsageError, reason, suggest
from freescale.log import warning_once

_KUAIRAND = LogColumns("user_id", "video_id", "time_ms", ("is_click", "long_view", "play_time_ms", "duration_ms"))
_MOVIELENS = LogColumns("userId", "movieId", "timestamp", ("rating",))
_ML1M = ("user", "_1", "item", "_2", "rating", "_3", "time")  # "::" is parsed as two separators
_SAMPLE = 10_000
_NONCANONICAL_NUMBER = r"^(\+|-?0\d|-0$)"


class LogSpec(NamedTuple):
    """Where a log is and how to read it."""

    sources: Sequence[Path]
    """Files, folders and globs."""
    scratch: Path
    """Folder for unpacked files."""
    quarantine: Quarantine
    columns: LogColumns = LogColumns()
    style: CsvStyle = CsvStyle()
    unit: TimeUnit = "auto"

    def text(self, number: int, source: Path) -> TextLog:
        """Text reader for one of the files."""
        return TextLog(source, self.scratch / f"text-{number}.parquet", self.quarantine, name=self.name(number))

    def name(self, number: int) -> str:
        """File name for messages; with its folder if there are several files, which often share a name."""
        source = self.sources[number]
        return source.name if len(self.sources) == 1 else str(source)

    def with_columns(self, columns: LogColumns, unit: TimeUnit) -> "LogSpec":
        """Copy for a format with fixed columns. If there are labels, they replace the features."""
        labels = self.columns.labels
        return self._replace(unit=unit, columns=columns._replace(features=(), labels=labels) if labels else columns)


def open_log(name: str, job: LogSpec) -> EventLog:
    """Open a log in a named format."""
    if name not in FORMATS:
        raise UsageError(f"no format is called '{name}'", remedy=suggest(name, FORMATS))
    job = job._replace(sources=find_log_files(job.sources))
    try:
        return FORMATS[name](job)
    except DataError as error:
        error.where = error.where or ", ".join(map(str, job.sources))
        raise
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, UnicodeError, LookupError) as error:
        where, remedy = ", ".join(map(str, job.sources)), "check its format and --encoding, or fetch it again"
        raise DataError(f"the log cannot be read: {reason(error)}", where=where, remedy=remedy) from error


def _ml1m(job: LogSpec) -> EventLog:
    columns, style = LogColumns("user", "item", "time", ("rating",)), CsvStyle(":", "")
    return _unpacked(job.with_columns(columns, "s"), "ratings.dat", style, names=_ML1M)


def _movielens(job: LogSpec) -> EventLog:
    return _unpacked(job.with_columns(_MOVIELENS, "s"), "ratings.csv", CsvStyle(","))


def _kuairand(job: LogSpec) -> EventLog:
    job = job.with_columns(_KUAIRAND, "ms")
    files = [job.text(number, source) for number, source in enumerate(job.sources)]
    return _event_log(job, [file.read_csv(CsvStyle(","), job.columns.names) for file in files])


def _lists(job: LogSpec) -> EventLog:
    """Lines of `user item item ...`, or one line per event."""
    line = pl.col("line").str.strip_chars()
    words = line.str.split(" ")
    parts = []
    for number, source in enumerate(job.sources):
        lines = job.text(number, source).read_lines()
        users = lines.filter(line != "").select(LOG_NUMBER, user=words.list.first(), item=words.list.slice(1))
        parts.append(users.explode("item").filter(pl.col("item").is_not_null()))  # users without items
    return _event_log(job.with_columns(LogColumns("user", "item", None), "auto"), parts)


def _generic(job: LogSpec) -> EventLog:
    """Files of one format with user-defined columns."""
    kind, names = detect_common_format(job.sources, job.style.encoding), job.columns.names
    if kind == "parquet":
        return _event_log(job, [_parquet(source, names) for source in job.sources], parquet=True)
    files = [job.text(number, source) for number, source in enumerate(job.sources)]
    if kind == "jsonl":
        return _event_log(job, [file.read_json(job.style.encoding, names) for file in files])
    return _event_log(job, [file.read_csv(job.style, names) for file in files])


FORMATS: dict[str, Callable[[LogSpec], EventLog]] = {
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
            raise DataError(f"the log has no column '{name}'", where=str(source), remedy=suggest(name, present))
    return rows.select(names).with_row_index(LOG_NUMBER)


def _unpacked(job: LogSpec, member: str, style: CsvStyle, names: Sequence[str] = ()) -> EventLog:
    """Read a text file, possibly from a zip archive."""
    parts = []
    for number, source in enumerate(job.sources):
        path = _member(source, member, job.scratch) if source.suffix == ".zip" else source
        parts.append(job.text(number, path).read_csv(style, job.columns.names, names=names))
    return _event_log(job, parts)


def _event_log(job: LogSpec, parts: Sequence[pl.LazyFrame], *, parquet: bool = False) -> EventLog:
    """Rename and convert the columns. Values that do not convert become null."""
    columns = job.columns
    _refuse_names(columns)
    numbered = [part.with_columns(pl.lit(file, pl.Int32).alias(LOG_FILE)) for file, part in enumerate(parts)]
    table = pl.concat(numbered, how="vertical_relaxed")
    sample = table.select(columns.names).head(_SAMPLE).collect()
    ticks, time = 1, []
    if columns.time is None:
        warning_once("the log has no time column: events are ordered by line, and timestamps are positions")
    else:
        parser = infer_time_parser(table, sample[columns.time], job.unit)
        ticks, time = parser.per_second, [parser.ticks.alias("timestamp")]
    selected = table.select(
        _key(sample[columns.user]).alias("user_id"),
        _key(sample[columns.item]).alias("item_id"),
        *time,
        *(_feature(sample[name]) for name in columns.features),
        *(_label(sample[name]) for name in columns.labels),
        LOG_FILE,
        pl.col(LOG_NUMBER).cast(pl.Int64),
    )
    order = pl.col(LOG_ORDER).cast(pl.Int64)
    files = tuple(job.name(number) for number in range(len(job.sources)))
    return EventLog(selected.with_row_index(LOG_ORDER).with_columns(order), files, "row" if parquet else "line", ticks)


def _refuse_names(columns: LogColumns) -> None:
    """Refuse features with reserved column names."""
    for name in columns.features:
        if name in REQUIRED or is_candidate(name) or name.startswith("_"):
            remedy = "rename that column, or leave it out of --features"
            raise DataError(f"a feature cannot be called '{name}': the name is reserved", remedy=remedy)


def _key(sample: pl.Series) -> pl.Expr:
    """Integer keys if the whole sample is integers without leading zeros or plus signs; else text."""
    column, text = pl.col(sample.name), sample.cast(pl.String)
    if sample.dtype.is_integer():
        return column.cast(pl.Int64, strict=False)
    if not text.count() or not text.cast(pl.Int64, strict=False).cast(pl.String).equals(text):
        return column.cast(pl.String, strict=False)
    text = column.cast(pl.String)
    return pl.when(~text.str.contains(_NONCANONICAL_NUMBER)).then(text.cast(pl.Int64, strict=False))


def _feature(sample: pl.Series) -> pl.Expr:
    """Numeric columns as stored; text as integers if that loses nothing, else as 32-bit floats."""
    column = pl.col(sample.name)
    if sample.dtype.is_numeric() or sample.dtype == pl.Boolean:
        return column
    whole, real = column.cast(pl.Int64, strict=False), column.cast(pl.Float32, strict=False)
    if sample.dtype != pl.String or (sample.count() and not _convertible(sample, real)):
        remedy = "remove it from --features, or convert it to numbers"
        raise DataError(f"feature '{sample.name}' is not numeric", remedy=remedy)
    return whole if _convertible(sample, whole) == _convertible(sample, real) else real


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


def _convertible(sample: pl.Series, conversion: pl.Expr) -> int:
    """Number of values of a sample that a conversion accepts."""
    return int(sample.to_frame().select(conversion.count()).item())


def _member(source: Path, name: str, scratch: Path) -> Path:
    """Extract one member of an archive by its base name, to a fixed file name, so that no path can escape."""
    try:
        with zipfile.ZipFile(source) as archive:
            entries = [entry for entry in archive.namelist() if entry.rsplit("/", 1)[-1] == name]
            if not entries:
                remedy = "check that it is the right download"
                raise DataError(f"the archive holds no {name}", where=str(source), remedy=remedy)
            target = scratch / f"unpacked-{name}"
            with archive.open(entries[0]) as packed, output_errors(scratch), target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
            return target
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        what = f"the archive cannot be read: {error}"
        raise DataError(what, where=str(source), remedy="download it again") from error


def copy_histories(
    folder: Path, target: str | Path, *, features: Sequence[str], quarantine: Quarantine
) -> ImportSummary:
    """Validate and copy Parquet histories in their order. The vocabulary size is the largest item id plus 1."""
    dataset = Dataset(str(folder), features=features, quarantine=quarantine)
    rows, events, items = 0, 0, 0
    users: list[np.ndarray] = []
    for group in _row_groups(dataset):
        rows, events = rows + int(group.usable.sum()), events + len(group.columns["item_id"].values)
        ids = [group.columns[name].values for name in ("item_id", CANDIDATE) if name in group.columns]
        items = max(items, *(int(values.max(initial=-1)) + 1 for values in ids))
        users.append(np.unique(group.columns["user_id"].values[group.usable]))
    if not rows:
        raise DataError("no usable history", where=str(folder), remedy="check the columns of its files")
    size = writer.rows_per_group(rows, events, len(dataset.columns))
    with writer.atomic_folder(target) as created:
        tables = map(_table, _row_groups(dataset))
        writer.write_dataset(created, tables, rows_per_group=size, items=items, note=f"copied from {folder.name}")
    return ImportSummary(len(np.unique(np.concatenate(users))), items, events, 0, rows)


def _row_groups(dataset: Dataset) -> Iterator[RowGroup]:
    return map(dataset.read_group, range(dataset.layout.groups))


def _table(group: RowGroup) -> pa.Table:
    """The usable rows of a row group."""
    columns = {
        name: pa.array(column.values) if column.offsets is None else list_array(column.offsets, column.values)
        for name, column in group.columns.items()
    }
    return pa.table(columns).filter(pa.array(group.usable))
