"""Embeds the features of a config: ids and sets from tables, numbers and bit masks by learned projections.

`FeatureEmbedding.prepare` turns the columns of one group (rows, events or candidates) into table ids and dense values;
`forward` turns them into one vector per entry. A feature has one projection wherever it occurs, so an item is embedded
alike as an event and as a candidate.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from freescale.data.batch import Batch, Events, set_group
from freescale.data.columns import MISSING
from freescale.data.feature_schema import HOURS, Feature, candidate_column, table_sizes
from freescale.hashing import splitmix64
from freescale.models.protocol import Rows

Part = Literal["sample", "history", "candidates"]
_SECONDS_PER_HOUR = 3600
_POSITIVE = 0x7FFFFFFFFFFFFFFF


@dataclass
class TableIds:
    """Collects the ids of several features by table. Each addition is told its place among the ids of its table."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, table: str, ids: Tensor) -> slice:
        """Add ids of a table; return their place."""
        begin = self.sizes.get(table, 0)
        self.parts.setdefault(table, []).append(ids)
        self.sizes[table] = begin + len(ids)
        return slice(begin, self.sizes[table])

    def joined(self, tables: Iterable[str], like: Tensor) -> dict[str, Tensor]:
        """Return the ids of every table; `like`: an empty tensor of ids for tables without any."""
        return {name: torch.cat(self.parts[name]) if name in self.parts else like[:0] for name in tables}


class FeatureValues(NamedTuple):
    """The values of one feature for all entries of a group."""

    rows: slice | None = None
    """Place of its ids among those of its table."""
    counts: Tensor | None = None
    """Of a set: ids per entry."""
    dense: Tensor | None = None
    """Of numbers and bit masks: [entries, columns]."""


class FeatureEmbedding(nn.Module):
    """The embeddings of all features, except for the tables themselves, which are sharded."""

    def __init__(self, features: Mapping[str, Feature], dim: int, *, deviation: float) -> None:
        super().__init__()
        self._features, self._dim = features, dim
        self.tables = {name: size for name, size in table_sizes(features).items() if name != "item"}
        """Rows and width of every table besides that of the items."""
        self.weights = nn.ParameterDict()
        self._copies: dict[str, tuple[Tensor, int, Tensor]] = {}
        """Statistics on the host: those that were copied, their version, and the copy."""
        for name, feature in features.items():
            width, scale = _projected_width(feature, dim), deviation if not feature.table else feature.dim**-0.5
            if width:
                self.weights[name] = nn.Parameter(torch.empty(dim, width).normal_(std=scale))
            if feature.config.kind == "number":
                sizes = feature.config.buckets - 1 if feature.table else 2
                self.register_buffer(f"statistics_{name}", torch.zeros(sizes, dtype=torch.float64))

    def applicable(self, part: Part) -> list[Feature]:
        """Return the features that entries of a group have, in the order of the config."""
        return [feature for feature in self._features.values() if feature.applies_to(part)]

    def set_statistics(self, statistics: Mapping[str, Iterable[float]]) -> None:
        """Set mean and deviation, or the edges of quantiles, of each number."""
        for name, values in statistics.items():
            self._statistics(name).copy_(torch.as_tensor(list(values)))

    def prepare(self, batch: Batch, part: Part, ids: TableIds) -> dict[str, FeatureValues]:
        """Lay out the features of a group of a batch on the host: table ids go to `ids`."""
        group: Events | None = batch.candidates if part == "candidates" else batch.history
        columns = batch.scalars if part == "sample" or group is None else group.features
        values = {}
        for feature in self.applicable(part):
            column = candidate_column(feature.column) if part == "candidates" else feature.column
            if feature.config.kind == "cross":
                values[feature.name] = FeatureValues(ids.add(feature.table, self._cross(feature, batch)))
            elif feature.config.kind == "set":
                members = batch.sets[set_group(part, column)][""]
                values[feature.name] = FeatureValues(ids.add(feature.table, members), counts=columns[column])
            elif feature.table:
                values[feature.name] = FeatureValues(ids.add(feature.table, self.ids(feature, columns[column])))
            else:
                values[feature.name] = FeatureValues(dense=self.dense(feature, columns[column]))
        return values

    def forward(self, values: Mapping[str, FeatureValues], rows: Mapping[str, Rows]) -> Tensor | None:
        """Return the sum of the embeddings of all features: [entries, dim]. None without features."""
        summed, projected = [], []
        for name, value in values.items():
            embedded = self._embed(name, value, rows)
            (projected if name in self.weights else summed).append((name, embedded))
        if projected:  # one product instead of one per feature
            weights = torch.cat([self.weights[name] for name, _ in projected], dim=1)
            summed.append(("", F.linear(torch.cat([x.to(weights.dtype) for _, x in projected], dim=1), weights)))
        return sum((x for _, x in summed[1:]), start=summed[0][1]) if summed else None

    def tokens(self, values: Mapping[str, FeatureValues], rows: Mapping[str, Rows]) -> Tensor:
        """Return one vector per entry and feature: [entries, features, dim]."""
        vectors = []
        for name, value in values.items():
            embedded = self._embed(name, value, rows)
            weight = self.weights.get(name)
            vectors.append(embedded if weight is None else F.linear(embedded.to(weight.dtype), weight))
        return torch.stack(vectors, dim=1)

    def _embed(self, name: str, value: FeatureValues, rows: Mapping[str, Rows]) -> Tensor:
        """Return the values of a feature before projection: [entries, width]."""
        if value.dense is not None:
            return value.dense
        table = rows[self._features[name].table]
        vectors = F.embedding(table.index[value.rows], table.values)
        return vectors if value.counts is None else _sum_sets(vectors, value.counts)

    def _cross(self, feature: Feature, batch: Batch) -> Tensor:
        """Return the rows of a cross for each candidate of a batch."""
        assert batch.candidates is not None
        candidates, lengths = batch.candidates, batch.candidates.lengths
        count = len(candidates["candidate_id"])
        return self.cross(
            feature,
            batch.scalars,
            candidates.features,
            repeat=lambda ids: ids.repeat_interleave(lengths, output_size=count),
        )

    def cross(
        self,
        feature: Feature,
        users: Mapping[str, Tensor],
        candidates: Mapping[str, Tensor],
        *,
        repeat: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the rows of a cross: a hash of the ids of each candidate. `repeat`: ids of users for candidates."""
        key = torch.zeros_like(candidates["candidate_id"])
        for name in feature.config.cross:
            part = self._features.get(name)
            of_user = name == "user" or (part is not None and part.config.scope == "user")
            if part is None:
                ids = users["user_id"] if of_user else candidates["candidate_id"]
            else:
                ids = self.ids(part, users[part.column] if of_user else candidates[candidate_column(part.column)])
            key = splitmix64(key ^ (repeat(ids) if of_user else ids))
        return (key & _POSITIVE) % feature.config.rows

    def ids(self, feature: Feature, column: Tensor) -> Tensor:
        """Return the table ids of a column. Ids are mapped to rows by the loader, except for users."""
        if feature.config.ids == "dynamic":
            return column
        if feature.column == "user_id":  # predictions and metrics need it as it is
            shared = feature.vocabulary.items + (splitmix64(column) & _POSITIVE) % feature.vocabulary.oov_rows
            return torch.where(column < feature.vocabulary.items, column, shared)
        if feature.config.kind == "id":
            return column
        if feature.config.kind == "timestamp":
            hour = column.div(_SECONDS_PER_HOUR, rounding_mode="floor").remainder(HOURS)
            return torch.where(column == MISSING, HOURS, hour)
        edges = self._statistics_on_host(feature.name)
        bucket = _bucket(column.to(edges.dtype), edges)
        return torch.where(column.isnan(), feature.config.buckets, bucket)

    def dense(self, feature: Feature, column: Tensor) -> Tensor:
        """Return the dense values of a column: a standardized number, or the bits of a mask."""
        if feature.config.kind == "bits":
            bits = torch.arange(feature.config.bits, device=column.device)
            mask = torch.where(column == MISSING, 0, column)
            return (mask[:, None] >> bits & 1).to(torch.get_default_dtype())
        mean, deviation = self._statistics_on_host(feature.name).unbind()
        scaled = (column.to(mean.dtype) - mean) / deviation
        return scaled.nan_to_num(0.0)[:, None]

    def _statistics(self, name: str) -> Tensor:
        return self.get_buffer(f"statistics_{name}")

    def _statistics_on_host(self, name: str) -> Tensor:
        """Return a copy for columns of the host, made anew when the statistics have changed."""
        buffer = self._statistics(name)
        if torch.compiler.is_exporting():
            return buffer
        kept, version, copy = self._copies.get(name, (None, 0, buffer))
        if kept is not buffer or version != buffer._version:
            copy = buffer.cpu()
            self._copies[name] = buffer, buffer._version, copy
        return copy


def _projected_width(feature: Feature, dim: int) -> int:
    """Return the columns that are projected to the width of the model; 0 if the feature is added as it is."""
    if not feature.table:
        return feature.config.bits if feature.config.kind == "bits" else 1
    return feature.dim if feature.config.combine == "concat" or feature.dim != dim else 0


def _bucket(values: Tensor, edges: Tensor) -> Tensor:
    """Return how many edges are not above each value. Inductor's bucketize returns rows that do not exist."""
    if torch.compiler.is_exporting():
        return (values[..., None] >= edges).sum(-1)
    return torch.bucketize(values, edges, right=True)


def _sum_sets(vectors: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of the vectors of each set, in their order; 0 for an empty set."""
    return torch.segment_reduce(vectors, "sum", lengths=counts, axis=0, unsafe=True, initial=0)
