"""Describes every column of a data set besides the required ones, and proposes a schema of features from it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.config import FeatureConfig, RunConfig
from freescale.data.columns import CANDIDATE, MISSING, REQUIRED, ColumnRequest, Group, is_candidate
from freescale.data.dataset import Dataset, ValueCounts
from freescale.data.manifest import Manifest
from freescale.data.validation import Quarantine, RowGroup
from freescale.progress import track

TOP = 3
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_SAMPLE = 1 << 20  # values kept for quantiles
_FEW = 1000  # integers with at most so many distinct values are proposed as ids


class ColumnStats(NamedTuple):
    """What a column holds."""

    name: str
    group: Group
    kind: str
    """id, set, integer or number."""
    values: int
    missing: int
    distinct: int
    """0 for numbers with a fraction."""
    top: list[tuple[int, int]]
    """The most frequent integers and how often each occurs."""
    quantiles: list[float]
    """At `SHARES`; empty for ids."""
    by_item: bool
    """Whether all events of an item have the same value."""

    @property
    def missing_share(self) -> float:
        """Share of the values that are null."""
        return self.missing / max(1, self.values)


def describe_columns(address: str, on_bad: Literal["stop", "skip"] = "stop") -> list[ColumnStats]:
    """Describe all columns in one pass with bounded memory. `on_bad`: what an unusable row does."""
    plain = Dataset(address)
    requests = list(_requests(plain.schema, plain.manifest, _row_sets(plain)))
    if not requests:
        return []
    dataset = Dataset(address, features=requests, quarantine=Quarantine(on_bad))
    collectors = {request.name: _Collector(request) for request in requests}
    groups = map(dataset.read_group, range(dataset.layout.groups))
    for rows in track(groups, "describing columns", total=dataset.layout.groups, unit="row groups"):
        for collector in collectors.values():
            collector.add(rows)
    return [collector.result() for collector in collectors.values()]


def _row_sets(dataset: Dataset) -> set[str]:
    """Return the lists of integers that are sets of their row: unlike lists of events they differ in length."""
    lists = [f.name for f in dataset.schema if pa.types.is_list(f.type) and pa.types.is_integer(f.type.value_type)]
    found = set()
    for name in lists if dataset.layout.groups else ():
        if name in REQUIRED or is_candidate(name):
            continue
        request = ColumnRequest(name, "data stats", "sample", "set", nullable=True)
        columns = Dataset(dataset.address, features=[request], quarantine=Quarantine("skip")).read_group(0).columns
        if (columns[name].lengths != columns["item_id"].lengths).any():
            found.add(name)
    return found


def _requests(schema: pa.Schema, manifest: Manifest | None, row_sets: set[str]) -> Iterator[ColumnRequest]:
    """Yield how to read each column: ids if they have a vocabulary, else by type. Others are left out."""
    known = manifest.features if manifest else {}
    for field in schema:
        if field.name in (*REQUIRED, CANDIDATE):
            continue
        depth, kind = 0, field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            depth, kind = depth + 1, kind.value_type
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if not number or depth > 2:
            continue
        is_set = depth == 2 or field.name in row_sets
        group: Group = "sample" if depth == 0 else "candidates" if CANDIDATE in schema.names else "history"
        group = "history" if depth and not is_candidate(field.name) else group
        group = "sample" if field.name in row_sets else group
        is_id = field.name.removeprefix("candidate_") in known
        whole = "id" if is_id else "bits"  # bits: any integer
        name = "set" if is_set else whole if pa.types.is_integer(kind) else "number"
        yield ColumnRequest(field.name, "data stats", group, name, nullable=True)  # type: ignore[arg-type]


class _Collector:
    """Counts the values of one column."""

    def __init__(self, request: ColumnRequest) -> None:
        self._request, self._counts = request, ValueCounts()
        self._kind = {"bits": "integer"}.get(request.kind, request.kind)
        self._numbers: list[NDArray[Any]] = []
        self._values = self._missing = self._kept = 0
        self._by_item: dict[int, float] | None = {} if request.group == "history" and request.kind != "set" else None

    def add(self, rows: RowGroup) -> None:
        """Count the values of a row group."""
        column = rows.columns[self._request.name]
        values = column.values if column.offsets is not None else column.values[rows.usable]
        null = np.isnan(values) if self._kind == "number" else values == MISSING
        present = values[~null]
        self._values, self._missing = self._values + len(values), self._missing + int(null.sum())
        if self._kind == "number":
            room = max(0, _SAMPLE - self._kept)
            self._numbers.append(present[:room])
            self._kept += len(self._numbers[-1])
        else:
            self._counts.add(present.astype(np.int64))
        self._compare_by_item(rows.columns["item_id"].values, values)

    def _compare_by_item(self, items: NDArray[Any], values: NDArray[Any]) -> None:
        """Give up on `by_item` at the first item with two values."""
        if self._by_item is None:
            return
        pairs = np.unique(np.stack([items, np.nan_to_num(values.astype(np.float64), nan=-1e18)]), axis=1)
        for item, value in pairs.T.tolist():
            if self._by_item.setdefault(int(item), value) != value:
                self._by_item = None
                return

    def result(self) -> ColumnStats:
        """Return what was counted."""
        self._counts.merge_pending()
        counts = self._counts
        numbers = np.concatenate([np.zeros(0), *self._numbers]) if self._kind == "number" else counts.values
        weights = None if self._kind == "number" else counts.counts
        quantiles: list[float] = []
        if self._kind in ("number", "integer") and len(numbers):
            method = "linear" if weights is None else "inverted_cdf"
            quantiles = np.quantile(numbers, SHARES, weights=weights, method=method).tolist()
        order = np.argsort(-counts.counts, kind="stable")[:TOP]
        top = list(zip(counts.values[order].tolist(), counts.counts[order].tolist(), strict=True))
        return ColumnStats(
            self._request.name,
            self._request.group,
            self._kind,
            self._values,
            self._missing,
            len(counts.values),
            top,
            quantiles,
            by_item=bool(self._by_item),
        )


def propose_config(base: RunConfig, address: str) -> RunConfig:
    """Return a config for the columns of a data set: its features, and the labels if it has any."""
    columns, manifest = describe_columns(address), Dataset(address).manifest
    labels = [column for column in columns if column.name.startswith("label_")]
    task = base.task
    if labels:
        of_events = labels[0].group == "history"
        numbers = tuple(c.name for c in labels if c.quantiles and (c.quantiles[0] < 0 or c.quantiles[-1] > 1))
        task = replace(
            task,
            kind="ranking",
            labels=tuple(column.name for column in labels),
            regression=numbers,
            anchors="labeled" if of_events else "none",
        )
    features = propose_features(columns, manifest.features if manifest else {})
    return replace(base, data=replace(base.data, path=address), task=task, features=features)


def propose_features(columns: list[ColumnStats], sizes: Mapping[str, int]) -> dict[str, FeatureConfig]:
    """Propose a schema. `sizes`: of the vocabularies of the data set.

    A column of events with one value per item belongs to the item, others to the event; a value per row to the user. A
    column that only candidates have becomes a candidate feature, labels become none.
    """
    proposed = {}
    of_events = {column.name for column in columns if column.group == "history"}
    for column in columns:
        base = column.name.removeprefix("candidate_")
        if column.name.startswith(("label_", "true_")) or (column.group == "candidates" and base in of_events):
            continue
        scope = {"sample": "user", "candidates": "candidate", "history": "item" if column.by_item else "event"}
        if column.group == "history" and column.kind == "set":
            scope["history"] = "item"
        kind, rows = column.kind, 0
        if kind == "integer":
            few = column.distinct <= _FEW and column.quantiles and column.quantiles[0] >= 0
            kind, rows = ("id", int(column.quantiles[-1]) + 1) if few else ("number", 0)
        if kind == "set" and base not in sizes:
            rows = max((value for value, _ in column.top), default=0) + 1
        missing = "default" if column.missing else "refuse"
        values: dict[str, Any] = {"scope": scope[column.group], "kind": kind, "rows": rows, "missing": missing}
        proposed[base] = FeatureConfig(column="" if base == column.name else column.name, **values)
    return proposed
