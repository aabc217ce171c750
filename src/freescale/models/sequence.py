"""How the tokens of a batch are laid out, and how samples of like length are brought together.

Tokens of all samples are packed end to end, history first and candidates after it. Without a kernel that reads them so,
attention needs matrices: samples are sorted by length and cut into buckets, each padded to its own longest only, so
that the work follows the sum of squared lengths of the batch and not the longest of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

_WASTE = 1.25  # a bucket ends where padding would cost more than this over its shortest member
_TOKENS = 2048  # of a bucket of several samples, padding counted: their matrices stay in the cache
_SMALL = 8  # lengths below this share a bucket: the launch costs more than the padding

TIME_BUCKETS = 129
_LOG_STEP = 0.301  # time buckets grow by a factor of about 1.35
CELL_SHIFT = 17  # leaves the exponent of a float and six bits of its mantissa
_ONE = 127 << 6  # the cell of 1.0


@dataclass(frozen=True)
class Times:
    """When each event happened, and when its position is asked what comes next."""

    event: Tensor
    asked: Tensor


@dataclass(frozen=True)
class Bias:
    """Learned amounts that are added to a score for how far two events are apart."""

    position: Tensor
    """By distance in positions, up to the longest."""
    time: Tensor
    """By bucket of the logarithm of seconds: [TIME_BUCKETS]."""


def visible(query: Tensor, key: Tensor, history: Tensor) -> Tensor:
    """Whether the query at one position sees the key at another, in a sample with so much history."""
    return (key <= query) & ((key < history) | (key == query))


@lru_cache
def bucket_of_cell(device: torch.device) -> Tensor:
    """Which time bucket a time falls into whose float has these leading bits: log(seconds) / 0.301.

    By a table, so that every device finds the same bucket, and none computes a logarithm for every pair of events.
    """
    leading = [(1 + cell % 64 / 64) * 2.0 ** (cell // 64) for cell in range(64 * 64)]
    buckets = [min(TIME_BUCKETS - 1, int(math.log(seconds) / _LOG_STEP)) for seconds in leading]
    return torch.tensor([0] * _ONE + buckets, dtype=torch.int32, device=device)


def time_bucket(asked: Tensor, event: Tensor) -> Tensor:
    """Which of the time buckets the span between an event and a question falls into."""
    cell = (asked - event).abs().float().view(torch.int32) >> CELL_SHIFT
    return bucket_of_cell(asked.device)[cell]


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
    def spans(self) -> Tensor:
        """First token, length and history of each sample: all that attention has to know of the layout."""
        return torch.stack([self.offsets[:-1], self.lengths, self.history], dim=1)

    @cached_property
    def position(self) -> Tensor:
        """Place of each token in its sample."""
        first = self.offsets[:-1].repeat_interleave(self.lengths)
        return torch.arange(self.tokens, device=self.offsets.device) - first

    @cached_property
    def place(self) -> Tensor:
        """Place of each token as a model sees it: candidates stand side by side, behind the history."""
        return torch.minimum(self.position, self.history.repeat_interleave(self.lengths))


class Remembered(Generic[T]):
    """What follows from the spans of a batch: worked out once for all layers, and forgotten with the batch."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._known = WeakTensorKeyDictionary()

    def __call__(self, spans: Tensor, *args: Any) -> T:
        """Of these spans."""
        version = 0 if spans.is_inference() else spans._version
        known, of = self._known.setdefault(spans, {}), (version, *args)
        if of not in known:
            known[of] = self._make(spans, *args)
        return known[of]


@dataclass(frozen=True)
class Bucket:
    """Samples of like length as a padded matrix [samples, longest]."""

    index: Tensor
    """Which token stands where; padding points at the first one of its sample."""
    valid: Tensor
    """Where a token stands at all."""
    history: Tensor | None
    """Events of each sample before its candidates; none if no sample has candidates."""
    only: slice | None
    """The tokens of its only sample, which need no copying."""

    @property
    def longest(self) -> int:
        """Places of the matrix."""
        return self.index.shape[1]

    def scatter(self, matrix: Tensor, x: Tensor) -> None:
        """Bring tokens back from the matrix to where they are packed."""
        if self.only is not None:
            x[self.only] = matrix[0]
        else:
            x[self.index[self.valid]] = matrix[self.valid].to(x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        """Bring packed tokens [tokens, ...] into the matrix."""
        if self.only is not None:
            return x[self.only][None]
        return x.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)


def _buckets(spans: Tensor) -> list[Bucket]:
    order = spans[:, 1].sort(stable=True).indices
    by_length = spans[order].cpu()
    sizes = by_length[:, 1].tolist()
    begin = sizes.count(0)
    found = []
    while begin < len(sizes):
        limit = max(_SMALL, sizes[begin] * _WASTE)
        end = begin + 1
        while end < len(sizes) and sizes[end] <= limit and (end + 1 - begin) * sizes[end] <= _TOKENS:
            end += 1
        found.append(_bucket(by_length[begin:end], spans.device))
        begin = end
    return found


def _bucket(spans: Tensor, device: torch.device) -> Bucket:
    first, length, history = spans.to(device).unbind(1)
    place = torch.arange(int(spans[-1, 1]), device=device)
    valid = place < length[:, None]
    index = first[:, None] + torch.where(valid, place, 0)
    has_candidates = bool((spans[:, 2] < spans[:, 1]).any())
    begin, size = spans[0, :2].tolist()
    only = slice(begin, begin + size) if len(spans) == 1 else None
    return Bucket(index, valid, history if has_candidates else None, only)


buckets = Remembered(_buckets)
"""All samples of a batch that have tokens, shortest first."""
