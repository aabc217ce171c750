"""Event log."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import polars as pl

from freescale.data.validation import Location
from freescale.errors import DataError
from freescale.log import info_once

LOG_ORDER, LOG_FILE, LOG_NUMBER = "_order", "_file", "_number"
"""Columns of the table that describe the event's place: in the whole log, which file, and its line or row there."""


class LogColumns(NamedTuple):
    """Which columns of a log mean what."""

    user: str = "user_id"
    item: str = "item_id"
    time: str | None = "timestamp"
    """None: the log has no time, and the order of its lines stands for it."""
    features: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    """Of impressions: columns of numbers from 0 to 1, or of true and false."""

    @property
    def names(self) -> list[str]:
        """Every column that is read, once."""
        return list(dict.fromkeys(filter(None, (self.user, self.item, self.time, *self.features, *self.labels))))


class EventLog(NamedTuple):
    """Events of a log."""

    table: pl.LazyFrame
    """`user_id` and `item_id` (the log's own keys), `timestamp` in ticks (where the log has a time), features or
    `label_*` columns, and the three columns above. What cannot be used is null."""
    files: tuple[str, ...]
    position_unit: Literal["line", "row"]
    """What NUMBER counts: lines of text, or rows of Parquet."""
    ticks_per_second: int = 1
    """Ticks of `timestamp` per second. Events are sorted by ticks; a data set stores whole seconds."""

    @property
    def name(self) -> str:
        """The log in an error or a note."""
        names = [Path(file).name for file in self.files]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def location(self, file: int, number: int) -> Location:
        """Where an event is in its file, for error messages."""
        return Location(self.files[file], **{self.position_unit: number})


TimeUnit = Literal["auto", "s", "ms", "us", "ns"]
TICKS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Per second."""
_UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_FIRST_MS, _FIRST_US, _FIRST_NS = 10**11, 10**14, 10**17  # in ms: 1973, in seconds: the year 5138; and so on
_MOST = 2**63 - 1
_NANO = TICKS_PER_SECOND["ns"]
_DATES = (
    *(f"%Y-%m-%d{between}%H:%M{seconds}" for between in "T " for seconds in (":%S%.f", ":%S%.f%#z", "")),
    "%Y-%m-%d",
    "%+",  # with the word UTC
)


class TimeParser(NamedTuple):
    """How the times of a log are read."""

    ticks: pl.Expr
    per_second: int


def infer_time_parser(table: pl.LazyFrame, sample: pl.Series, unit: TimeUnit) -> TimeParser:
    """Find out how the times of a column are written. `sample`: its first values, under its name."""
    kind, column = sample.dtype, pl.col(sample.name)
    if isinstance(kind, pl.Datetime | pl.Duration):
        _refuse_unit(sample.name, unit)
        return TimeParser(column.to_physical().cast(pl.Int64), TICKS_PER_SECOND[kind.time_unit])
    if kind == pl.Date:
        _refuse_unit(sample.name, unit)
        return TimeParser(column.dt.epoch("s"), 1)
    if not (kind.is_numeric() or kind in (pl.String, pl.Null)):
        remedy = "give a column of numbers, dates or text"
        raise DataError(f"column '{sample.name}' of type {kind} holds no time", remedy=remedy)
    numbers = sample.cast(pl.Float64, strict=False)
    if kind == pl.String and numbers.count() < (dates := _dates(sample)).kept:
        _refuse_unit(sample.name, unit)
        return _parser_of_dates(table, column, dates.formats)
    if kind == pl.String and sample.count() and not numbers.count():
        what = f"column '{sample.name}' holds no time: '{sample.drop_nulls()[0]}'"
        raise DataError(what, remedy="write times as ISO 8601 (2026-01-31T12:00:00Z) or as numbers since 1970")
    return _parser_of_numbers(table, sample, unit)


def guess_unit(value: float) -> Literal["s", "ms", "us", "ns"]:
    """The unit in which a number since 1970 is a likely date; small numbers count seconds."""
    size = abs(value)
    return "s" if size < _FIRST_MS else "ms" if size < _FIRST_US else "us" if size < _FIRST_NS else "ns"


def _parser_of_numbers(table: pl.LazyFrame, sample: pl.Series, unit: TimeUnit) -> TimeParser:
    column, real = pl.col(sample.name), pl.col("real")
    # In steps, each of which reads what the one before has made: otherwise every aggregate parses the text again.
    parsed = table.select(real=column.cast(pl.Float64, strict=False), whole=column.cast(pl.Int64, strict=False))
    possible = parsed.select("whole", real=pl.when(real.abs() <= _MOST).then("real"))
    facts = possible.select(
        first=real.min(),
        last=real.max(),
        low=pl.when(real != 0).then(real.abs()).min(),
        high=real.abs().max(),
        broken=pl.col("whole").count() < real.count(),
    )
    first, last, low, high, broken = facts.collect(engine="streaming").row(0)
    if sample.dtype != pl.String:
        broken = not sample.dtype.is_integer()
    if unit == "auto":
        unit = _detected(sample.name, low or 0, high or 0)
        if high is not None:
            span = " to ".join(_date(time / TICKS_PER_SECOND[unit]) for time in (first, last))
            info_once(f"column '{sample.name}' counts {_UNIT_NAMES[unit]} ({span}); --time-unit states another unit")
    if not broken:
        return TimeParser(column.cast(pl.Int64, strict=False), TICKS_PER_SECOND[unit])
    factor = _NANO // TICKS_PER_SECOND[unit]
    return TimeParser(_nanoseconds(column, factor, exact=not sample.dtype.is_float()), _NANO)


def _detected(name: str, low: float, high: float) -> Literal["s", "ms", "us", "ns"]:
    """The unit by magnitude. A column that spans two of them is refused: one would be read wrongly without a word."""
    if guess_unit(low or high) != guess_unit(high):
        what = f"the unit of column '{name}' is not clear: it holds {low:.6g} and {high:.6g}"
        raise DataError(what, remedy="repair those times, or state the unit: --time-unit s|ms|us|ns")
    return guess_unit(high)


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return "no date"


def _nanoseconds(column: pl.Expr, factor: int, *, exact: bool) -> pl.Expr:
    """A number with a fraction, of units of `factor` nanoseconds. Text and decimals keep every digit."""
    if not exact:  # a double: its whole part is multiplied as an integer, so that no bit is lost
        whole = column.floor().cast(pl.Int64, strict=False)
        rest = ((column - column.floor()) * factor).round().cast(pl.Int64, strict=False)
        return rescale_ticks(whole, factor) + rest
    number = column.cast(pl.Decimal(38, 9), strict=False)
    inside = pl.when(number.abs() <= _MOST // factor).then(number)
    return (inside * factor).floor().cast(pl.Int64, strict=False)


def rescale_ticks(ticks: pl.Expr, factor: int) -> pl.Expr:
    """Finer ticks; null where 64 bits do not hold them."""
    return ticks if factor == 1 else pl.when(ticks.abs() <= _MOST // factor - 1).then(ticks) * factor


class _DateFormats(NamedTuple):
    kept: int
    formats: list[str]


def _dates(sample: pl.Series) -> _DateFormats:
    """Which formats of dates occur in a sample, the most frequent first, and how many values they read."""
    frame = sample.to_frame()
    read = {form: frame.select(_parsed(pl.col(sample.name), form, "us").count()).item() for form in _DATES}
    formats = sorted((form for form, count in read.items() if count), key=lambda form: -read[form])
    both = pl.coalesce(_parsed(pl.col(sample.name), form, "us") for form in formats or _DATES)
    return _DateFormats(frame.select(both.count()).item(), formats)


def _parser_of_dates(table: pl.LazyFrame, column: pl.Expr, formats: list[str]) -> TimeParser:
    micro = pl.coalesce(_parsed(column, form, "us") for form in formats).to_physical()
    if not table.select(column.str.contains(r"\.\d{7}").any()).collect(engine="streaming").item():
        return TimeParser(micro, TICKS_PER_SECOND["us"])
    nano = pl.coalesce(_parsed(column, form, "ns") for form in formats).to_physical()
    return TimeParser(pl.when(micro.abs() < _MOST // 1000).then(nano), _NANO)  # else it wraps around, in 2262


def _parsed(column: pl.Expr, form: str, unit: Literal["us", "ns"]) -> pl.Expr:
    text = column.str.strip_chars().str.replace_all("/", "-", literal=True)
    return text.str.to_datetime(form, time_unit=unit, time_zone="UTC", strict=False)


def _refuse_unit(name: str, unit: TimeUnit) -> None:
    if unit != "auto":
        raise DataError(f"column '{name}' holds dates, which have no unit", remedy=f"leave out --time-unit {unit}")
