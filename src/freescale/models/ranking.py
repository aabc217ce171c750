"""Labels of candidates that follow a history: one binary task each."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.models.encoders import encoder
from freescale.models.keyed import Keys
from freescale.models.losses import binary_tasks
from freescale.models.protocol import Rows
from freescale.models.sequence import Layout, Times


@dataclass(frozen=True)
class RankingInputs:
    """Histories with their candidates behind them."""

    ids: dict[str, Tensor]
    layout: Layout
    keys: Keys
    candidates: Tensor
    """Which tokens are candidates."""
    labels: Tensor
    """[candidates, tasks]"""

    @property
    def count(self) -> int:
        """Labels to be learnt."""
        return self.labels.numel()


class Ranking(nn.Module):
    """An encoder and a head per task on its candidates."""

    def __init__(self, config: RunConfig, *, items: int) -> None:
        super().__init__()
        self.tables = {"item": (items, config.model.dim)}
        self._seed, self.labels = config.seed, config.task.labels
        self.encoder = encoder(config.model, longest=config.data.max_history + 1)
        self.is_candidate = nn.Parameter(torch.empty(config.model.dim).normal_(std=config.model.dim**-0.5))
        self.head = nn.Linear(config.model.dim, len(self.labels))

    def prepare(self, batch: Batch) -> RankingInputs:
        """Put the candidates of each sample behind its history."""
        assert batch.candidates is not None  # `build` refuses data without candidates
        lengths, offered = batch.history.lengths, batch.candidates.lengths
        offsets = torch.cat([offered.new_zeros(1), (lengths + offered).cumsum(0)])
        layout = Layout(offsets, offered)
        is_candidate = layout.position >= lengths.repeat_interleave(layout.lengths)
        ids = batch.history["item_id"].new_empty(layout.tokens)
        ids[is_candidate], ids[~is_candidate] = batch.candidates["candidate_id"], batch.history["item_id"]
        event = batch.history["timestamp"].new_empty(layout.tokens)
        event[is_candidate] = _last_time(batch).repeat_interleave(offered)
        event[~is_candidate] = batch.history["timestamp"]
        return RankingInputs(
            ids={"item": ids},
            layout=replace(layout, times=Times(event, event)),
            keys=Keys.of(layout, batch.sample_id, seed=self._seed, step=batch.step_key),
            candidates=is_candidate.nonzero()[:, 0],
            labels=torch.stack([batch.candidates[name] for name in self.labels], dim=1),
        )

    def forward(self, inputs: RankingInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Sum of the losses of all labels."""
        logits = self._logits(inputs, rows, inputs.keys)
        return binary_tasks(logits, inputs.labels.to(logits.dtype))

    def logits(self, inputs: RankingInputs, rows: Mapping[str, Rows]) -> Tensor:
        """What is predicted for every candidate [candidates, tasks], without dropout."""
        return self._logits(inputs, rows, None)

    def _logits(self, inputs: RankingInputs, rows: Mapping[str, Rows], keys: Keys | None) -> Tensor:
        x = rows["item"].each()
        x = x.index_add(0, inputs.candidates, self.is_candidate.expand(len(inputs.candidates), -1).to(x.dtype))
        output = self.encoder(x, inputs.layout, keys)
        return self.head(output[inputs.candidates])


def _last_time(batch: Batch) -> Tensor:
    """When each sample's last event happened; 0 without events."""
    time = batch.history["timestamp"]
    found = batch.history.lengths > 0
    last = time.new_zeros(len(batch))
    last[found] = time[batch.history.offsets[1:][found] - 1]
    return last
