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
_BLOCK = 256  # queries that attend at a time
TIME_BUCKETS = 129
_LOG_STEP = 0.301  # time buckets grow by a factor of about 1.35
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
        return x.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)


@dataclass(frozen=True)
class Times:
    """When each event happened, and when its position is asked what comes next."""

    event: Tensor
    asked: Tensor


def visible(query: Tensor, key: Tensor, history: Tensor) -> Tensor:
    """Whether the query at one position sees the key at another, in a sample with so much history."""
    return (key <= query) & ((key < history) | (key == query))


def time_bucket(asked: Tensor, event: Tensor) -> Tensor:
    """Which of the time buckets the span between an event and a question falls into."""
    apart = (asked - event).abs_().clamp_(min=1).float()  # in place: there is one for every pair of events
    return apart.log_().div_(_LOG_STEP).clamp_(max=TIME_BUCKETS - 1).int()


@dataclass(frozen=True)
class Block:
    """Queries [begin, end) of a bucket against the keys that any of them may see; the same for all layers."""

    bucket: Bucket
    begin: int
    end: int
    times: Times | None

    @cached_property
    def seen(self) -> Tensor:
        """Which pairs count: [samples, queries, keys]."""
        query, key = self._places
        return visible(query, key, self.bucket.history[:, None, None])

    @cached_property
    def distance(self) -> Tensor:
        """In positions. Candidates stand side by side."""
        query, key = self._places
        return (torch.minimum(query, self.bucket.history[:, None, None].int()) - key).clamp_(min=0)

    @cached_property
    def apart(self) -> Tensor:
        """In time buckets."""
        assert self.times is not None
        event, asked = self.bucket.gather(self.times.event), self.bucket.gather(self.times.asked)
        return time_bucket(asked[:, self.begin : self.end, None], event[:, None, : self.end])

    @property
    def _places(self) -> tuple[Tensor, Tensor]:
        device = self.bucket.index.device
        query = torch.arange(self.begin, self.end, device=device, dtype=torch.int32)[None, :, None]
        return query, torch.arange(self.end, device=device, dtype=torch.int32)[None, None, :]


@dataclass(frozen=True)
class Layout:
    """Offsets of the samples of a batch, how many of their tokens are candidates, and when each token happened."""

    offsets: Tensor
    candidates: Tensor | None = None
    times: Times | None = None

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
    def place(self) -> Tensor:
        """Place of each token as a model sees it: candidates stand side by side, behind the history."""
        return torch.minimum(self.position, self.history.repeat_interleave(self.lengths))

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
    def blocks(self) -> list[list[Block]]:
        """The pieces of work of attention, by bucket."""
        return [
            [Block(bucket, begin, min(begin + _BLOCK, longest), self.times) for begin in range(0, longest, _BLOCK)]
            for bucket in self.buckets
            for longest in [bucket.index.shape[1]]
        ]

    @cached_property
    def out_of_buckets(self) -> Tensor:
        """Where each token is found when the tokens of all buckets are laid end to end; the same for every layer."""
        return torch.cat([bucket.index[bucket.valid] for bucket in self.buckets]).argsort()

    def _bucket(self, samples: Tensor, longest: int) -> Bucket:
        place = torch.arange(longest, device=self.offsets.device)
        valid = place < self.lengths[samples, None]
        index = torch.where(valid, self.offsets[samples, None] + place, 0)
        return Bucket(index, valid, self.history[samples])
