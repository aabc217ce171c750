"""Row validation: what a history row is, which rows are unusable, and what happens to them.

A row holds `user_id`, `item_id: list<int64>`, `timestamp: list<int64>`, other columns that are either lists of the same
length or scalars, and for ranking `candidate_id: list<int64>` with `label_*` and `candidate_*` lists of equal length. A
set of ids per event is a list of lists, a set per row a list. An unusable row is an error or, with on_bad = skip, a
counted line in a quarantine file.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.data.columns import CANDIDATE, MISSING, Column, ColumnType, is_list_type
from freescale.errors import DataError, FreeScaleError, reason

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


class RowGroup(NamedTuple):
    """One decoded row group. Rows keep their stored index; `usable` marks those that passed every check."""

    columns: dict[str, Column]
    usable: NDArray[np.bool_]

    @staticmethod
    def unreadable(rows: int, kinds: Mapping[str, ColumnType]) -> "RowGroup":
        """Placeholder for an unreadable row group: the right number of rows, none of them usable."""
        columns = {}
        for name, kind in kinds.items():
            has_offsets = kind.is_list or kind.is_set
            offsets = np.zeros(rows + 1, np.int64) if has_offsets else None
            inner = np.zeros(1, np.int64) if kind.is_list and kind.is_set else None
            columns[name] = Column(np.zeros(0 if has_offsets else rows, kind.dtype), offsets, inner)
        return RowGroup(columns, np.zeros(rows, dtype=bool))


def decode_rows(table: pa.Table, kinds: Mapping[str, ColumnType], *, longest: int, report: ReportRow) -> RowGroup:
    """Convert rows to numpy columns, without a copy if there are no nulls, and mark the usable rows."""
    columns: dict[str, Column] = {}
    usable = np.ones(table.num_rows, dtype=bool)
    faults: list[Fault] = []
    for name in table.column_names:
        columns[name], nulls = _to_numpy(table[name], kinds[name])
        if nulls is not None:
            faults.append(("null", f"{name} is null or holds a null", nulls))
    for kind, what, bad in (*faults, *_faults(columns, kinds, longest)):
        for row in np.flatnonzero(bad & usable).tolist():
            usable[row] = False
            report(row, kind, what)
    if not usable.all():  # empty the lists of unusable rows, so that the offsets of all columns agree
        columns = {name: _without_unusable(column, usable) for name, column in columns.items()}
    return RowGroup(columns, usable)


def _faults(columns: dict[str, Column], kinds: Mapping[str, ColumnType], longest: int) -> Iterator[Fault]:
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
        yield from _faulty_values(name, column, kinds[name])
        if kinds[name].is_list:
            reference = CANDIDATE if kinds[name].group == "candidates" else "item_id"
            if (unequal := column.lengths != columns[reference].lengths).any():
                yield "unequal lists", f"{name} and {reference} have unequal lengths", unequal
    yield from _out_of_order(columns["timestamp"])


def _faulty_values(name: str, column: Column, kind: ColumnType) -> Iterator[Fault]:
    """Find ids below 0, and numbers of features that are NaN or infinite."""
    values = column.values
    if kind.is_id and values.min(initial=0) < 0:
        bad = (values < 0) & (values != MISSING)
        if bad.any():
            yield "negative id", f"{name} holds a negative id", _rows_with(bad, column)
    if kind.is_feature and kind.dtype.kind == "f" and not np.isfinite(values.sum(dtype=np.float64)):
        bad = np.isinf(values) if kind.nullable else ~np.isfinite(values)
        if bad.any():
            yield "not a number", f"{name} holds NaN or an infinite number", _rows_with(bad, column)


def _rows_with(flags: NDArray[np.bool_], column: Column) -> NDArray[np.bool_]:
    """Rows with at least one flagged value, of any kind of column."""
    if column.offsets is None:
        return flags
    if column.inner is not None:
        flags = _any(Column(flags, column.inner), flags)
    return _any(Column(flags, column.offsets), flags)


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
    kept = np.repeat(usable, column.lengths)
    offsets = np.concatenate([[0], np.cumsum(np.where(usable, column.lengths, 0))])
    if column.inner is None:
        return Column(column.values[kept], offsets)
    sizes = np.diff(column.inner)
    inner = np.concatenate([[0], np.cumsum(sizes[kept])])
    return Column(column.values[np.repeat(kept, sizes)], offsets, inner)


def _any(column: Column, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows with at least one flagged value."""
    begin, _ = column.bounds
    rows = np.zeros(len(begin), dtype=bool)
    rows[np.searchsorted(begin, np.flatnonzero(flags), side="right") - 1] = True
    return rows


def _to_numpy(chunked: pa.ChunkedArray, kind: ColumnType) -> tuple[Column, NDArray[np.bool_] | None]:
    """Convert a column; also return a mask of the rows that are or contain a null that is a fault, or None."""
    array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
    if not is_list_type(array.type):
        nulls = array.is_null().to_numpy(zero_copy_only=False) if array.null_count and not kind.nullable else None
        return Column(_numbers(array, kind)), nulls
    nulls = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if kind.nullable and not kind.is_list:
        nulls = None  # a set per row: null is an empty set
    inside, offsets = _flatten(array)
    if not is_list_type(inside.type):
        column = Column(_numbers(inside, kind), offsets)
        holes = inside.null_count and not (kind.nullable and kind.is_list)
    else:
        values, inner = _flatten(inside)  # a null set is an empty one
        column = Column(_numbers(values, kind), offsets, inner)
        holes = values.null_count or (inside.null_count and not kind.nullable)
    if holes:
        bad = _null_entries(inside, kind)
        faulty = _any(Column(bad, offsets), bad)
        nulls = faulty if nulls is None else nulls | faulty
    return column, nulls


def _flatten(array: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the values of a list array, and where each list begins and ends in them."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    return array.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0]


def _null_entries(inside: pa.Array, kind: ColumnType) -> NDArray[np.bool_]:
    """Return which entries of lists are null, or are sets that hold a null."""
    bad = inside.is_null().to_numpy(zero_copy_only=False)
    if not is_list_type(inside.type):
        return bad
    values, inner = _flatten(inside)
    holes = _any(Column(values, inner), values.is_null().to_numpy(zero_copy_only=False))
    return holes if kind.nullable else holes | bad


def _numbers(array: pa.Array, kind: ColumnType) -> NDArray[Any]:
    if array.null_count:
        if kind.nullable and kind.dtype.kind == "f":
            return array.to_numpy(zero_copy_only=False).astype(kind.dtype)  # nulls become NaN
        array = array.cast(pa.int64()).fill_null(MISSING) if kind.nullable else array.fill_null(_zero(array.type))
    return array.to_numpy(zero_copy_only=False).astype(kind.dtype, copy=False)


def _zero(kind: pa.DataType) -> bool | int:
    return False if pa.types.is_boolean(kind) else 0
