"""How the tokens of a batch are laid out, and how samples of like length are brought together.

Tokens of all samples are packed end to end, history first and candidates after it. Attention needs them as matrices:
samples are sorted by length and cut into buckets, each padded to its own longest only, so that the work follows the sum
of squared lengths of the batch and not the longest of it.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_WASTE = 1.25  # a bucket ends where padding would cost more than this over its shortest member
_SMALL = 8  # lengths below this share a bucket: the launch costs more than the padding


@dataclass(frozen=True)
class Bucket:
    """Samples of like length as a padded matrix [samples, longest]."""

    index: Tensor
    """Which token stands where; padding points at token 0."""
    valid: Tensor
    """Where a token stands at all."""
    history: Tensor
    """Events of each sample before its candidates."""

    def gather(self, x: Tensor) -> Tensor:
        """Bring packed tokens [tokens, ...] into the matrix."""
        return x[self.index]


@dataclass(frozen=True)
class Layout:
    """Offsets of the samples of a batch, and how many of their tokens are candidates."""

    offsets: Tensor
    candidates: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each sample."""
        return self.offsets.diff()

    @cached_property
    def history(self) -> Tensor:
        """Tokens of each sample that are not candidates."""
        return self.lengths if self.candidates is None else self.lengths - self.candidates

    @cached_property
    def position(self) -> Tensor:
        """Place of each token in its sample."""
        first = self.offsets[:-1].repeat_interleave(self.lengths)
        return torch.arange(self.tokens, device=self.offsets.device) - first

    @cached_property
    def buckets(self) -> list[Bucket]:
        """All samples that have tokens, shortest first."""
        lengths, order = self.lengths.sort(stable=True)
        sizes = lengths.tolist()
        begin = sizes.count(0)
        found = []
        while begin < len(sizes):
            limit = max(_SMALL, sizes[begin] * _WASTE)
            end = begin + 1
            while end < len(sizes) and sizes[end] <= limit:
                end += 1
            found.append(self._bucket(order[begin:end], sizes[end - 1]))
            begin = end
        return found

    @cached_property
    def out_of_buckets(self) -> Tensor:
        """Where each token is found when the tokens of all buckets are laid end to end; the same for every layer."""
        return torch.cat([bucket.index[bucket.valid] for bucket in self.buckets]).argsort()

    def _bucket(self, samples: Tensor, longest: int) -> Bucket:
        place = torch.arange(longest, device=self.offsets.device)
        valid = place < self.lengths[samples, None]
        index = torch.where(valid, self.offsets[samples, None] + place, 0)
        return Bucket(index, valid, self.history[samples])
