"""Which item comes next: a sampled softmax over cosines, at every event of every history."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.models.encoders import encoder
from freescale.models.keyed import Keys
from freescale.models.losses import sampled_softmax
from freescale.models.protocol import Rows
from freescale.models.sequence import Layout, Times

_NEGATIVES = 1 << 20  # salt: apart from every place of dropout


@dataclass(frozen=True)
class RetrievalInputs:
    """Histories, what came next in each, and what did not."""

    ids: dict[str, Tensor]
    """`item`: all events; in training followed by the negatives of all events."""
    layout: Layout
    keys: Keys | None
    """Turn dropout on."""

    @property
    def count(self) -> int:
        """Events that have a next one."""
        return int((self.layout.lengths - 1).clamp(min=0).sum())


class Retrieval(nn.Module):
    """An encoder and the loss of its outputs against the items."""

    def __init__(self, config: RunConfig, *, items: int) -> None:
        super().__init__()
        self.tables = {"item": (items, config.model.dim)}
        self._items, self._seed, self._task = items, config.seed, config.task
        self.encoder = encoder(config.model, longest=config.data.max_history)

    def prepare(self, batch: Batch) -> RetrievalInputs:
        """Lay out a batch for training."""
        inputs = self.prepare_query(batch)
        keys = Keys.of(inputs.layout, batch.sample_id, seed=self._seed, step=batch.step_key)
        negatives = keys.integers(self._task.negatives, self._items, salt=_NEGATIVES)
        return replace(inputs, ids={"item": torch.cat([inputs.ids["item"], negatives.flatten()])}, keys=keys)

    def prepare_query(self, batch: Batch) -> RetrievalInputs:
        """Lay out a batch for asking what comes after its last events."""
        layout = Layout(batch.history.offsets, times=Times(batch.history["timestamp"], _asked(batch)))
        return RetrievalInputs({"item": batch.history["item_id"]}, layout, None)

    def forward(self, inputs: RetrievalInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Sum of the losses of all events that have a next one."""
        items, layout, tokens = rows["item"], inputs.layout, inputs.layout.tokens
        output = self.encoder(F.embedding(items.index[:tokens], items.values), layout, inputs.keys)
        asked = (layout.position + 1 < layout.lengths.repeat_interleave(layout.lengths)).nonzero()[:, 0]
        right, wrong = items.index[asked + 1], items.index[tokens:].view(tokens, self._task.negatives)[asked]
        temperature = self._task.temperature
        return sampled_softmax(output[asked], items.values, right=right, wrong=wrong, temperature=temperature)

    def query(self, inputs: RetrievalInputs, rows: Mapping[str, Rows]) -> Tensor:
        """What stands behind the last event of each sample, to be compared with `as_items`; 0 without events."""
        output = self.encoder(rows["item"].each(), inputs.layout, None)
        last = inputs.layout.offsets[1:] - 1
        found = inputs.layout.lengths > 0
        vectors = output.new_zeros(len(last), output.shape[1])
        vectors[found] = F.normalize(output[last[found]], dim=-1)
        return vectors

    def as_items(self, rows: Tensor) -> Tensor:
        """Rows of the table, as queries are compared with them."""
        return F.normalize(rows, dim=-1)


def _asked(batch: Batch) -> Tensor:
    """Each event is asked for the next one when that happens; the last one when its target does, if that is known."""
    event, end, found = batch.history["timestamp"], batch.history.offsets[1:], batch.history.lengths > 0
    asked = torch.cat([event[1:], event[-1:]])
    last = end[found] - 1
    asked[last] = event[last]
    if batch.targets is not None:
        known = found & (batch.targets.lengths > 0)
        asked[end[known] - 1] = batch.targets["timestamp"][batch.targets.offsets[:-1][known]]
    return asked
