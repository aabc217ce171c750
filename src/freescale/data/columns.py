"""The columns of a data set: what each holds, and which of them a config reads."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.errors import DataError, suggest

REQUIRED = ("user_id", "item_id", "timestamp")
CANDIDATE = "candidate_id"
MISSING = np.iinfo(np.int64).min
"""Stands for a null among the ids of a nullable column."""
Group = Literal["sample", "history", "candidates"]


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


class ColumnRequest(NamedTuple):
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


def select_columns(schema: pa.Schema, features: Sequence[str | ColumnRequest], where: str) -> dict[str, ColumnType]:
    """Types of the columns to read. Raises a DataError if one is missing or has a wrong type.

    `features`: names, whose type tells what they hold, or columns that have to fit their feature. Candidates and their
    labels are always read.
    """
    present = set(schema.names)
    labels = [name for name in schema.names if name.startswith("label_")] if CANDIDATE in present else []
    by_name = {name: ColumnRequest(name, name, "candidates", "number", nullable=True) for name in labels}
    by_name |= {column.name: column for column in features if isinstance(column, ColumnRequest)}
    names = [column.name if isinstance(column, ColumnRequest) else column for column in features]
    selected = {}
    needs = [column.owner for column in by_name.values() if column.group == "candidates"]
    needs += [f"column '{name}'" for name in names if name not in by_name and is_candidate(name)]
    if needs and CANDIDATE not in present:
        what = f"{needs[0]} needs candidates, but the data has no column '{CANDIDATE}'"
        remedy = "import impressions as candidates, or take events as targets: task.anchors"
        raise DataError(what, where=where, remedy=remedy)
    for name in dict.fromkeys([*REQUIRED, *names, *([CANDIDATE] if CANDIDATE in present else []), *labels]):
        owner = f"{by_name[name].owner} reads column '{name}', which the data does not have" if name in by_name else ""
        if name not in present:
            what = owner or f"column '{name}' is missing"
            raise DataError(what, where=where, remedy=suggest(name, present))
        field = schema.field(name)
        selected[name] = feature_type(field, by_name[name], where) if name in by_name else _column_type(field, where)
    return selected


def require_same_shapes(columns: Mapping[str, ColumnType], others: Mapping[str, ColumnType]) -> None:
    """Raise a DataError unless the columns of a file hold lists and sets where those of the first file do."""
    for name, kind in columns.items():
        other = others.get(name)
        if other is None:
            raise DataError(f"column '{name}' is missing, which other files have")
        if (other.is_list, other.is_set) != (kind.is_list, kind.is_set):
            raise DataError(f"column '{name}' has type {other}, in other files {kind}")


def _column_type(field: pa.Field, where: str) -> ColumnType:
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
        raise DataError(what, where=where, remedy="convert the log with `freescale data import events`")
    group: Group = "candidates" if is_candidate(field.name) else "history" if is_list else "sample"
    return ColumnType(is_list, _number_type(np.dtype(kind.to_pandas_dtype())), group, is_set)


def feature_type(field: pa.Field, column: ColumnRequest, where: str) -> ColumnType:
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
    if not column.owner.startswith("[features"):  # a label has neither scope nor kind
        remedy = "convert the log with `freescale data import events`"
    if what:
        raise DataError(f"{column.owner}: column '{column.name}' {what}", where=where, remedy=remedy)
    dtype = np.dtype(np.float32) if column.kind == "number" else np.dtype(np.int64)
    is_id = column.kind in ("id", "set")
    return ColumnType(is_list, dtype, column.group, is_set, column.nullable, is_feature=True, is_id=is_id)


def _unwrap(kind: pa.DataType) -> tuple[bool, bool, pa.DataType]:
    """Return whether a type is a list, whether it is a list of lists, and the type of its values."""
    is_list = is_list_type(kind)
    value = kind.value_type if is_list else kind
    is_set = is_list and is_list_type(value)
    return is_list, is_set, value.value_type if is_set else value


def _number_type(stored: np.dtype) -> np.dtype:
    """Integers become 64-bit, as table lookups require; other types stay as stored."""
    return np.dtype(np.int64) if stored.kind in "iu" else stored


def is_list_type(kind: pa.DataType) -> bool:
    """Whether an Arrow type is a list."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
