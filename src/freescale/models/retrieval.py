"""The retrieval task: predict the next item at every event, by a sampled softmax over cosines."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.batch import Batch, index_ranges
from freescale.data.device_copy import to_device
from freescale.data.feature_schema import Feature
from freescale.data.partitions import IS_TARGET
from freescale.data.vocabulary import FIRST_SLOT
from freescale.models.encoders import build_encoder
from freescale.models.feature_embedding import FeatureEmbedding, FeatureValues, TableIds
from freescale.models.jagged import JaggedLayout
from freescale.models.keyed import Keys
from freescale.models.protocol import Rows
from freescale.models.sampled_softmax import sampled_softmax
from freescale.models.tokens import TokenMap
from freescale.visibility import Visibility

_NEGATIVES_SALT = 1 << 20  # distinct from the salts of all dropout sites


@dataclass(frozen=True)
class RetrievalInputs:
    """Histories, and for training the negatives of every event."""

    ids: dict[str, Tensor]
    """`item`: all events; in training followed by the negatives of all events."""
    map: TokenMap
    features: tuple[dict[str, FeatureValues], dict[str, FeatureValues]]
    """Of the samples, which become prefix tokens, and of the events."""
    keys: Keys | None
    """Enable dropout."""
    queries: Tensor
    """Events that have a next event, of partitions only if that is a target."""
    nonempty: Tensor
    """Samples with events."""

    @property
    def layout(self) -> JaggedLayout:
        """The layout of the tokens."""
        return self.map.layout

    @property
    def count(self) -> int:
        """Number of events that have a next event."""
        return len(self.queries)


class Retrieval(nn.Module):
    """An encoder and the loss of its outputs against the items."""

    def __init__(self, config: RunConfig, *, items: int, features: Mapping[str, Feature] | None = None) -> None:
        super().__init__()
        self.features = FeatureEmbedding(features or {}, config.model.dim, deviation=config.tables.init)
        self.tables = {"item": (items, config.model.dim), **self.features.tables}
        self._items, self._seed, self._task = items, config.seed, config.task
        self._samples_slots = config.samples_slots
        self._actions = {name for name, feature in (features or {}).items() if feature.config.scope == "event"}
        self._prefix = len(self.features.applicable("sample"))
        shape = {"prefix": self._prefix, "per_event": 1 + config.task.interleave}
        self._visibility = Visibility.of_model(config.model, **shape)
        tokens = (self._visibility or Visibility(**shape)).tokens(config.data.max_history)
        self.encoder = build_encoder(config.model, max_seq_len=tokens)

    def prepare(self, batch: Batch) -> RetrievalInputs:
        """Lay out a batch for training: on the host, except for the negatives."""
        inputs = self._lay_out(batch.on_host)
        sample_id = batch.on_host.sample_id
        keys = Keys.from_layout(inputs.layout, sample_id, seed=self._seed, step=batch.step_key)
        inputs = to_device(replace(inputs, keys=keys), batch.device)
        assert inputs.keys is not None
        of_events = Keys(inputs.keys.token[inputs.map.events])
        negatives = of_events.randint(self._task.negatives, self._items, salt=_NEGATIVES_SALT)
        negatives = FIRST_SLOT - negatives if self._samples_slots else negatives
        ids = {**inputs.ids, "item": torch.cat([inputs.ids["item"], negatives.flatten()])}
        return replace(inputs, ids=ids)

    def prepare_query(self, batch: Batch) -> RetrievalInputs:
        """Lay out a batch for predicting the item after the last event of each sample."""
        return to_device(self._lay_out(batch.on_host), batch.device)

    def _lay_out(self, batch: Batch) -> RetrievalInputs:
        interleave, ids = self._task.interleave, TableIds()
        tokens = TokenMap.from_batch(batch, prefix=self._prefix, interleave=interleave, visibility=self._visibility)
        ids.add("item", batch.history["item_id"])
        features = self.features.prepare(batch, "sample", ids), self.features.prepare(batch, "history", ids)
        event, query = batch.history["timestamp"], _query_times(batch)
        size = tokens.layout.tokens
        if size != len(event):
            own, both = (tokens.events, event), (event, query)
            event, query = (tokens.place(own, (tokens.actions, times), tokens=size) for times in both)
        tokens = tokens.with_times(event, query)
        table_ids, lengths = ids.joined(self.tables, batch.history["item_id"]), batch.history.lengths
        queries = index_ranges(batch.history.offsets[:-1], (lengths - 1).clamp(min=0))
        if IS_TARGET in batch.history.features:
            queries = queries[batch.history[IS_TARGET][queries + 1] == 1]
        return RetrievalInputs(table_ids, tokens, features, None, queries, lengths.nonzero()[:, 0])

    def forward(self, inputs: RetrievalInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Return the sum of the losses of all events that have a next event."""
        items, queries, count = rows["item"], inputs.queries, len(inputs.map.events)
        output = self.encoder(self._embed(inputs, rows), inputs.layout, inputs.keys)
        positive = items.index[queries + 1]
        negatives = items.index[len(items.index) - count * self._task.negatives :].view(count, self._task.negatives)[
            queries
        ]
        output, temperature = output[inputs.map.actions[queries]], self._task.temperature
        return sampled_softmax(output, items.values, positive=positive, negatives=negatives, temperature=temperature)

    def _embed(self, inputs: RetrievalInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Return the embeddings of all tokens."""
        tokens, table, (users, events) = inputs.map, rows["item"], inputs.features
        actions = {name: v for name, v in events.items() if self._task.interleave and name in self._actions}
        added = self.features({name: v for name, v in events.items() if name not in actions}, rows)
        x = F.embedding(table.index[: len(tokens.events)], table.values)
        x = x if added is None else x + added.to(x.dtype)
        parts = [(tokens.events, x)]
        if self._task.interleave:
            of_actions = self.features(actions, rows)
            parts.append((tokens.actions, torch.zeros_like(x) if of_actions is None else of_actions.to(x.dtype)))
        if users:
            parts.append((tokens.prefix, self.features.tokens(users, rows).flatten(0, 1).to(x.dtype)))
        size = tokens.layout.tokens
        return x if size == len(x) else tokens.place(*parts, tokens=size)

    def encode_query(self, inputs: RetrievalInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Return the query vector of each sample, to compare with `encode_items`; 0 without events."""
        output = self.encoder(self._embed(inputs, rows), inputs.layout, None)
        last, nonempty = inputs.layout.offsets[1:] - 1, inputs.nonempty
        vectors = output.new_zeros(len(last), output.shape[1])
        vectors[nonempty] = F.normalize(output[last[nonempty]], dim=-1)
        return vectors

    def encode_items(self, rows: Tensor) -> Tensor:
        """Return the vectors of table rows, to compare with `encode_query`."""
        return F.normalize(rows, dim=-1)


def _query_times(batch: Batch) -> Tensor:
    """Return the query time of each event: that of the next event, and for the last event that of its target."""
    event, end, nonempty = batch.history["timestamp"], batch.history.offsets[1:], batch.history.lengths > 0
    query = torch.cat([event[1:], event[-1:]])
    last = end[nonempty] - 1
    query[last] = event[last]
    if batch.targets is not None:
        has_target = nonempty & (batch.targets.lengths > 0)
        query[end[has_target] - 1] = batch.targets["timestamp"][batch.targets.offsets[:-1][has_target]]
    return query
