"""The retrieval task: predict the next item at every event, by a sampled softmax over cosines."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from freescale import deterministic
from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.data.device_copy import to_device
from freescale.data.feature_schema import Feature
from freescale.models.encoders import build_encoder
from freescale.models.feature_embedding import FeatureEmbedding, FeatureValues, TableIds
from freescale.models.jagged import JaggedLayout
from freescale.models.keyed import Keys
from freescale.models.protocol import Rows
from freescale.models.tokens import TokenMap

_NEGATIVES_SALT = 1 << 20  # distinct from the salts of all dropout sites
_CHUNK = 128  # tokens per chunk: their scores stay in the cache of a core
_MAX_PRODUCT_RATIO = 64  # a product with all rows is cheaper than a gather up to this ratio of rows to samples


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
    """Events that have a next event."""
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
        self._actions = {name for name, feature in (features or {}).items() if feature.config.scope == "event"}
        self._prefix = len(self.features.applicable("sample"))
        tokens = config.data.max_history * (1 + config.task.interleave)
        self.encoder = build_encoder(config.model, max_seq_len=self._prefix + tokens)

    def prepare(self, batch: Batch) -> RetrievalInputs:
        """Lay out a batch for training: on the host, except for the negatives."""
        inputs = self._lay_out(batch.on_host)
        sample_id = batch.on_host.sample_id
        keys = Keys.from_layout(inputs.layout, sample_id, seed=self._seed, step=batch.step_key)
        inputs = to_device(replace(inputs, keys=keys), batch.device)
        assert inputs.keys is not None
        of_events = Keys(inputs.keys.token[inputs.map.events])
        negatives = of_events.randint(self._task.negatives, self._items, salt=_NEGATIVES_SALT)
        ids = {**inputs.ids, "item": torch.cat([inputs.ids["item"], negatives.flatten()])}
        return replace(inputs, ids=ids)

    def prepare_query(self, batch: Batch) -> RetrievalInputs:
        """Lay out a batch for predicting the item after the last event of each sample."""
        return to_device(self._lay_out(batch.on_host), batch.device)

    def _lay_out(self, batch: Batch) -> RetrievalInputs:
        tokens, ids = TokenMap.from_batch(batch, prefix=self._prefix, interleave=self._task.interleave), TableIds()
        ids.add("item", batch.history["item_id"])
        features = self.features.prepare(batch, "sample", ids), self.features.prepare(batch, "history", ids)
        event, query = batch.history["timestamp"], _query_times(batch)
        if len(tokens.prefix) or self._task.interleave:
            size = len(tokens.prefix) + len(event) * (1 + self._task.interleave)
            own, both = (tokens.events, event), (event, query)
            event, query = (tokens.place(own, (tokens.actions, times), tokens=size) for times in both)
        tokens = tokens.with_times(event, query)
        table_ids, lengths = ids.joined(self.tables, batch.history["item_id"]), batch.history.lengths
        queries = _ranges(batch.history.offsets[:-1], (lengths - 1).clamp(min=0))
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
        return x if len(parts) == 1 else tokens.place(*parts, tokens=sum(len(index) for index, _ in parts))

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


def _ranges(begin: Tensor, lengths: Tensor) -> Tensor:
    """Return the numbers begin[i] to begin[i] + lengths[i], for every i."""
    total = lengths.cumsum(0)
    count = int(total[-1]) if len(total) else 0
    shift = (begin - (total - lengths)).repeat_interleave(lengths, output_size=count)
    return torch.arange(count, device=begin.device) + shift


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


def sampled_softmax(output: Tensor, rows: Tensor, *, positive: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Return the sum of the cross entropies of the positive item among itself and the negatives, by cosine.

    `output` [tokens, dim] is compared with items of `rows` [distinct, dim], which `positive` [tokens] and `negatives`
    [tokens, count] index. A negative that equals the positive is masked.
    """
    sampled = torch.cat([positive[:, None], negatives], dim=1)
    masked = F.pad(negatives == positive[:, None], (1, 0))
    with torch.autocast(output.device.type, enabled=False):  # cosines over a small temperature need full precision
        output, rows = F.normalize(output.to(rows.dtype), dim=-1), F.normalize(rows, dim=-1)
        return _SampledSoftmax.apply(output / temperature, rows, sampled, masked)


class _SampledSoftmax(torch.autograd.Function):
    """Sum of -log softmax of the first sampled row among all sampled rows, over all tokens.

    The forward pass computes the gradients too, chunk by chunk, so that no matrix of [tokens, rows] or
    [tokens, sampled, dim] exists.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        output, rows, sampled, masked = inputs
        total = output.new_zeros(())
        d_output, d_rows = torch.empty_like(output), torch.zeros_like(rows)
        chunk_loss = _loss_by_product if len(rows) <= _MAX_PRODUCT_RATIO * sampled.shape[1] else _loss_by_gather
        for begin in range(0, len(output), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            total += chunk_loss(output[part], rows, sampled[part], masked[part], d_output[part], d_rows)
        ctx.save_for_backward(d_output, d_rows)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_output, d_rows = ctx.saved_tensors
        return d_output * gradients[0], d_rows * gradients[0], None, None


def _loss_by_product(
    output: Tensor, rows: Tensor, sampled: Tensor, masked: Tensor, d_output: Tensor, d_rows: Tensor
) -> Tensor:
    """Compute the scores of all rows and select the sampled ones."""
    scores = output @ rows.T
    loss, gradient = _cross_entropy(scores.gather(1, sampled), masked)
    deterministic.scatter_add_(scores.zero_(), sampled, gradient)
    torch.mm(scores, rows, out=d_output)
    d_rows.addmm_(scores.T, output)
    return loss


def _loss_by_gather(
    output: Tensor, rows: Tensor, sampled: Tensor, masked: Tensor, d_output: Tensor, d_rows: Tensor
) -> Tensor:
    """Compute the scores of the sampled rows only."""
    gathered = rows[sampled]
    loss, gradient = _cross_entropy(torch.einsum("td,tkd->tk", output, gathered), masked)
    d_output.copy_(torch.einsum("tk,tkd->td", gradient, gathered))
    deterministic.index_add_(d_rows, sampled.flatten(), (gradient[:, :, None] * output[:, None]).flatten(0, 1))
    return loss


def _cross_entropy(scores: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of the first column against the others, and the gradient of the scores."""
    scores = scores.masked_fill_(masked, float("-inf"))
    log_total = scores.logsumexp(1)
    loss = (log_total - scores[:, 0]).sum()
    gradient = (scores - log_total[:, None]).exp_()
    gradient[:, 0] -= 1.0
    return loss, gradient
