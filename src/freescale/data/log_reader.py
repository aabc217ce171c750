"""Read the files of a log or of a side table, and convert their columns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import polars as pl

from freescale.data.event_log import (
    LOG_FILE,
    LOG_NUMBER,
    LOG_ORDER,
    EventLog,
    LogColumns,
    TimeUnit,
    infer_time_parser,
    usable_events,
)
from freescale.data.feature_columns import (
    KEY,
    SAMPLE,
    FeatureColumn,
    SideTable,
    categories,
    conversion_columns,
    convert_feature,
    convert_key,
    convert_label,
)
from freescale.data.text_log import (
    ColumnUses,
    CsvStyle,
    LogFormat,
    TextLog,
    detect_common_format,
    find_log_files,
    require_columns,
)
from freescale.data.validation import Quarantine
from freescale.errors import DataError
from freescale.log import warning_once


class SideTableSpec(NamedTuple):
    """Where a side table is and which of its columns are features."""

    files: tuple[Path, ...] = ()
    features: tuple[FeatureColumn, ...] = ()


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
    items: SideTableSpec = SideTableSpec()
    """Side table by the key of the item."""
    users: SideTableSpec = SideTableSpec()
    """Side table by the key of the user."""

    def text(self, number: int, source: Path) -> TextLog:
        """Text reader for one of the files."""
        return TextLog(source, self.scratch / f"text-{number}.parquet", self.quarantine, name=self.name(number))

    def name(self, number: int) -> str:
        """File name for messages; with its folder if there are several files, which often share a name."""
        source = self.sources[number]
        return source.name if len(self.sources) == 1 else str(source)

    def with_columns(self, columns: LogColumns, unit: TimeUnit) -> "LogSpec":
        """Copy for a format with fixed columns. If there are labels of impressions, they replace its features."""
        if self.columns.labels:
            columns = columns._replace(features=(), event_labels=(), labels=self.columns.labels)
        return self._replace(unit=unit, columns=columns)

    def of_files(self, files: Sequence[Path], folder: str) -> "LogSpec":
        """Copy for other files, which are unpacked to a folder of their own."""
        scratch = self.scratch / folder
        scratch.mkdir(exist_ok=True)
        return self._replace(sources=files, scratch=scratch)


def read_files(job: LogSpec, columns: ColumnUses) -> tuple[list[pl.LazyFrame], LogFormat]:
    """Columns of every file, with line or row numbers, and the format of the files."""
    kind = detect_common_format(job.sources, job.style.encoding)
    if kind == "parquet":
        return [scan_parquet(source, columns) for source in job.sources], kind
    files = [job.text(number, source) for number, source in enumerate(job.sources)]
    if kind == "jsonl":
        return [file.read_json(job.style.encoding, columns) for file in files], kind
    return [file.read_csv(job.style, columns) for file in files], kind


def scan_parquet(source: Path, columns: ColumnUses) -> pl.LazyFrame:
    """Columns of a Parquet file, with row numbers."""
    rows = pl.scan_parquet(source)
    require_columns(columns, rows.collect_schema().names(), source)
    return rows.select(list(columns)).with_row_index(LOG_NUMBER)


def to_event_log(job: LogSpec, parts: Sequence[pl.LazyFrame], form: LogFormat = "csv") -> EventLog:
    """Rename and convert the columns. Values that do not convert become null and are marked."""
    columns = job.columns
    table = _join_files(parts)
    sample = table.select(list(columns.uses)).head(SAMPLE).collect()
    ticks, time = 1, []
    if columns.time is None:
        warning_once("the log has no time column: events are ordered by line, and timestamps are positions")
    else:
        parser = infer_time_parser(table, sample[columns.time], job.unit)
        ticks, time = parser.per_second, [parser.ticks.alias("timestamp")]
    features = [convert_feature(feature, sample[feature.name], json=form == "jsonl") for feature in columns.features]
    labels = [convert_label(sample[name], optional=False) for name in columns.labels]
    labels += [convert_label(sample[name], optional=True) for name in columns.event_labels]
    selected = table.select(
        convert_key(sample[columns.user]).alias("user_id"),
        convert_key(sample[columns.item]).alias("item_id"),
        *time,
        *conversion_columns([*features, *labels]),
        LOG_FILE,
        pl.col(LOG_NUMBER).cast(pl.Int64),
    )
    order = pl.col(LOG_ORDER).cast(pl.Int64)
    expected = {conversion.name: conversion.expected for conversion in (*features, *labels)}
    log = EventLog(selected.with_row_index(LOG_ORDER).with_columns(order), _names(job), _unit(form), ticks, expected)
    return log._replace(kinds=categories(features))


def with_side_tables(job: LogSpec, log: EventLog) -> EventLog:
    """The log with the tables of its items and users."""
    items = read_side_table(job, job.items, job.columns.item, "items")
    return log._replace(items=items, users=read_side_table(job, job.users, job.columns.user, "users"))


def read_side_table(job: LogSpec, spec: SideTableSpec, key: str, what: Literal["items", "users"]) -> SideTable | None:
    """Features by key, from files with a column that is called as in the log. None without features."""
    if not spec.features:
        return None
    job = job.of_files(find_log_files(spec.files), what)
    uses = {key: f"the keys of the {what}"} | {feature.name: feature.use for feature in spec.features}
    parts, form = read_files(job, uses)
    return to_side_table(job, parts, key=key, features=spec.features, form=form)


def to_side_table(
    job: LogSpec, parts: Sequence[pl.LazyFrame], *, key: str, features: Sequence[FeatureColumn], form: LogFormat = "csv"
) -> SideTable:
    """Convert the columns of a side table. Every key may occur once."""
    where = ", ".join(map(str, job.sources))
    try:
        table = _join_files(parts).collect()
        conversions = [convert_feature(feature, table[feature.name], json=form == "jsonl") for feature in features]
        keys = convert_key(table[key]).alias(KEY)
        converted = table.lazy().select(keys, *conversion_columns(conversions), LOG_FILE, LOG_NUMBER)
        expected = {conversion.name: conversion.expected for conversion in conversions}
        lines = EventLog(converted, _names(job), _unit(form), expected=expected)
        rows = usable_events(lines, job.quarantine).collect()
        kinds = categories(conversions)
    except DataError as error:
        error.where = error.where or where
        raise
    repeated = rows.filter(pl.col(KEY).is_duplicated())[KEY]
    if len(repeated):
        names = ", ".join(f"'{feature.name}'" for feature in features)
        what = f"column '{key}' holds '{repeated[0]}' more than once, so its features {names} are not clear"
        raise DataError(what, where=where, remedy="keep one line per key, or group the lines into one with a set")
    return SideTable(rows, kinds)


def _join_files(parts: Sequence[pl.LazyFrame]) -> pl.LazyFrame:
    numbered = [part.with_columns(pl.lit(file, pl.Int32).alias(LOG_FILE)) for file, part in enumerate(parts)]
    return pl.concat(numbered, how="vertical_relaxed")


def _names(job: LogSpec) -> tuple[str, ...]:
    return tuple(job.name(number) for number in range(len(job.sources)))


def _unit(form: LogFormat) -> Literal["line", "row"]:
    return "row" if form == "parquet" else "line"
