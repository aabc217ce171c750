"""The jagged layout of a batch.

Tokens of all samples are packed end to end, in each sample the history first and the candidates after it. Each token
has a limit: it attends to the tokens of its sample before the limit, and to itself. A rule of visibility narrows this
to the near keys, from the token's `begin` on, and the far keys, which all later tokens see.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from freescale.visibility import FarKeys, Visibility

T = TypeVar("T")

TIME_BUCKETS = 129
_LOG_STEP = 0.301  # time buckets grow by a factor of about 1.35
CELL_SHIFT = 17  # keeps the exponent of a float and six bits of its mantissa
_CELL_OF_ONE = 127 << 6


@dataclass(frozen=True)
class EventTimes:
    """The time of each event, and the time at which its position predicts the next event."""

    event: Tensor
    query: Tensor


@dataclass(frozen=True)
class BiasTables:
    """Learned biases that attention adds to the score of two events."""

    position: Tensor
    """By distance in positions: [max_seq_len]."""
    time: Tensor
    """By bucket of the logarithm of seconds: [TIME_BUCKETS]."""


def is_visible(
    query: Tensor, key: Tensor, limit: Tensor, begin: Tensor | None = None, far: FarKeys | None = None
) -> Tensor:
    """Return whether a query position attends to a key position of its sample; `limit`: that of the query.

    With a rule of visibility: `begin`, the first near key of the query, and the far keys.
    """
    before = key < limit
    if begin is not None and far is not None:
        before = before & ((key >= begin) | far.contains(key))
    return before | (key == query)


@lru_cache
def time_bucket_table(device: torch.device) -> Tensor:
    """Return the time bucket, log(seconds) / 0.301, for the leading bits of a float of seconds.

    A table gives the same bucket on every device, without a logarithm for every pair of events.
    """
    leading = [(1 + cell % 64 / 64) * 2.0 ** (cell // 64) for cell in range(64 * 64)]
    buckets = [min(TIME_BUCKETS - 1, int(math.log(seconds) / _LOG_STEP)) for seconds in leading]
    return torch.tensor([0] * _CELL_OF_ONE + buckets, dtype=torch.int32, device=device)


def time_bucket(query_time: Tensor, event_time: Tensor) -> Tensor:
    """Return the time bucket of the interval between an event and a query."""
    cell = (query_time - event_time).abs().float().view(torch.int32) >> CELL_SHIFT
    return time_bucket_table(query_time.device)[cell]


@dataclass(frozen=True)
class JaggedLayout:
    """Offsets of the samples of a batch, their numbers of candidates, and the times of their tokens."""

    offsets: Tensor
    candidates: Tensor | None = None
    times: EventTimes | None = None
    anchors: Tensor | None = None
    """The limit of each candidate: [candidates of the batch], from 0 to the history length, ascending in each sample.
    None: every candidate sees the whole history."""
    visibility: Visibility | None = None
    """Which tokens before its limit a token sees. None: all."""

    def computed(self) -> "JaggedLayout":
        """Compute all that follows from the offsets now: on the host nothing waits for it, and a copy contains it."""
        _ = self.tokens, self.spans, self.limits, self.key_position, self.begins, self.summaries
        return self

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of the batch."""
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
        """First token, length and history length of each sample: the layout as attention reads it."""
        return torch.stack([self.offsets[:-1], self.lengths, self.history], dim=1)

    @cached_property
    def position(self) -> Tensor:
        """Position of each token in its sample."""
        first = self.offsets[:-1].repeat_interleave(self.lengths, output_size=self.tokens)
        return torch.arange(self.tokens, device=self.offsets.device) - first

    @cached_property
    def limits(self) -> Tensor:
        """Number of tokens of its sample that each token sees besides itself: [tokens].

        It is also the position of a token in biases and embeddings: that of a candidate is its anchor.
        """
        history = self.history.repeat_interleave(self.lengths, output_size=self.tokens)
        if self.anchors is None:
            return torch.minimum(self.position, history)
        assert self.candidates is not None
        return self.position.masked_scatter(self.position >= history, self.anchors)

    @cached_property
    def begins(self) -> Tensor | None:
        """The first near key of each token: [tokens]. None without a rule of visibility."""
        if self.visibility is None:
            return None
        return self.visibility.begins(torch.where(self._is_history, self.position, self.limits - 1), self.limits)

    @property
    def far(self) -> FarKeys | None:
        """The keys that all later tokens see. None without a rule of visibility."""
        return None if self.visibility is None else self.visibility.far

    @property
    def pairs(self) -> int:
        """Pairs of tokens that see each other, each token with itself included."""
        if self.begins is None or self.far is None:
            return int((self.limits + 1).sum())
        return int((self.limits - self.begins + self.far.count_before(self.begins) + 1).sum())

    @cached_property
    def summaries(self) -> tuple[Tensor, Tensor] | None:
        """The summary tokens, and the place of each among those of its segment. None without segments."""
        if self.visibility is None or not self.visibility.summaries:
            return None
        tokens = (self._is_history & self.visibility.is_summary(self.position)).nonzero()[:, 0]
        far = self.visibility.far
        return tokens, (self.position[tokens] - far.head) % far.period - far.segment

    @property
    def _is_history(self) -> Tensor:
        return self.position < self.history.repeat_interleave(self.lengths, output_size=self.tokens)

    @cached_property
    def key_position(self) -> Tensor:
        """Position of each token for keyed randomness.

        A candidate has the position that it would have in a sample whose history ends at its anchor.
        """
        if self.anchors is None:
            return self.position
        token = torch.arange(self.tokens, device=self.offsets.device)
        history = self.history.repeat_interleave(self.lengths, output_size=self.tokens)
        is_first = (self.position == 0) | (self.position == history)
        is_first |= self.limits != self.limits.roll(1)
        return self.limits + token - torch.where(is_first, token, 0).cummax(0).values


class PerBatchCache(Generic[T]):
    """Caches a function of the spans of a batch: computed once for all layers, freed with the batch."""

    def __init__(self, compute: Callable[..., T]) -> None:
        self._compute = compute
        self._cache = WeakTensorKeyDictionary()

    def __call__(self, spans: Tensor, *args: Any) -> T:
        """Return the result for these spans and arguments, which may be tensors, too."""
        results, key = self._cache.setdefault(spans, {}), tuple(map(_identity, (spans, *args)))
        if key not in results:
            results[key] = self._compute(spans, *args), args  # keeps the tensors, so that none takes over an id
        return results[key][0]


def _identity(arg: Any) -> Any:
    """Return what identifies an argument: a tensor by object and version, because comparing values would wait."""
    return (id(arg), 0 if arg.is_inference() else arg._version) if isinstance(arg, Tensor) else arg
