"""Event logs: one lazy table of events with source positions and exact integer times.

Times are whole ticks since 1970, and events are sorted by ticks. A tick is the unit of the log if it counts whole
units, a microsecond for dates, and a nanosecond for numbers with a fraction. Dates without an offset are UTC. A value
that is not a time becomes null.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import polars as pl

from freescale.data.columns import REQUIRED
from freescale.data.feature_columns import KEY, UNUSABLE, FeatureColumn, Kind, SideTable
from freescale.data.validation import Location, Quarantine
from freescale.errors import DataError
from freescale.log import info_once

LOG_ORDER, LOG_FILE, LOG_NUMBER = "_order", "_file", "_number"
"""Columns with the position of an event: in the whole log, its file, and its line or row in that file."""
TimeUnit = Literal["auto", "s", "ms", "us", "ns"]
TICKS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Ticks per second, by unit."""
_UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_FIRST_MS, _FIRST_US, _FIRST_NS = 10**11, 10**14, 10**17  # in ms: 1973, in seconds: the year 5138; and so on
_MOST = 2**63 - 1
_NANO = TICKS_PER_SECOND["ns"]
_DATES = (
    *(f"%Y-%m-%d{between}%H:%M{seconds}" for between in "T " for seconds in (":%S%.f", ":%S%.f%#z", "")),
    "%Y-%m-%d",
    "%+",  # with the word UTC
)


class LogColumns(NamedTuple):
    """Names of the columns of a log."""

    user: str = "user_id"
    item: str = "item_id"
    time: str | None = "timestamp"
    """None: the log has no time column; the order of its lines is used."""
    features: tuple[FeatureColumn, ...] = ()
    labels: tuple[str, ...] = ()
    """Label columns of impressions: numbers from 0 to 1, or booleans."""
    event_labels: tuple[str, ...] = ()
    """Label columns of events: numbers or booleans, or null."""

    @property
    def uses(self) -> dict[str, str]:
        """All columns to read, and what each is for."""
        labels = {name: f"label '{name}'" for name in (*self.labels, *self.event_labels)}
        features = {feature.name: feature.use for feature in self.features}
        time = {} if self.time is None else {self.time: "the time"}
        return {self.user: "the user", self.item: "the item"} | time | features | labels


class EventLog(NamedTuple):
    """The events of a log."""

    table: pl.LazyFrame
    """`user_id` and `item_id` (keys of the log), `timestamp` in ticks (if the log has a time), features, `label_*`
    columns, a mark of unusable values for each that needs one, and the three position columns. Unusable values are
    null. Ids and sets are text keys."""
    files: tuple[str, ...]
    position_unit: Literal["line", "row"]
    """What LOG_NUMBER counts: lines of text, or rows of Parquet."""
    ticks_per_second: int = 1
    """Ticks of `timestamp` per second. A data set stores whole seconds."""
    expected: Mapping[str, str] = {}
    """What a value of a feature or label must be, for messages."""
    kinds: Mapping[str, Kind] = {}
    """Kinds of the features that need a vocabulary."""
    items: SideTable | None = None
    """Features of the items."""
    users: SideTable | None = None
    """Features of the users."""

    @property
    def name(self) -> str:
        """Short name of the log for messages."""
        names = [Path(file).name for file in self.files]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def location(self, file: int, number: int) -> Location:
        """Position of an event in its file."""
        return Location(self.files[file], **{self.position_unit: number})


def usable_events(events: EventLog, quarantine: Quarantine) -> pl.LazyFrame:
    """Events of a log, without those that lack a required field or hold a value that does not convert."""
    columns = events.table.collect_schema().names()
    checks = {name: pl.col(name).is_null() for name in (KEY, *REQUIRED) if name in columns}
    checks |= {name.removeprefix(UNUSABLE): pl.col(name) for name in columns if name.startswith(UNUSABLE)}
    invalid = pl.any_horizontal(checks.values())
    for batch in events.table.filter(invalid).collect_batches(engine="streaming"):
        for row in batch.iter_rows(named=True):
            faulty = [name for name in checks if row.get(f"{UNUSABLE}{name}", row[name] is None)]
            hint = f": {events.expected[faulty[0]]}" if faulty[0] in events.expected else ""
            what = f"{', '.join(faulty).replace(KEY, 'the key')} missing or not of its type{hint}"
            location = events.location(row[LOG_FILE], row[LOG_NUMBER])
            quarantine.reject(location, "incomplete event", what, remedy=f"fix that {events.position_unit}")
    marks = [name for name in columns if name.startswith(UNUSABLE)]
    return events.table.filter(~invalid).drop(LOG_FILE, LOG_NUMBER, *marks)


class TimeParser(NamedTuple):
    """Expression that converts a time column to ticks, and the ticks per second."""

    ticks: pl.Expr
    per_second: int


def infer_time_parser(table: pl.LazyFrame, sample: pl.Series, unit: TimeUnit) -> TimeParser:
    """Infer the time format of a column from `sample`, its first values."""
    kind, column = sample.dtype, pl.col(sample.name)
    if isinstance(kind, pl.Datetime | pl.Duration):
        _refuse_unit(sample.name, unit)
        return TimeParser(column.to_physical().cast(pl.Int64), TICKS_PER_SECOND[kind.time_unit])
    if kind == pl.Date:
        _refuse_unit(sample.name, unit)
        return TimeParser(column.dt.epoch("s"), 1)
    if not (kind.is_numeric() or kind in (pl.String, pl.Null)):
        remedy = "give a column of numbers, dates or text"
        raise DataError(f"column '{sample.name}' of type {kind} is not a time column", remedy=remedy)
    numbers = sample.cast(pl.Float64, strict=False)
    if kind == pl.String and numbers.count() < (dates := _dates(sample)).parsed:
        _refuse_unit(sample.name, unit)
        return _parser_of_dates(table, column, dates.formats)
    if kind == pl.String and sample.count() and not numbers.count():
        what = f"column '{sample.name}' is not a time column: '{sample.drop_nulls()[0]}'"
        raise DataError(what, remedy="write times as ISO 8601 (2026-01-31T12:00:00Z) or as numbers since 1970")
    return _parser_of_numbers(table, sample, unit)


def guess_unit(value: float) -> Literal["s", "ms", "us", "ns"]:
    """Unit in which a number since 1970 is a plausible date; small numbers are seconds."""
    size = abs(value)
    return "s" if size < _FIRST_MS else "ms" if size < _FIRST_US else "us" if size < _FIRST_NS else "ns"


def _parser_of_numbers(table: pl.LazyFrame, sample: pl.Series, unit: TimeUnit) -> TimeParser:
    column, real = pl.col(sample.name), pl.col("real")
    # Separate selects: otherwise every aggregate parses the text again.
    parsed = table.select(real=column.cast(pl.Float64, strict=False), whole=column.cast(pl.Int64, strict=False))
    in_range = parsed.select("whole", real=pl.when(real.abs() <= _MOST).then("real"))
    facts = in_range.select(
        first=real.min(),
        last=real.max(),
        low=pl.when(real != 0).then(real.abs()).min(),
        high=real.abs().max(),
        fractional=pl.col("whole").count() < real.count(),
    )
    first, last, low, high, fractional = facts.collect(engine="streaming").row(0)
    if sample.dtype != pl.String:
        fractional = not sample.dtype.is_integer()
    if unit == "auto":
        unit = _detect_unit(sample.name, low or 0, high or 0)
        if high is not None:
            span = " to ".join(_date(time / TICKS_PER_SECOND[unit]) for time in (first, last))
            info_once(f"column '{sample.name}' counts {_UNIT_NAMES[unit]} ({span}); --time-unit states another unit")
    if not fractional:
        return TimeParser(column.cast(pl.Int64, strict=False), TICKS_PER_SECOND[unit])
    factor = _NANO // TICKS_PER_SECOND[unit]
    return TimeParser(_nanoseconds(column, factor, exact=not sample.dtype.is_float()), _NANO)


def _detect_unit(name: str, low: float, high: float) -> Literal["s", "ms", "us", "ns"]:
    """Unit by magnitude. Refuses a column that spans two units, because one would be misread silently."""
    if guess_unit(low or high) != guess_unit(high):
        what = f"the unit of column '{name}' is not clear: it holds {low:.6g} and {high:.6g}"
        raise DataError(what, remedy="fix those times, or state the unit: --time-unit s|ms|us|ns")
    return guess_unit(high)


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return "no date"


def _nanoseconds(column: pl.Expr, factor: int, *, exact: bool) -> pl.Expr:
    """Nanoseconds from a number with a fraction, in units of `factor` nanoseconds. Text and decimals are exact."""
    if not exact:  # a double: multiply its integer part as an integer, which loses no bit
        whole = column.floor().cast(pl.Int64, strict=False)
        rest = ((column - column.floor()) * factor).round().cast(pl.Int64, strict=False)
        return rescale_ticks(whole, factor) + rest
    number = column.cast(pl.Decimal(38, 9), strict=False)
    inside = pl.when(number.abs() <= _MOST // factor).then(number)
    return (inside * factor).floor().cast(pl.Int64, strict=False)


def rescale_ticks(ticks: pl.Expr, factor: int) -> pl.Expr:
    """Multiply ticks by a factor; null on 64-bit overflow."""
    return ticks if factor == 1 else pl.when(ticks.abs() <= _MOST // factor - 1).then(ticks) * factor


class _DateFormats(NamedTuple):
    parsed: int
    formats: list[str]


def _dates(sample: pl.Series) -> _DateFormats:
    """Date formats in a sample, the most frequent first, and the number of values that they parse."""
    frame = sample.to_frame()
    parsed = {form: frame.select(_parse(pl.col(sample.name), form, "us").count()).item() for form in _DATES}
    formats = sorted((form for form, count in parsed.items() if count), key=lambda form: -parsed[form])
    any_format = pl.coalesce(_parse(pl.col(sample.name), form, "us") for form in formats or _DATES)
    return _DateFormats(frame.select(any_format.count()).item(), formats)


def _parser_of_dates(table: pl.LazyFrame, column: pl.Expr, formats: list[str]) -> TimeParser:
    micro = pl.coalesce(_parse(column, form, "us") for form in formats).to_physical()
    if not table.select(column.str.contains(r"\.\d{7}").any()).collect(engine="streaming").item():
        return TimeParser(micro, TICKS_PER_SECOND["us"])
    nano = pl.coalesce(_parse(column, form, "ns") for form in formats).to_physical()
    return TimeParser(pl.when(micro.abs() < _MOST // 1000).then(nano), _NANO)  # nanoseconds overflow in 2262


def _parse(column: pl.Expr, form: str, unit: Literal["us", "ns"]) -> pl.Expr:
    text = column.str.strip_chars().str.replace_all("/", "-", literal=True)
    return text.str.to_datetime(form, time_unit=unit, time_zone="UTC", strict=False)


def _refuse_unit(name: str, unit: TimeUnit) -> None:
    if unit != "auto":
        raise DataError(f"column '{name}' holds dates, which have no unit", remedy=f"remove --time-unit {unit}")
