"""The features of a config: which columns they read, what reaches the candidates, and how many table rows they need.

A batch holds a feature in the group of its scope: one value per row, per event or per candidate. All that a candidate
has is a column `candidate_NAME` of the candidates, wherever it was stored: request context is repeated for them, and
with anchors they are copied from the events of the history.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freescale.config import FeatureConfig, RunConfig, TaskConfig
from freescale.data.columns import CANDIDATE, REQUIRED, ColumnRequest, Group
from freescale.data.dataset import Dataset
from freescale.data.vocabulary import ItemVocabulary
from freescale.errors import ConfigError, DataError

HOURS = 168
"""Rows of the table of a timestamp: the hours of a week."""
_MEASURED_GROUPS = 64
ANCHOR = "candidate_anchor"
"""Column of the candidates: how many events of its history a candidate sees."""


def candidate_column(column: str) -> str:
    """Return the name that a column has on the candidates."""
    return column if column.startswith("candidate_") else f"candidate_{column}"


class FeatureSchema(NamedTuple):
    """The part of a config that decides which columns are read."""

    features: Mapping[str, FeatureConfig] = {}
    task: TaskConfig = TaskConfig()
    dim: int = 0
    """Width of tables that do not state one."""
    item: FeatureConfig | None = None
    """The dynamic ids of items, if they are dynamic."""

    @staticmethod
    def from_config(config: RunConfig) -> "FeatureSchema":
        """Return the schema of a run."""
        features = {name: feature for name, feature in config.features.items() if name != "item"}
        return FeatureSchema(features, config.task, config.model.dim, config.features.get("item"))

    @property
    def anchored(self) -> bool:
        """Whether events of the history are the targets."""
        return self.task.anchors != "none"

    def columns(self) -> list[ColumnRequest]:
        """Return the stored columns that features and labels read."""
        found: dict[str, ColumnRequest] = {}
        for name, feature in self.features.items():
            for group, column in self._stored(name, feature):
                request = ColumnRequest(
                    column,
                    f"[features.{name}]",
                    group,
                    feature.kind,  # type: ignore[arg-type]  # a cross reads no column
                    nullable=feature.missing == "default",
                )
                earlier = found.setdefault(column, request)
                if earlier._replace(owner="") != request._replace(owner=""):
                    what = f"{earlier.owner} and {request.owner} read column '{column}' as different things"
                    raise ConfigError(what, key=f"features.{name}", remedy="give both the same scope, kind and missing")
        group: Group = "history" if self.anchored else "candidates"
        for label in self.task.labels if self.task.kind == "ranking" else ():
            found[label] = ColumnRequest(label, "task.labels", group, "number", nullable=True)
        return list(found.values())

    def _stored(self, name: str, feature: FeatureConfig) -> Iterator[tuple[Group, str]]:
        """Yield the group and name of each stored column of a feature."""
        column = feature.column or name
        if feature.kind == "cross":
            return
        if feature.scope in ("item", "event"):
            yield "history", column
        if feature.scope == "user" or (feature.scope == "context" and not self.anchored):
            yield "sample", column
        if self.anchored and feature.scope in ("context", "candidate"):
            yield "history", column
        candidates = self.task.kind == "ranking" and not self.anchored
        if candidates and feature.scope in ("item", "candidate"):
            yield "candidates", candidate_column(column)

    def copied(self) -> dict[str, tuple[Group, str]]:
        """Return the columns of candidates that are copied from elsewhere, with the group and column they come from."""
        source: Group = "history" if self.anchored else "sample"
        scopes = ("item", "context", "candidate") if self.anchored else ("context",)
        columns = [f.column or name for name, f in self.features.items() if f.scope in scopes and f.kind != "cross"]
        copies = {candidate_column(column): (source, column) for column in columns}
        if self.anchored:
            copies |= {CANDIDATE: (source, "item_id"), "candidate_timestamp": (source, "timestamp")}
            copies |= {label: (source, label) for label in self.task.labels}
        return copies

    def only_copied(self) -> set[str]:
        """Return columns of the history that only candidates have in the end."""
        scopes = ("context", "candidate")
        columns = {f.column or name for name, f in self.features.items() if self.anchored and f.scope in scopes}
        used = {f.column or name for name, f in self.features.items() if f.scope in ("item", "event")}
        return (columns | (set(self.task.labels) if self.anchored else set())) - used - set(REQUIRED)


class Feature(NamedTuple):
    """A feature, resolved against a data set."""

    name: str
    config: FeatureConfig
    table: str
    """Its embedding table; empty if it has none."""
    vocabulary: ItemVocabulary
    """Of an id or set: known ids, shared rows and the row of missing values."""
    dim: int

    @property
    def column(self) -> str:
        """Its column in the groups of rows and of events."""
        return self.config.column or self.name

    @property
    def rows(self) -> int:
        """Rows of its table."""
        missing = self.config.missing == "default"
        if self.config.kind == "timestamp":
            return HOURS + missing
        if self.config.kind == "cross":
            return self.config.rows
        return self.config.buckets + missing if self.config.kind == "number" else self.vocabulary.rows

    def applies_to(self, part: Literal["sample", "history", "candidates"]) -> bool:
        """Whether tokens of this group have the feature."""
        scopes = {"sample": ("user",), "history": ("item", "event"), "candidates": ("item", "context", "candidate")}
        return self.config.scope in scopes[part]


def resolve_features(schema: FeatureSchema, dataset: Dataset, oov_rows: int) -> dict[str, Feature]:
    """Return the features of a schema with the sizes of their tables."""
    missing_in = {f.table or name for name, f in schema.features.items() if f.missing == "default"}
    resolved: dict[str, Feature] = {}
    known: dict[str, tuple[str, int]] = {}
    for name, config in schema.features.items():
        table = (config.table or name) if config.has_table else ""
        size = _vocabulary_size(name, config, dataset) if config.kind in ("id", "set") else 0
        other, earlier = known.setdefault(table, (name, size))
        if size != earlier and table:
            sizes = f"[features.{name}] has {size:,} ids, [features.{other}] {earlier:,}"
            what = f"two features share a table but not its size: {sizes}"
            remedy = "give both the same vocabulary: set `rows` in both, or import them as one column"
            raise ConfigError(what, key=f"features.{name}.rows", remedy=remedy)
        dynamic = config.ids == "dynamic"
        vocabulary = ItemVocabulary(size, oov_rows, missing=table in missing_in, dynamic=dynamic)
        resolved[name] = Feature(name, config, table, vocabulary, config.dim or schema.dim)
    return resolved


def _vocabulary_size(name: str, config: FeatureConfig, dataset: Dataset) -> int:
    """Return the number of known ids: stated, or that of the vocabulary of the column."""
    if config.ids == "dynamic":
        return config.rows
    column = (config.column or name).removeprefix("candidate_")
    manifest = dataset.manifest
    recorded = manifest.features.get(column, 0) if manifest else 0
    if config.table == "item":
        recorded = manifest.items if manifest else 0
    if config.rows and recorded > config.rows:
        what = f"[features.{name}]: rows = {config.rows:,}, but column '{column}' has a vocabulary of {recorded:,} ids"
        raise ConfigError(what, key=f"features.{name}.rows", remedy=f"set rows to {recorded} or more, or leave it out")
    if not config.rows and not recorded:
        what = f"[features.{name}]: the data set records no vocabulary of column '{column}', so its table has no size"
        remedy = f"set features.{name}.rows to the number of ids, or import the column as ids"
        raise ConfigError(what, key=f"features.{name}.rows", where=dataset.address, remedy=remedy)
    return config.rows or recorded


def table_sizes(features: Mapping[str, Feature]) -> dict[str, tuple[int, int]]:
    """Return rows and width of every table of features. Features that share a table agree on them."""
    sizes: dict[str, tuple[int, int]] = {}
    for feature in features.values():
        if feature.table:
            rows, _ = sizes.get(feature.table, (0, 0))
            sizes[feature.table] = max(rows, feature.rows), feature.dim
    return sizes


def measure_numbers(dataset: Dataset, features: Mapping[str, Feature]) -> dict[str, list[float]]:
    """Return mean and deviation, or the edges of quantiles, of each number, from row groups spread over the data.

    Depends on the data alone, so every rank returns the same.
    """
    numbers = {name: feature for name, feature in features.items() if feature.config.kind == "number"}
    if not numbers:
        return {}
    groups = np.unique(np.linspace(0, dataset.first_groups - 1, _MEASURED_GROUPS).astype(np.int64)).tolist()
    read = [dataset.read_group(group).columns for group in groups]
    statistics = {}
    for name, feature in numbers.items():
        columns = [c for c in (feature.column, candidate_column(feature.column)) if c in dataset.columns]
        values = np.concatenate([group[column].values for group in read for column in columns]).astype(np.float64)
        values = values[np.isfinite(values)]
        if not len(values):
            what = f"[features.{name}]: column '{columns[0]}' holds no number, so it has no mean and no quantiles"
            raise DataError(what, where=dataset.address, remedy="remove the feature, or fill the column")
        statistics[name] = _statistics(feature, values)
    return statistics


def _statistics(feature: Feature, values: NDArray[np.float64]) -> list[float]:
    if not feature.table:
        return [float(values.mean()), float(values.std()) or 1.0]
    return np.quantile(values, np.linspace(0, 1, feature.config.buckets + 1)[1:-1]).tolist()
