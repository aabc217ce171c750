"""Padded batches of samples of similar length, for operators that cannot read the jagged layout.

Samples are sorted by length and cut into buckets, each padded to its own maximum, so that the cost follows the sum of
squared lengths and not the longest sample of the batch. Attention computes a padded batch by blocks of queries. A block
holds keys that none of its queries sees only where its queries see different ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.models.jagged import EventTimes, PerBatchCache, is_visible
from freescale.visibility import FarKeys

_MAX_PADDING = 1.25  # a bucket ends where a sample is this much longer than its shortest one
_BUCKET_TOKENS = 2048  # limit of a bucket of several samples, with padding: its matrices stay in the cache
_SHORT = 8  # lengths up to this share a bucket: a launch costs more than the padding
_QUERY_BLOCK = 192  # queries per block: their scores stay in the L2 cache of a core


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

    def gather_begins(self, begins: Tensor) -> Tensor:
        """Return the first near keys of packed tokens as a padded matrix. Padding has no near keys but itself."""
        return torch.where(self.valid, self.gather(begins), self.max_length)


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
class QueryBlock:
    """A block of queries and the keys it is multiplied with: far ones, near ones, and its own behind a gap."""

    rows: slice
    far: int
    """The first far keys, which all its queries see."""
    near: slice
    """The positions of near keys, which mostly end with those of its queries."""
    own: slice
    """The positions of its queries, if near keys end before them: candidates that see a part of the history."""

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.far + (self.near.stop - self.near.start) + (self.own.stop - self.own.start)

    @property
    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yield the columns of near keys and of own ones, and their positions."""
        begin = self.far
        for places in (self.near, self.own):
            count = places.stop - places.start
            if count:
                yield slice(begin, begin + count), places
            begin += count


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of a bucket, and the positions of all far keys of its samples."""

    blocks: list[QueryBlock]
    far: Tensor

    def split(self, x: Tensor) -> "SplitKeys":
        """Return keys or values [n, places, width] with a copy of the far ones, which follow each other there."""
        return SplitKeys(x, x[:, self.far])

    def positions(self, block: QueryBlock) -> Tensor:
        """Return the positions of the keys of a block."""
        parts = [torch.arange(part.start, part.stop, device=self.far.device) for part in (block.near, block.own)]
        return torch.cat([self.far[: block.far], *parts])


class SplitKeys(NamedTuple):
    """The keys of a bucket, their values, or the gradients of either."""

    all: Tensor
    """[n, places, width]"""
    far: Tensor
    """Those of far keys: [n, far keys, width]."""

    def parts(self, block: QueryBlock) -> Iterator[tuple[slice, Tensor]]:
        """Yield columns of a block, and what belongs to their keys: without a copy."""
        if block.far:
            yield slice(0, block.far), self.far[:, : block.far]
        for columns, places in block.parts:
            yield columns, self.all[:, places]

    def select(self, block: QueryBlock) -> Tensor:
        """Return what belongs to the keys of a block."""
        parts = [part for _, part in self.parts(block)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def multiply(self, rows: Tensor, block: QueryBlock, *, out: Tensor) -> Tensor:
        """Compute rows @ keys.mT."""
        for columns, keys in self.parts(block):
            torch.bmm(rows, keys.mT, out=out[:, :, columns])
        return out

    def mix(self, weights: Tensor, block: QueryBlock, *, out: Tensor) -> None:
        """Compute weights @ values."""
        (columns, values), *others = self.parts(block)
        torch.bmm(weights[:, :, columns], values, out=out)
        for columns, values in others:
            out.baddbmm_(weights[:, :, columns], values)

    def add_products_(self, weights: Tensor, rows: Tensor, block: QueryBlock) -> None:
        """Add weights.mT @ rows to the gradients of the keys of a block."""
        for columns, total in self.parts(block):
            total.baddbmm_(weights[:, :, columns].mT, rows)

    def join_(self, plan: BlockPlan) -> Tensor:
        """Add the gradients of far keys to those of all keys, and return these."""
        return self.all.index_add_(1, plan.far, self.far) if len(plan.far) else self.all


def _plan_blocks(spans: Tensor, limits: Tensor, begins: Tensor | None, far: FarKeys | None) -> list[BlockPlan]:
    plans = []
    for bucket in length_buckets(spans):
        if begins is None or far is None:
            ends = ((i, min(i + _QUERY_BLOCK, bucket.max_length)) for i in range(0, bucket.max_length, _QUERY_BLOCK))
            blocks = [QueryBlock(slice(i, j), 0, slice(0, j), slice(j, j)) for i, j in ends]
            plans.append(BlockPlan(blocks, bucket.index.new_empty(0)))
        else:
            plans.append(_plan_bucket(bucket, limits, begins, far))
    return plans


def _plan_bucket(bucket: LengthBucket, limits: Tensor, begins: Tensor, far: FarKeys) -> BlockPlan:
    """Cut the queries where their near keys begin anew, and find the keys that each block sees."""
    length, device = bucket.max_length, bucket.index.device
    history = length if bucket.history is None else int(bucket.history.min())
    last = torch.where(bucket.valid, bucket.gather(limits), 0).amax(0).tolist()
    first = bucket.gather_begins(begins).amin(0).tolist()
    blocks = []
    for begin, end in _cuts(history, length, far):
        earliest, latest = min(first[begin:end]), max(last[begin:end])
        near = slice(earliest, end) if latest >= begin else slice(earliest, max(earliest, latest))
        own = slice(end, end) if latest >= begin else slice(begin, end)
        skipped = int(far.count_before(earliest))
        if skipped == earliest:  # nothing is skipped: all keys follow each other
            skipped, near = 0, slice(0, near.stop)
        blocks.append(QueryBlock(slice(begin, end), skipped, near, own))
    places = torch.arange(length, device=device)
    needed = max(block.far for block in blocks)
    return BlockPlan(blocks, places[far.contains(places)][:needed])


def _cuts(history: int, length: int, far: FarKeys) -> Iterator[tuple[int, int]]:
    """Yield the queries of each block: several periods, or parts of one; candidates apart from histories."""
    stride = far.period * max(1, _QUERY_BLOCK // far.period) if far.period > 1 else _QUERY_BLOCK
    edges = [0, *range(far.head + stride, history, stride), history] if history else [0]
    for begin, end in zip(edges, [*edges[1:], length], strict=True):
        for start in range(begin, end, _QUERY_BLOCK):
            yield start, min(start + _QUERY_BLOCK, end)


plan_blocks = PerBatchCache(_plan_blocks)
"""The blocks of queries of all buckets of a batch."""


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
    begins: Tensor | None
    """The first near key of each token: [samples, max_length]. None without a rule of visibility."""
    far: FarKeys | None
    plan: BlockPlan
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

    def result(self, packed: Tensor) -> Tensor:
        """Return memory for a padded result: that of the packed tokens, if it has the same layout."""
        if self.bucket.single and self.heads == 1 and packed.dtype == self.q.dtype:
            return packed[self.bucket.single].transpose(0, 1)
        return torch.empty_like(self.q)

    def unpad(self, padded: Tensor, packed: Tensor) -> None:
        """Write a padded result to packed tokens, unless it is in their memory."""
        if padded.untyped_storage().data_ptr() != packed.untyped_storage().data_ptr():
            self.bucket.scatter(padded.unflatten(0, (-1, self.heads)).transpose(1, 2), packed)

    def visible(self, block: QueryBlock) -> Tensor:
        """Return which keys the queries of a block see: [samples or 1, queries, keys]."""
        query = torch.arange(block.rows.start, block.rows.stop, device=self.q.device)[:, None]
        limits = query[None] if self.limits is None else self.limits[:, block.rows, None]
        begins = None if self.begins is None else self.begins[:, block.rows, None]
        return is_visible(query, self.plan.positions(block), limits, begins, self.far)

    def distance(self, block: QueryBlock) -> Tensor:
        """Return distances in positions: [samples or 1, queries, keys]. The position of a query is its limit."""
        rows = block.rows
        query = torch.arange(rows.start, rows.stop, device=self.q.device)[None]
        limits = query if self.limits is None else self.limits[:, rows]
        return (limits[:, :, None] - self.plan.positions(block)).clamp_(min=0)


def padded_batches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    limits: Tensor,
    *,
    begins: Tensor | None,
    far: FarKeys | None,
    times: EventTimes | None = None,
) -> Iterator[PaddedBatch]:
    """Yield all samples of a batch, from packed tokens [tokens, heads, width]."""
    dtype = compute_dtype(q)
    for bucket, plan in zip(length_buckets(spans), plan_blocks(spans, limits, begins, far), strict=True):
        padded_times = times and EventTimes(bucket.gather(times.event).double(), bucket.gather(times.query).double())
        padded_q, padded_k, padded_v = (_fold_heads(bucket.gather(x)).to(dtype) for x in (q, k, v))
        padded_begins = None if begins is None else bucket.gather_begins(begins)
        padded_limits = bucket.gather_limits(limits)
        operands = padded_q, padded_k, padded_v, padded_limits, padded_begins, far, plan, padded_times
        yield PaddedBatch(bucket, q.shape[1], *operands)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: fp64 for fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fold_heads(padded: Tensor) -> Tensor:
    """Return [samples, places, heads, width] as [samples * heads, places, width]."""
    return padded.transpose(1, 2).flatten(0, 1)
