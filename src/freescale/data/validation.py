"""Row validation: what a history row is, which rows are unusable, and what happens to them.

A row holds `user_id`, `item_id: list<int64>`, `timestamp: list<int64>`, other features that are either lists of the
same length or scalars, and for ranking `candidate_id: list<int64>` with `label_*` and `candidate_*` lists of equal
length. An unusable row is an error or, with on_bad = skip, a counted line in a quarantine file.
"""

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

REQUIRED = ("user_id", "item_id", "timestamp")
CANDIDATE = "candidate_id"
ReportRow = Callable[[int, str, str], None]
"""Callback for each unusable row: its index, the kind of fault, and a description."""
Fault = tuple[str, str, NDArray[np.bool_]]
"""A kind of fault, its description, and a mask of the rows that have it."""


class Location(NamedTuple):
    """A position in a data set or log, for error messages.

    Lines of text count from 1 as in an editor, including the header, blank lines and line breaks inside quotes. Rows of
    Parquet count from 0, inside the row group if there is one, else inside the file.
    """

    file: str
    row_group: int | None = None
    row: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        inside = {"row group": self.row_group, "row": self.row, "line": self.line}
        return ", ".join([self.file, *(f"{name} {number}" for name, number in inside.items() if number is not None)])


class Quarantine:
    """Applies the policy for unusable input and counts rejected rows. Thread-safe."""

    def __init__(self, on_bad: Literal["stop", "skip"] = "stop", path: str | Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        """Rejected rows by kind of fault."""
        self._skip = on_bad == "skip"
        self._path = Path(path) if path else None
        self._seen: set[Location] = set()
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """Number of rejected rows."""
        return sum(self.counts.values())

    def reject(
        self, location: Location, kind: str, what: str, *, remedy: str, rows: int = 1, cause: Exception | None = None
    ) -> None:
        """Raise a DataError, or with on_bad = skip count the rows. A location counts once over all epochs."""
        if not self._skip:
            remedy = f"{remedy}, or skip it: on_bad = skip (--on-bad skip)"
            raise DataError(what, where=str(location), remedy=remedy) from cause
        with self._lock:
            if location in self._seen:
                return
            self._seen.add(location)
            self.counts[kind] += rows
            if self._path:
                line = location._asdict() | {"rows": rows, "what": what}
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
        """One line that summarizes the rejected rows; empty if there are none."""
        if not self.counts:
            return ""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.most_common())
        return f"{self.rows:,} rows skipped ({kinds})" + (f"; see {self._path}" if self._path else "")


def is_candidate(name: str) -> bool:
    """Whether a list column belongs to the candidates rather than to the history."""
    return name.startswith(("candidate_", "label_"))


class ColumnType(NamedTuple):
    """Type of a column."""

    is_list: bool
    dtype: np.dtype


class Column(NamedTuple):
    """Values of one column: one per row, or for a list column delimited by `offsets`."""

    values: NDArray[Any]
    offsets: NDArray[np.int64] | None = None

    @property
    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of the values of each row of a list column."""
        assert self.offsets is not None
        return self.offsets[:-1], self.offsets[1:]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Values per row of a list column."""
        begin, end = self.bounds
        return end - begin


class RowGroup(NamedTuple):
    """One decoded row group. Rows keep their stored index; `usable` marks those that passed every check."""

    columns: dict[str, Column]
    usable: NDArray[np.bool_]

    @staticmethod
    def unreadable(rows: int, kinds: Mapping[str, ColumnType]) -> "RowGroup":
        """Placeholder for an unreadable row group: the right number of rows, none of them usable."""
        offsets = {name: np.zeros(rows + 1, np.int64) if kind.is_list else None for name, kind in kinds.items()}
        values = {name: np.zeros(0 if kind.is_list else rows, kind.dtype) for name, kind in kinds.items()}
        return RowGroup({name: Column(values[name], offsets[name]) for name in kinds}, np.zeros(rows, dtype=bool))


def select_columns(schema: pa.Schema, features: Sequence[str], location: Location) -> dict[str, ColumnType]:
    """Types of the columns to read. Raises a DataError if one is missing or has a wrong type."""
    present = set(schema.names)
    labels = [name for name in schema.names if is_candidate(name)] if CANDIDATE in present else []
    selected = list(dict.fromkeys([*REQUIRED, *features, *labels]))
    for name in selected:
        if name not in present:
            raise DataError(f"column '{name}' is missing", where=str(location), remedy=suggest(name, present))
    return {name: _column_type(schema.field(name), location) for name in selected}


def _column_type(field: pa.Field, location: Location) -> ColumnType:
    is_list = _is_list(field.type)
    kind = field.type.value_type if is_list else field.type
    whole = pa.types.is_integer(kind)
    number = whole or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if field.name == "user_id":
        expected, valid = "a 64-bit integer", whole and not is_list
    elif field.name in ("item_id", "timestamp", CANDIDATE):
        expected, valid = "list<int64>", whole and is_list
    elif is_candidate(field.name):
        expected, valid = "a list of numbers", number and is_list
    else:
        expected, valid = "numbers or lists of them", number
    if not valid:
        what = f"column '{field.name}' has type {field.type}, not {expected}"
        raise DataError(what, where=str(location), remedy="convert the log with `freescale data import events`")
    return ColumnType(is_list, _number_type(np.dtype(kind.to_pandas_dtype())))


def decode_rows(table: pa.Table, *, longest: int, report: ReportRow) -> RowGroup:
    """Convert rows to numpy columns, without a copy if there are no nulls, and mark the usable rows."""
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
    if not usable.all():  # empty the lists of unusable rows, so that the offsets of all columns agree
        columns = {name: _without_unusable(column, usable) for name, column in columns.items()}
    return RowGroup(columns, usable)


def _faults(columns: dict[str, Column], longest: int) -> Iterator[Fault]:
    """Find faulty rows. If there are none, this takes a few passes with few allocations."""
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
            reference = CANDIDATE if is_candidate(name) else "item_id"
            if (unequal := column.lengths != columns[reference].lengths).any():
                yield "unequal lists", f"{name} and {reference} have unequal lengths", unequal
    yield from _out_of_order(columns["timestamp"])


def _out_of_order(time: Column) -> Iterator[Fault]:
    back = time.values[1:] < time.values[:-1]
    begin, _ = time.bounds
    inner = begin[(begin > 0) & (begin < len(time.values))]
    back[inner - 1] = False  # the first event of a row has no predecessor
    if back.any():
        what = "timestamps decrease inside the history"
        yield "not in time order", what, _any(time, np.append(False, back))


def _without_unusable(column: Column, usable: NDArray[np.bool_]) -> Column:
    """Remove the values of unusable rows from a list column."""
    if column.offsets is None:
        return column
    lengths = np.where(usable, column.lengths, 0)
    return Column(column.values[np.repeat(usable, column.lengths)], np.concatenate([[0], np.cumsum(lengths)]))


def _any(column: Column, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows with at least one flagged value."""
    begin, _ = column.bounds
    rows = np.zeros(len(begin), dtype=bool)
    rows[np.searchsorted(begin, np.flatnonzero(flags), side="right") - 1] = True
    return rows


def _to_numpy(chunked: pa.ChunkedArray) -> tuple[Column, NDArray[np.bool_] | None]:
    """Convert a column; also return a mask of the rows that are or contain null, or None."""
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
    """Integers become 64-bit, as table lookups require; other types stay as stored."""
    return np.dtype(np.int64) if stored.kind in "iu" else stored


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
