"""The jagged layout of a batch, and padded batches of samples of similar length.

Tokens of all samples are packed end to end, in each sample the history first and the candidates after it. Each token
has a limit: it attends to the tokens of its sample before the limit, and to itself. Operators that cannot read this
layout work on padded batches: samples are sorted by length and cut into buckets, each padded to its own maximum, so
that the cost follows the sum of squared lengths and not the longest sample of the batch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

_MAX_PADDING = 1.25  # a bucket ends where a sample is this much longer than its shortest one
_BUCKET_TOKENS = 2048  # limit of a bucket of several samples, with padding: its matrices stay in the cache
_SHORT = 8  # lengths up to this share a bucket: a launch costs more than the padding
_QUERY_BLOCK = 192  # queries per block: their scores stay in the L2 cache of a core

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


def is_visible(query: Tensor, key: Tensor, limit: Tensor) -> Tensor:
    """Return whether a query position attends to a key position of its sample; `limit`: that of the query."""
    return (key < limit) | (key == query)


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
    """History tokens that each candidate sees: [candidates of the batch], from 0 to the history length, ascending in
    each sample. None: every candidate sees the whole history."""

    def computed(self) -> "JaggedLayout":
        """Compute all that follows from the offsets now: on the host nothing waits for it, and a copy contains it."""
        _ = self.tokens, self.spans, self.limits, self.key_position
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


@dataclass(frozen=True)
class LengthBucket:
    """Indices that pad samples of similar length to a matrix [samples, max_length]."""

    index: Tensor
    """The token at each place; padding points at the first token of its sample."""
    valid: Tensor
    """False at padding."""
    history: Tensor | None
    """History length of each sample; None if no sample has candidates."""
    single: slice | None
    """The tokens of the only sample, which need no copy."""

    @property
    def max_length(self) -> int:
        """Columns of the matrix."""
        return self.index.shape[1]

    def scatter(self, matrix: Tensor, x: Tensor) -> None:
        """Copy tokens from the padded matrix to packed tokens."""
        if self.single is not None:
            x[self.single] = matrix[0]
        else:
            x[self.index[self.valid]] = matrix[self.valid].to(x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        """Return packed tokens [tokens, ...] as a padded matrix."""
        if self.single is not None:
            return x[self.single][None]
        return x.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)

    def gather_limits(self, limits: Tensor) -> Tensor | None:
        """Return the limits of packed tokens as a padded matrix, or None if no sample has candidates."""
        if self.history is None:
            return None
        return torch.where(self.valid, self.gather(limits), self.history[:, None])  # padding is a last candidate


def _length_buckets(spans: Tensor) -> list[LengthBucket]:
    order = spans[:, 1].sort(stable=True).indices
    by_length = spans[order].cpu()
    lengths = by_length[:, 1].tolist()
    begin = lengths.count(0)
    buckets = []
    while begin < len(lengths):
        limit = max(_SHORT, lengths[begin] * _MAX_PADDING)
        end = begin + 1
        while end < len(lengths) and lengths[end] <= limit and (end + 1 - begin) * lengths[end] <= _BUCKET_TOKENS:
            end += 1
        buckets.append(_bucket(by_length[begin:end], spans.device))
        begin = end
    return buckets


def _bucket(spans: Tensor, device: torch.device) -> LengthBucket:
    first, length, history = spans.to(device).unbind(1)
    column = torch.arange(int(spans[-1, 1]), device=device)
    valid = column < length[:, None]
    index = first[:, None] + torch.where(valid, column, 0)
    has_candidates = bool((spans[:, 2] < spans[:, 1]).any())
    begin, size = spans[0, :2].tolist()
    single = slice(begin, begin + size) if len(spans) == 1 else None
    return LengthBucket(index, valid, history if has_candidates else None, single)


length_buckets = PerBatchCache(_length_buckets)
"""The buckets of all non-empty samples of a batch, shortest first."""


@dataclass(frozen=True)
class PaddedBatch:
    """The attention operands of a bucket: [samples * heads, max_length, width], in the dtype of the computation."""

    bucket: LengthBucket
    heads: int
    q: Tensor
    k: Tensor
    v: Tensor
    limits: Tensor | None
    """The limit of each token: [samples, max_length]. None if no sample has candidates: limits are positions."""
    times: EventTimes | None
    """[samples, max_length] as fp64: exact to 2^53, and faster to subtract and convert than integers."""

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.bucket.index)

    def pad(self, packed: Tensor) -> Tensor:
        """Return packed tokens [tokens, heads, width] in the layout of this batch, 0 at padding."""
        padded = self.bucket.gather(packed)
        masked = padded if self.bucket.single else padded.masked_fill(~self.bucket.valid[:, :, None, None], 0)
        return _fold_heads(masked).to(self.q.dtype)

    def unpad(self, padded: Tensor, packed: Tensor) -> None:
        """Write a padded result to packed tokens."""
        self.bucket.scatter(padded.unflatten(0, (-1, self.heads)).transpose(1, 2), packed)

    def positions(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the query positions of a block [queries, 1], and the key positions up to its end."""
        position = torch.arange(rows.stop, device=self.q.device)
        return position[rows, None], position

    def query_blocks(self) -> Iterator[slice]:
        """Yield blocks of queries. All keys that a block sees lie before its end."""
        for begin in range(0, self.bucket.max_length, _QUERY_BLOCK):
            yield slice(begin, min(begin + _QUERY_BLOCK, self.bucket.max_length))


def padded_batches(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, limits: Tensor, times: EventTimes | None = None
) -> Iterator[PaddedBatch]:
    """Yield all samples of a batch, from packed tokens [tokens, heads, width]."""
    dtype = compute_dtype(q)
    for bucket in length_buckets(spans):
        padded_times = times and EventTimes(bucket.gather(times.event).double(), bucket.gather(times.query).double())
        padded_q, padded_k, padded_v = (_fold_heads(bucket.gather(x)).to(dtype) for x in (q, k, v))
        yield PaddedBatch(bucket, q.shape[1], padded_q, padded_k, padded_v, bucket.gather_limits(limits), padded_times)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fold_heads(padded: Tensor) -> Tensor:
    """Return [samples, places, heads, width] as [samples * heads, places, width]."""
    return padded.transpose(1, 2).flatten(0, 1)
