"""What samples look up in embedding tables: counted in a part of the data, without torch.

Of every table of a feature: how many ids an event or candidate brings in the mean, how popular they are, and how wide
their rows are. A table whose ids are made while training (crosses, hours of the week, quantiles) counts as one of
equally popular rows, and what a sample repeats for its candidates is counted once.
"""

from typing import NamedTuple

import numpy as np

from freescale.balance.placement import Ints
from freescale.config import RunConfig
from freescale.data.columns import CANDIDATE, MISSING
from freescale.data.dataset import Dataset, ValueCounts
from freescale.data.feature_schema import HOURS, FeatureSchema, candidate_column
from freescale.data.validation import RowGroup

_ROW_GROUPS = 64


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
