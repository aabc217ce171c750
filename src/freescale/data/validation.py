"""Row validation: what a history row is, which rows are unusable, and what happens to them.

A row holds `user_id`, `item_id: list<int64>`, `timestamp: list<int64>`, other columns that are either lists of the same
length or scalars, and for ranking `candidate_id: list<int64>` with `label_*` and `candidate_*` lists of equal length. A
set of ids per event is a list of lists, a set per row a list. An unusable row is an error or, with on_bad = skip, a
counted line in a quarantine file.
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
MISSING = np.iinfo(np.int64).min
"""Stands for a null among the ids of a nullable column."""
Group = Literal["sample", "history", "candidates"]
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
    group: Group
    """What has one value each: a row, an event, or a candidate."""
    is_set: bool = False
    """Whether a value is a list of ids."""
    nullable: bool = False
    """Whether a null is a missing value instead of a fault."""
    is_feature: bool = False
    """Whether a feature or a label of the config reads it; then its values are checked."""
    is_id: bool = False
    """Whether the values are ids of a feature."""

    def __str__(self) -> str:
        kind = f"set<{self.dtype}>" if self.is_set else str(self.dtype)
        return f"list<{kind}>" if self.is_list else kind


class FeatureColumn(NamedTuple):
    """A column that a feature or a label of the config reads, and what it has to hold."""

    name: str
    owner: str
    """Who reads it, for messages: `[features.artist]`."""
    group: Group
    kind: Literal["id", "set", "number", "bits", "timestamp"]
    nullable: bool = False


class Column(NamedTuple):
    """Values of one column: one per row, or for a list column delimited by `offsets`."""

    values: NDArray[Any]
    offsets: NDArray[np.int64] | None = None
    inner: NDArray[np.int64] | None = None
    """For a set per event or candidate: where the ids of each begin in `values`; `offsets` then delimits the sets."""

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
        columns = {}
        for name, kind in kinds.items():
            has_offsets = kind.is_list or kind.is_set
            offsets = np.zeros(rows + 1, np.int64) if has_offsets else None
            inner = np.zeros(1, np.int64) if kind.is_list and kind.is_set else None
            columns[name] = Column(np.zeros(0 if has_offsets else rows, kind.dtype), offsets, inner)
        return RowGroup(columns, np.zeros(rows, dtype=bool))


def select_columns(
    schema: pa.Schema, features: Sequence[str | FeatureColumn], location: Location
) -> dict[str, ColumnType]:
    """Types of the columns to read. Raises a DataError if one is missing or has a wrong type.

    `features`: names, whose type tells what they hold, or columns that have to fit their feature.
    """
    present = set(schema.names)
    labels = [name for name in schema.names if is_candidate(name)] if CANDIDATE in present else []
    by_name = {column.name: column for column in features if isinstance(column, FeatureColumn)}
    names = [column.name if isinstance(column, FeatureColumn) else column for column in features]
    selected = {}
    for name in dict.fromkeys([*REQUIRED, *names, *labels]):
        owner = f"{by_name[name].owner} reads column '{name}', which the data does not have" if name in by_name else ""
        if name not in present:
            what = owner or f"column '{name}' is missing"
            raise DataError(what, where=str(location), remedy=suggest(name, present))
        field = schema.field(name)
        selected[name] = (
            feature_type(field, by_name[name], location) if name in by_name else _column_type(field, location)
        )
    return selected


def _column_type(field: pa.Field, location: Location) -> ColumnType:
    is_list, is_set, kind = _unwrap(field.type)
    whole = pa.types.is_integer(kind)
    number = whole or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if field.name == "user_id":
        expected, valid = "a 64-bit integer", whole and not is_list
    elif field.name in ("item_id", "timestamp", CANDIDATE):
        expected, valid = "list<int64>", whole and is_list and not is_set
    elif is_candidate(field.name):
        expected, valid = "a list of numbers", number and is_list
    else:
        expected, valid = "numbers or lists of them", number
    if not valid:
        what = f"column '{field.name}' has type {field.type}, not {expected}"
        raise DataError(what, where=str(location), remedy="convert the log with `freescale data import events`")
    group: Group = "candidates" if is_candidate(field.name) else "history" if is_list else "sample"
    return ColumnType(is_list, _number_type(np.dtype(kind.to_pandas_dtype())), group, is_set)


def feature_type(field: pa.Field, column: FeatureColumn, location: Location) -> ColumnType:
    """Return the type of a column that a feature reads. Raises a DataError if it does not fit the feature."""
    is_list, is_set, kind = _unwrap(field.type)
    if column.kind == "set" and column.group == "sample" and is_list and not is_set:
        is_list, is_set = False, True
    whole = pa.types.is_integer(kind)
    what, remedy = "", ""
    if is_list != (column.group != "sample"):
        holds = "a list per row" if is_list else "one value per row"
        needed = {"sample": "one value per row", "history": "a list with a value per event"}
        what = f"holds {holds}, not {needed.get(column.group, 'a list with a value per candidate')}"
        remedy = 'set its scope to "item" or "event"' if is_list else 'set its scope to "user" or "context"'
    elif is_set != (column.kind == "set"):
        what = f"holds {'sets' if is_set else 'single values'} ({field.type}), but its kind is {column.kind!r}"
        remedy = 'set its kind to "set"' if is_set else 'set its kind to "id", or store lists of ids'
    elif column.kind != "number" and not whole:
        what, remedy = (
            f"holds {kind}, but kind = {column.kind!r} needs integers",
            'set its kind to "number", or import it as ids',
        )
    elif not (whole or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        what, remedy = f"holds {kind}, which is not a number", "import the log with this column as ids"
    if what:
        raise DataError(f"{column.owner}: column '{column.name}' {what}", where=str(location), remedy=remedy)
    dtype = np.dtype(np.float32) if column.kind == "number" else np.dtype(np.int64)
    is_id = column.kind in ("id", "set")
    return ColumnType(is_list, dtype, column.group, is_set, column.nullable, is_feature=True, is_id=is_id)


def _unwrap(kind: pa.DataType) -> tuple[bool, bool, pa.DataType]:
    """Return whether a type is a list, whether it is a list of lists, and the type of its values."""
    is_list = _is_list(kind)
    value = kind.value_type if is_list else kind
    is_set = is_list and _is_list(value)
    return is_list, is_set, value.value_type if is_set else value


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
    if not _is_list(array.type):
        nulls = array.is_null().to_numpy(zero_copy_only=False) if array.null_count and not kind.nullable else None
        return Column(_numbers(array, kind)), nulls
    nulls = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if kind.nullable and not kind.is_list:
        nulls = None  # a set per row: null is an empty set
    inside, offsets = _flatten(array)
    if not _is_list(inside.type):
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
    if not _is_list(inside.type):
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


def _number_type(stored: np.dtype) -> np.dtype:
    """Integers become 64-bit, as table lookups require; other types stay as stored."""
    return np.dtype(np.int64) if stored.kind in "iu" else stored


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
