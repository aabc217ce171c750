"""What a history row is, and what makes one unusable.

A row holds `user_id`, `item_id: list<int64>`, `timestamp: list<int64>`, further features that are either lists of the
same length or scalars, and for ranking `candidate_id: list<int64>` with `label_*` and `candidate_*` lists of its
length. Knows Arrow and numpy, but no files and no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.data.store.quarantine import Place
from freescale.errors import DataError, nearest

REQUIRED = ("user_id", "item_id", "timestamp")
CANDIDATE = "candidate_id"


def is_candidate(name: str) -> bool:
    """Whether a list column follows the candidates rather than the history."""
    return name.startswith(("candidate_", "label_"))


class Kind(NamedTuple):
    """What a column holds."""

    listed: bool
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


class Group(NamedTuple):
    """One decoded row group. Rows keep their stored numbers; `usable` says which passed every check."""

    columns: dict[str, Column]
    usable: NDArray[np.bool_]

    @staticmethod
    def unreadable(rows: int, kinds: Mapping[str, Kind]) -> "Group":
        """Stand in for a group that could not be read: the right number of rows, none of them usable."""
        offsets = {name: np.zeros(rows + 1, np.int64) if kind.listed else None for name, kind in kinds.items()}
        values = {name: np.zeros(0 if kind.listed else rows, kind.dtype) for name, kind in kinds.items()}
        return Group({name: Column(values[name], offsets[name]) for name in kinds}, np.zeros(rows, dtype=bool))


Report = Callable[[int, str, str], None]
"""Told of each unusable row: its number, the kind of fault, and what is wrong."""


def choose(schema: pa.Schema, features: Sequence[str], place: Place) -> dict[str, Kind]:
    """Name the columns to read and what they hold, or say what is missing or mistyped."""
    present = set(schema.names)
    labels = [name for name in schema.names if is_candidate(name)] if CANDIDATE in present else []
    wanted = list(dict.fromkeys([*REQUIRED, *features, *labels]))
    for name in wanted:
        if name not in present:
            raise DataError(f"column '{name}' is missing", where=str(place), remedy=nearest(name, present))
    return {name: _kind(schema.field(name), place) for name in wanted}


def _kind(field: pa.Field, place: Place) -> Kind:
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
    return Kind(listed, _number_type(np.dtype(kind.to_pandas_dtype())))


def decode(table: pa.Table, *, longest: int, report: Report) -> Group:
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
    return Group(columns, usable)


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
