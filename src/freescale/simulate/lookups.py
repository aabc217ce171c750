"""What samples look up in embedding tables: counted in a part of the data, without torch.

Of every table of a feature: how many ids an event or candidate brings in the mean, how popular they are, and how wide
their rows are. A table whose ids are made while training (crosses, hours of the week, quantiles) counts as one of
equally popular rows, and what a sample repeats for its candidates is counted once.

From the popularity of ids follow the distinct rows that a rank requests, and how busy the owners are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from freescale.balance.placement import Floats, Ints
from freescale.config import RunConfig
from freescale.data.columns import CANDIDATE, MISSING
from freescale.data.dataset import Dataset, ValueCounts
from freescale.data.feature_schema import HOURS, FeatureSchema, candidate_column
from freescale.data.validation import RowGroup
from freescale.embedding.row_order import Owners, RowOrder, bit_reversal

_ROW_GROUPS = 64
_POINTS = 96


class TableSample(NamedTuple):
    """The ids that one table is asked for."""

    dim: int
    per_token: float
    """Ids per event or candidate."""
    ids: ValueCounts


class DataSample(NamedTuple):
    """What is counted in row groups that are spread over a data set."""

    candidates: ValueCounts
    """Candidates of a row; with anchors all are 0."""
    anchors: float
    """Targets per event of a history, with anchors."""
    tables: tuple[TableSample, ...]
    """Of features; that of items is not among them."""


def sample_data(config: RunConfig, dataset: Dataset) -> DataSample:
    """Count candidates, and the ids of features."""
    schema = FeatureSchema.from_config(config)
    named = Dataset(dataset.address, features=schema.columns()) if schema.columns() else dataset
    chosen = np.unique(np.linspace(0, named.layout.groups - 1, _ROW_GROUPS).astype(int)).tolist()
    counted, events, targets, candidates = dict[str, _CountedTable](), 0, 0, ValueCounts()
    for group in map(named.read_group, chosen):
        offered = _targets(group, config)
        events, targets = events + int(group.columns["item_id"].lengths.sum()), targets + int(offered.sum())
        candidates.add(offered[group.usable] * (not schema.anchored))
        for name, feature in schema.features.items():
            if feature.has_table:
                table = counted.setdefault(feature.table or name, _CountedTable(feature.dim or schema.dim))
                table.add(_looked_up(group, name, config, targets=int(offered.sum())))
    candidates.merge_pending()
    tables = tuple(table.result(events + targets) for table in counted.values())
    return DataSample(candidates, targets / max(1, events) if schema.anchored else 0.0, tables)


class _CountedTable:
    """Counts the ids of one table."""

    def __init__(self, dim: int) -> None:
        self._dim, self._ids, self._lookups = dim, ValueCounts(), 0.0

    def add(self, looked_up: tuple[Ints, float]) -> None:
        """Add ids and how many lookups they are."""
        ids, lookups = looked_up
        self._ids.add(ids)
        self._lookups += lookups

    def result(self, tokens: int) -> TableSample:
        """Return the sums, per event or candidate."""
        self._ids.merge_pending()
        return TableSample(self._dim, self._lookups / max(1, tokens), self._ids)


def _targets(group: RowGroup, config: RunConfig) -> Ints:
    """Return how many candidates each row has, or how many of its events are targets."""
    task, events = config.task, group.columns["item_id"]
    if task.kind != "ranking":
        return np.zeros_like(events.lengths)
    if task.anchors == "none":
        return group.columns[CANDIDATE].lengths if CANDIDATE in group.columns else np.zeros_like(events.lengths)
    if task.anchors == "every":
        return events.lengths // task.anchor_step
    if task.anchors == "after":
        is_target = group.columns["timestamp"].values >= task.anchor_time
    else:
        is_target = ~np.isnan([group.columns[label].values for label in task.labels]).all(axis=0)
    begin, end = events.bounds
    before = np.concatenate([[0], np.cumsum(is_target)])
    return before[end] - before[begin]


def _looked_up(group: RowGroup, name: str, config: RunConfig, *, targets: int) -> tuple[Ints, float]:
    """Return ids of a feature, and how many lookups there are."""
    feature, anchored = config.features[name], config.task.anchors != "none"
    column, at_targets = feature.column or name, feature.scope in ("context", "candidate")
    stored = [group.columns[each] for each in (column, candidate_column(column)) if each in group.columns]
    if feature.kind in ("id", "set"):
        ids = np.concatenate([part.values for part in stored]).astype(np.int64)
        ids = ids[ids != MISSING]
        share = targets / max(1, len(group.columns["item_id"].values)) if anchored and at_targets else 1.0
        return ids, share * len(ids)
    rows = {"cross": feature.rows, "timestamp": HOURS}.get(feature.kind, feature.buckets)
    return np.arange(rows), targets if at_targets else sum(len(part.values) for part in stored)


class RowModel(Protocol):
    """Predicts the rows that events need."""

    def rows(self, events: Floats) -> Floats:
        """Return the distinct rows of this many events of a rank."""

    def shared(self, events: Floats, before: float) -> Floats:
        """Return how many of those rows the `before` events of the previous step need too."""


class Popularity:
    """A `RowModel` of independent events: groups of equally popular items, and the share of events of each item.

    `drawn`: rows that are looked up at random for every event (negatives).
    """

    def __init__(self, items: Floats, share: Floats, *, drawn: int = 0) -> None:
        self._items, self._share = items, share
        self._at_random = drawn / max(1.0, float(items.sum()))

    @staticmethod
    def from_counts(counts: Ints, *, drawn: int = 0) -> "Popularity":
        """Build from the number of occurrences of each item of a log."""
        occurrences, items = np.unique(counts, return_counts=True)
        return Popularity(items.astype(np.float64), occurrences / max(1, counts.sum()), drawn=drawn)

    def rows(self, events: Floats) -> Floats:
        """Return the expected number of distinct rows of these events."""
        return self._interpolate(events, lambda n: float(self._items @ self._touched(n)))

    def shared(self, events: Floats, before: float) -> Floats:
        """Return how many of those rows the `before` events of the previous step are expected to need too."""
        touched_before = self._items * self._touched(before)
        return self._interpolate(events, lambda n: float(touched_before @ self._touched(n)))

    @property
    def items(self) -> float:
        """The number of items."""
        return float(self._items.sum())

    def without(self, rows: int) -> "Popularity":
        """Return the model of the other items if the most popular ones are not requested."""
        order = np.argsort(-self._share, kind="stable")
        items, rest = self._items[order], Popularity(self._items, self._share)
        rest._items = np.clip(np.cumsum(items) - rows, 0.0, items)
        rest._share, rest._at_random = self._share[order], self._at_random
        return rest

    def _touched(self, events: float) -> Floats:
        """Return the probability that some of these events need an item, for each group."""
        return -np.expm1(events * (np.log1p(-np.minimum(self._share, 1 - 1e-12)) - self._at_random))

    def _interpolate(self, events: Floats, function: Callable[[float], float]) -> Floats:
        """Evaluate at a few points and interpolate linearly on a logarithmic scale."""
        points = np.geomspace(1.0, max(2.0, float(events.max(initial=1.0))), _POINTS)
        values = np.array([function(point) for point in points])
        return np.interp(np.log(np.maximum(events, 1.0)), np.log(points), values) * (events > 0)


@dataclass(frozen=True)
class RowOwners:
    """Predicts how many rows each owner serves, from the items of a log."""

    position: Floats
    """Position of each item in the order of rows, as a share of all positions."""
    share: Floats
    """Share of the events of each item."""
    drawn: float = 0.0
    """Rows of each item that are looked up at random, per event."""
    others: RowModel | None = None
    """Further items, so many and so rare that all owners have equally many of their rows."""

    @staticmethod
    def from_counts(items: ValueCounts, owners: Owners, *, drawn: int = 0) -> "RowOwners":
        """Build from the items of a log, or the ids of a table, and the rule that assigns their rows to owners."""
        order = RowOrder.of(int(items.values.max(initial=0)) + 1, owners)
        position = order.position(items.values, bit_reversal(order.shards))
        return RowOwners(position / order.positions, items.counts / max(1, items.counts.sum()), drawn / order.rows)

    def without(self, rows: int) -> "RowOwners":
        """Return the model of the other items if the first ones, the most popular, are not requested."""
        return replace(self, position=self.position[rows:], share=self.share[rows:])

    def served(self, events: Floats, owners: int, rng: np.random.Generator) -> Floats:
        """Draw the rows that each owner serves over the mean of all, if those who request rows have so many events.

        They request items independently, so the sum of an owner is nearly normal.
        """
        requests, owner = len(events), (self.position * owners).astype(np.int64)
        absent = np.exp(float(events.mean()) * (np.log1p(-np.minimum(self.share, 1 - 1e-12)) - self.drawn))
        mean = requests * np.bincount(owner, 1 - absent, minlength=owners)
        deviation = np.sqrt(requests * np.bincount(owner, absent * (1 - absent), minlength=owners))
        rows = np.maximum(0.0, rng.normal(mean, deviation))
        if self.others is not None:
            rows += requests / owners * float(self.others.rows(np.array([events.mean()]))[0])
        return rows / max(float(rows.mean()), 1e-300)
