"""The ranking task: predict binary labels of the candidates that follow a history."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.models.encoders import build_encoder
from freescale.models.jagged import EventTimes, JaggedLayout
from freescale.models.keyed import Keys
from freescale.models.protocol import Rows


@dataclass(frozen=True)
class RankingInputs:
    """Histories, each followed by its candidates."""

    ids: dict[str, Tensor]
    layout: JaggedLayout
    keys: Keys
    candidates: Tensor
    """Indices of the candidate tokens."""
    labels: Tensor
    """[candidates, tasks]"""

    @property
    def count(self) -> int:
        """Number of labels."""
        return self.labels.numel()


class Ranking(nn.Module):
    """An encoder with one head per label on its candidates."""

    def __init__(self, config: RunConfig, *, items: int) -> None:
        super().__init__()
        self.tables = {"item": (items, config.model.dim)}
        self._seed, self.labels = config.seed, config.task.labels
        self.encoder = build_encoder(config.model, max_seq_len=config.data.max_history + 1)
        self.is_candidate = nn.Parameter(torch.empty(config.model.dim).normal_(std=config.model.dim**-0.5))
        self.head = nn.Linear(config.model.dim, len(self.labels))

    def prepare(self, batch: Batch) -> RankingInputs:
        """Append the candidates of each sample to its history."""
        assert batch.candidates is not None  # `build` refuses data without candidates
        lengths, candidate_counts = batch.history.lengths, batch.candidates.lengths
        offsets = torch.cat([candidate_counts.new_zeros(1), (lengths + candidate_counts).cumsum(0)])
        layout = JaggedLayout(offsets, candidate_counts)
        is_candidate = layout.position >= lengths.repeat_interleave(layout.lengths)
        ids = batch.history["item_id"].new_empty(layout.tokens)
        ids[is_candidate], ids[~is_candidate] = batch.candidates["candidate_id"], batch.history["item_id"]
        event = batch.history["timestamp"].new_empty(layout.tokens)
        event[is_candidate] = _last_event_time(batch).repeat_interleave(candidate_counts)
        event[~is_candidate] = batch.history["timestamp"]
        return RankingInputs(
            ids={"item": ids},
            layout=replace(layout, times=EventTimes(event, event)),
            keys=Keys.from_layout(layout, batch.sample_id, seed=self._seed, step=batch.step_key),
            candidates=is_candidate.nonzero()[:, 0],
            labels=torch.stack([batch.candidates[name] for name in self.labels], dim=1),
        )

    def forward(self, inputs: RankingInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Return the sum of the binary cross entropies of all labels."""
        logits = self._logits(inputs, rows, inputs.keys)
        return binary_cross_entropy_sum(logits, inputs.labels.to(logits.dtype))

    def logits(self, inputs: RankingInputs, rows: Mapping[str, Rows]) -> Tensor:
        """Return the logits of every candidate [candidates, tasks], without dropout."""
        return self._logits(inputs, rows, None)

    def _logits(self, inputs: RankingInputs, rows: Mapping[str, Rows], keys: Keys | None) -> Tensor:
        x = rows["item"].lookup()
        x = x.index_add(0, inputs.candidates, self.is_candidate.expand(len(inputs.candidates), -1).to(x.dtype))
        output = self.encoder(x, inputs.layout, keys)
        return self.head(output[inputs.candidates])


def binary_cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the binary cross entropies of several tasks [candidates, tasks]."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def _last_event_time(batch: Batch) -> Tensor:
    """Return the time of each sample's last event, 0 without events."""
    time = batch.history["timestamp"]
    nonempty = batch.history.lengths > 0
    last = time.new_zeros(len(batch))
    last[nonempty] = time[batch.history.offsets[1:][nonempty] - 1]
    return last
