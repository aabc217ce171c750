"""Jagged batches: what a step of one rank holds, without padding.

This is the door from numpy to torch; everything under it in this room works without torch.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.data.window import Packed, Window


@dataclass(frozen=True)
class Events:
    """Features of events, packed: sample i owns values offsets[i] to offsets[i + 1] of each."""

    offsets: torch.Tensor
    features: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.features[name]

    @property
    def lengths(self) -> torch.Tensor:
        """Events of each sample."""
        return self.offsets.diff()

    def to(self, device: torch.device) -> "Events":
        """The same on another device."""
        features = {name: values.to(device, non_blocking=True) for name, values in self.features.items()}
        return Events(self.offsets.to(device, non_blocking=True), features)

    def rows_of(self, samples: torch.Tensor) -> torch.Tensor:
        """Where the values of some samples stand."""
        lengths = self.lengths[samples]
        before = lengths.cumsum(0) - lengths
        return (self.offsets[samples] - before).repeat_interleave(lengths) + torch.arange(int(lengths.sum()))

    def only(self, samples: torch.Tensor) -> "Events":
        """Those of some samples."""
        rows, lengths = self.rows_of(samples), self.lengths[samples]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return Events(offsets, {name: values[rows] for name, values in self.features.items()})

    def between(self, begin: int, end: int) -> "Events":
        """Those of samples [begin, end), without a copy of their values."""
        low, high = int(self.offsets[begin]), int(self.offsets[end])
        return Events(self.offsets[begin : end + 1] - low, {n: v[low:high] for n, v in self.features.items()})


@dataclass(frozen=True)
class Batch:
    """What one rank holds of one step's global batch. It may be empty."""

    epoch: int
    step: int
    sample_id: torch.Tensor
    """Stable 64-bit number of each sample: its row in the log."""
    scalars: dict[str, torch.Tensor]
    """user_id and further features per sample."""
    history: Events
    """item_id, timestamp and further features per event, oldest first."""
    candidates: Events | None
    """candidate_id and its labels, for ranking."""
    targets: Events | None
    """The held-out events, when the batch is for evaluation."""

    def __len__(self) -> int:
        return len(self.sample_id)

    @property
    def number(self) -> int:
        """One number for (epoch, step), the same on all ranks."""
        return self.epoch << 32 | self.step

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        if self.sample_id.device == device:
            return self
        return self.with_groups({name: events.to(device) for name, events in self.groups().items()})

    def parts(self, count: int) -> list["Batch"]:
        """Cut into so many batches of about equally many samples, some of them maybe empty."""
        if count == 1:
            return [self]
        groups, cuts = self.groups(), [len(self) * i // count for i in range(count + 1)]
        parts = [{name: e.between(*ends) for name, e in groups.items()} for ends in itertools.pairwise(cuts)]
        return [self.with_groups(part) for part in parts]

    def without(self, left_out: Collection[int]) -> "Batch":
        """All samples but some, wherever they are."""
        if not left_out:
            return self
        kept = ~torch.isin(self.sample_id, torch.tensor(sorted(left_out), dtype=torch.int64))
        samples = kept.nonzero()[:, 0]
        return self if kept.all() else self.with_groups({n: e.only(samples) for n, e in self.groups().items()})

    def groups(self) -> dict[str, Events]:
        """Its features, as groups that share their lengths: one value per sample, per event, and so on."""
        alone = Events(torch.arange(len(self) + 1), {"": self.sample_id, **self.scalars})
        several = {"history": self.history, "candidates": self.candidates, "targets": self.targets}
        return {"sample": alone} | {name: events for name, events in several.items() if events is not None}

    def with_groups(self, groups: Mapping[str, Events]) -> "Batch":
        """A batch of the same step with other samples."""
        return Batch.of(self.epoch, self.step, groups)

    @staticmethod
    def of(epoch: int, step: int, groups: Mapping[str, Events]) -> "Batch":
        """A batch with these samples, given as `groups` gives them."""
        scalars, others = dict(groups["sample"].features), (groups.get("candidates"), groups.get("targets"))
        return Batch(epoch, step, scalars.pop(""), scalars, groups["history"], *others)


def assemble(pieces: Sequence[Window], *, epoch: int, step: int) -> Batch:
    """Join what a step takes from one window or, where windows meet, from several. One piece is not copied."""
    groups = {name: _events([piece.groups[name] for piece in pieces]) for name in pieces[0].groups}
    return Batch.of(epoch, step, groups)


def _events(pieces: Sequence[Packed]) -> Events:
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), *(np.diff(p.offsets) for p in pieces)])
    names = pieces[0].features
    return Events(torch.from_numpy(np.cumsum(lengths)), {n: _tensor([p.features[n] for p in pieces]) for n in names})


def _tensor(pieces: Sequence[NDArray[Any]]) -> torch.Tensor:
    return torch.from_dlpack(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
