"""Validation."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.errors import DataError, FreeScaleError, reason, suggest


class Location(NamedTuple):
    """Where in a data set or a log something is.

    Text is numbered by lines as editors do: from 1, with the header, blank lines and line breaks inside of quotes.
    Parquet is numbered by rows as its readers do: from 0, in the row group where one is given, else in the file.
    """

    file: str
    row_group: int | None = None
    row: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        inside = {"row group": self.row_group, "row": self.row, "line": self.line}
        return ", ".join([self.file, *(f"{name} {number}" for name, number in inside.items() if number is not None)])


class Quarantine:
    """The policy for bad input and the record of what was set aside."""

    def __init__(self, on_bad: Literal["stop", "skip"] = "stop", path: str | Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        """Rows set aside, by kind of fault."""
        self._skip = on_bad == "skip"
        self._path = Path(path) if path else None
        self._seen: set[Location] = set()
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """How many rows were set aside."""
        return sum(self.counts.values())

    def reject(
        self, place: Location, kind: str, what: str, *, remedy: str, rows: int = 1, cause: Exception | None = None
    ) -> None:
        """Report bad input: raise, or count it and return. The same place counts once, also over many epochs."""
        if not self._skip:
            remedy = f"{remedy}, or go on without it: on_bad = skip (--on-bad skip)"
            raise DataError(what, where=str(place), remedy=remedy) from cause
        with self._lock:
            if place in self._seen:
                return
            self._seen.add(place)
            self.counts[kind] += rows
            if self._path:
                line = place._asdict() | {"rows": rows, "what": what}
                self._record(self._path, json.dumps(line))

    def _record(self, path: Path, line: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            what, remedy = (
                f"the quarantine file cannot be written: {reason(error)}",
                "free space, or allow writing there",
            )
            raise FreeScaleError(what, where=str(path), remedy=remedy) from error

    def summary(self) -> str:
        """Say in one line what was set aside, or nothing."""
        if not self.counts:
            return ""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.most_common())
        return f"{self.rows:,} rows set aside ({kinds})" + (f"; see {self._path}" if self._path else "")


REQUIRED = ("user_id", "item_id", "timestamp")
CANDIDATE = "candidate_id"


def is_candidate(name: str) -> bool:
    """Whether a list column follows the candidates rather than the history."""
    return name.startswith(("candidate_", "label_"))


class ColumnType(NamedTuple):
    """What a column holds."""

    is_list: bool
    dtype: np.dtype


class Column(NamedTuple):
    """Values of one column: one per row, or `offsets` say which belong to which row."""

    values: NDArray[Any]
    offsets: NDArray[np.int64] | None = None

    @property
    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the values of each row begin and end, for a list column."""
        assert self.offsets is not None
        return self.offsets[:-1], self.offsets[1:]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Values per row, for a list column."""
        begin, end = self.bounds
        return end - begin


class RowGroup(NamedTuple):
    """One decoded row group. Rows keep their stored numbers; `usable` says which passed every check."""

    columns: dict[str, Column]
    usable: NDArray[np.bool_]

    @staticmethod
    def unreadable(rows: int, kinds: Mapping[str, ColumnType]) -> "RowGroup":
        """Stand in for a group that could not be read: the right number of rows, none of them usable."""
        offsets = {name: np.zeros(rows + 1, np.int64) if kind.is_list else None for name, kind in kinds.items()}
        values = {name: np.zeros(0 if kind.is_list else rows, kind.dtype) for name, kind in kinds.items()}
        return RowGroup({name: Column(values[name], offsets[name]) for name in kinds}, np.zeros(rows, dtype=bool))


ReportRow = Callable[[int, str, str], None]
"""Told of each unusable row: its number, the kind of fault, and what is wrong."""


def select_columns(schema: pa.Schema, features: Sequence[str], place: Location) -> dict[str, ColumnType]:
    """Name the columns to read and what they hold, or say what is missing or mistyped."""
    present = set(schema.names)
    labels = [name for name in schema.names if is_candidate(name)] if CANDIDATE in present else []
    wanted = list(dict.fromkeys([*REQUIRED, *features, *labels]))
    for name in wanted:
        if name not in present:
            raise DataError(f"column '{name}' is missing", where=str(place), remedy=suggest(name, present))
    return {name: _kind(schema.field(name), place) for name in wanted}


def _kind(field: pa.Field, place: Location) -> ColumnType:
    listed = _is_list(field.type)
    kind = field.type.value_type if listed else field.type
    whole = pa.types.is_integer(kind)
    number = whole or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if field.name == "user_id":
        wanted, right = "a 64-bit integer", whole and not listed
    elif field.name in ("item_id", "timestamp", CANDIDATE):
        wanted, right = "list<int64>", whole and listed
    elif is_candidate(field.name):
        wanted, right = "a list of numbers", number and listed
    else:
        wanted, right = "numbers or lists of them", number
    if not right:
        what = f"column '{field.name}' has type {field.type}, not {wanted}"
        raise DataError(what, where=str(place), remedy="convert the log with `freescale data import events`")
    return ColumnType(listed, _number_type(np.dtype(kind.to_pandas_dtype())))


def decode_rows(table: pa.Table, *, longest: int, report: ReportRow) -> RowGroup:
    """Turn rows into numpy columns, without a copy where there are no nulls, and say which rows are usable."""
    columns: dict[str, Column] = {}
    usable = np.ones(table.num_rows, dtype=bool)
    faults: list[Fault] = []
    for name in table.column_names:
        columns[name], nulls = _to_numpy(table[name])
        if nulls is not None:
            faults.append(("null", f"{name} is null or holds a null", nulls))
    for kind, what, bad in (*faults, *_faults(columns, longest)):
        for row in np.flatnonzero(bad & usable).tolist():
            usable[row] = False
            report(row, kind, what)
    if not usable.all():  # emptied, so that all columns of a row agree again on where it begins
        columns = {name: _emptied(column, usable) for name, column in columns.items()}
    return RowGroup(columns, usable)


Fault = tuple[str, str, NDArray[np.bool_]]
"""A kind of fault, what it means in words, and the rows that have it."""


def _faults(columns: dict[str, Column], longest: int) -> Iterator[Fault]:
    """Find what is wrong. The common case, nothing, is decided by a few passes that allocate little."""
    history = columns["item_id"].lengths
    if history.min(initial=1) < 1:
        yield "empty", "the history is empty", history == 0
    if history.max(initial=0) > longest:
        what = f"a history of up to {history.max():,} events, above longest = {longest:,}"
        yield "too long", what, history > longest
    for name in ("item_id", CANDIDATE):
        if name in columns and columns[name].values.min(initial=0) < 0:
            yield "negative id", f"{name} holds a negative id", _any(columns[name], columns[name].values < 0)
    for name, column in columns.items():
        if column.offsets is not None:
            leader = CANDIDATE if is_candidate(name) else "item_id"
            if (unequal := column.lengths != columns[leader].lengths).any():
                yield "unequal lists", f"{name} and {leader} have unequal lengths", unequal
    yield from _out_of_order(columns["timestamp"])


def _out_of_order(time: Column) -> Iterator[Fault]:
    back = time.values[1:] < time.values[:-1]
    begin, _ = time.bounds
    inner = begin[(begin > 0) & (begin < len(time.values))]
    back[inner - 1] = False  # the first event of a row follows nothing
    if back.any():
        what = "timestamp goes back in time inside the history"
        yield "not in time order", what, _any(time, np.append(False, back))


def _emptied(column: Column, usable: NDArray[np.bool_]) -> Column:
    """Take the values of unusable rows out of a column, if it is one of lists."""
    if column.offsets is None:
        return column
    lengths = np.where(usable, column.lengths, 0)
    return Column(column.values[np.repeat(usable, column.lengths)], np.concatenate([[0], np.cumsum(lengths)]))


def _any(column: Column, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which rows hold at least one flagged value."""
    begin, _ = column.bounds
    rows = np.zeros(len(begin), dtype=bool)
    rows[np.searchsorted(begin, np.flatnonzero(flags), side="right") - 1] = True
    return rows


def _to_numpy(chunked: pa.ChunkedArray) -> tuple[Column, NDArray[np.bool_] | None]:
    """Give the column, and which rows are or hold null, if any do."""
    array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
    nulls = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if not _is_list(array.type):
        return Column(_numbers(array)), nulls
    offsets = array.offsets.to_numpy().astype(np.int64)
    inner = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    column = Column(_numbers(inner), offsets - offsets[0])
    if inner.null_count:
        inside = _any(column, inner.is_null().to_numpy(zero_copy_only=False))
        nulls = inside if nulls is None else nulls | inside
    return column, nulls


def _numbers(array: pa.Array) -> NDArray[Any]:
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    values = array.to_numpy(zero_copy_only=False)
    return values.astype(_number_type(values.dtype), copy=False)


def _number_type(stored: np.dtype) -> np.dtype:
    """Integers are widened to 64 bits, as table lookups want them; the rest stays as it is stored."""
    return np.dtype(np.int64) if stored.kind in "iu" else stored


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
