"""HSTU attention by blocks of queries, with torch's matrix products: for CPUs, and wherever no kernel fits.

Memory is linear in the tokens: one block of scores exists at a time, small enough for the cache, and backward
recomputes it. Biases, SiLU and mask of a block are one pass of `pairs.c` for fp32 on a CPU (about twenty passes of
torch operators), else torch operators. The C file is compiled on first use (a third of a second), loaded through
ctypes, and not kept on disk.
"""

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale import deterministic
from freescale.errors import DataError
from freescale.log import warning_once
from freescale.models.attention.reference import AttentionGradients, AttentionInputs
from freescale.models.jagged import CELL_SHIFT, EventTimes, time_bucket_table
from freescale.models.padded_batches import PaddedBatch, QueryBlock, SplitKeys, compute_dtype, padded_batches
from freescale.native import compile_and_load
from freescale.visibility import FarKeys

_MIN_PARALLEL_PAIRS = 1 << 17  # fewer pairs are done before another thread has started
_Kernel = Callable[..., None]
_Sums = Sequence[Sequence[Tensor]]
_NO_FAR_KEYS = FarKeys(0, 1, 1)
_Count, _Pointer = ctypes.c_int64, ctypes.c_void_p


def forward(x: AttentionInputs) -> Tensor:
    """Return the output of HSTU attention."""
    out = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    pairs, buffer = select_pairs(x), ScratchBuffer()
    for batch in _padded(x):
        k, v, mixed = batch.plan.split(batch.k), batch.plan.split(batch.v), batch.result(out)
        for block in batch.plan.blocks:
            rows = batch.q[:, block.rows]
            weights = k.multiply(rows, block, out=buffer.take(rows, block.keys))
            pairs.weigh_(weights, batch, block)
            v.mix(weights, block, out=mixed[:, block.rows])
        batch.unpad(mixed.div_(x.scale), out)
    return out


def backward(x: AttentionInputs, d_out: Tensor) -> AttentionGradients:
    """Return the gradients of HSTU attention."""
    d_q, d_k, d_v = (torch.empty_like(operand, memory_format=torch.contiguous_format) for operand in (x.q, x.k, x.v))
    pairs, buffer, d_buffer = select_pairs(x), ScratchBuffer(), ScratchBuffer()
    for batch in _padded(x):
        plan, gradient = batch.plan, batch.pad(d_out) / x.scale
        k, v = plan.split(batch.k), plan.split(batch.v)
        padded_dq, *totals = (batch.result(packed) for packed in (d_q, d_k, d_v))
        padded_dk, padded_dv = (SplitKeys(total.zero_(), torch.zeros_like(k.far)) for total in totals)
        for block in plan.blocks:
            q, d_mixed = batch.q[:, block.rows], gradient[:, block.rows]
            weights = k.multiply(q, block, out=buffer.take(q, block.keys))
            d_score = v.multiply(d_mixed, block, out=d_buffer.take(q, block.keys))
            pairs.weigh_backward_(weights, d_score, batch, block)
            padded_dv.add_products_(weights, d_mixed, block)
            padded_dk.add_products_(d_score, q, block)
            k.mix(d_score, block, out=padded_dq[:, block.rows])
        for padded, packed in ((padded_dq, d_q), (padded_dk.join_(plan), d_k), (padded_dv.join_(plan), d_v)):
            batch.unpad(padded, packed)
    d_position, d_time = pairs.bias_gradients()
    return AttentionGradients(d_q, d_k, d_v, d_position.to(x.position.dtype), d_time.to(x.time.dtype))


def _padded(x: AttentionInputs) -> Iterator[PaddedBatch]:
    times = EventTimes(x.event_time, x.query_time)
    return padded_batches(x.q, x.k, x.v, x.spans, x.limits, begins=x.begins, far=x.far, times=times)


class ScratchBuffer:
    """Memory that is reused block after block: fresh memory would cost as much time as the computation."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def take(self, rows: Tensor, keys: int) -> Tensor:
        """Return memory for the scores of rows. The next call returns the same memory."""
        shape = (len(rows), rows.shape[1], keys)
        if math.prod(shape) > len(self._buffer) or rows.dtype != self._buffer.dtype:
            self._buffer = rows.new_empty(math.prod(shape))
        return self._buffer[: math.prod(shape)].view(shape)


def select_pairs(x: AttentionInputs) -> "TorchPairs | NativePairs":
    """Return the C implementation for fp32 and 16 bits on a CPU with a compiler, else torch operators."""
    if x.q.device.type != "cpu" or x.q.dtype == torch.float64:
        return TorchPairs(x)
    library = load_library()
    if isinstance(library, str):
        warning_once(f"attention: torch operators for pairs, because {library}; C code takes a third of the time")
        return TorchPairs(x)
    return NativePairs(x, library)


class TorchPairs:
    """Scores to weights and back by torch operators: any dtype, any device.

    Biases are looked up: a distance is a shifted view of its table, a time the leading bits of a float.
    """

    def __init__(self, x: AttentionInputs) -> None:
        dtype = compute_dtype(x.q)
        self._position, self._time = x.position.to(dtype), x.time.to(dtype)
        self._bucket_table = time_bucket_table(x.q.device)
        self._d_position, self._d_time = torch.zeros_like(self._position), torch.zeros_like(self._time)

    def weigh_(self, score: Tensor, batch: PaddedBatch, block: QueryBlock) -> None:
        """Replace scores by silu(score + biases), 0 for invisible pairs."""
        _add_(score, self._biases(batch, block, self._buckets(batch, block)))
        _mask_(F.silu(score, inplace=True), batch, block)

    def weigh_backward_(self, score: Tensor, d_weights: Tensor, batch: PaddedBatch, block: QueryBlock) -> None:
        """Replace scores by weights and their gradients by those of the scores; accumulate those of the biases."""
        buckets = self._buckets(batch, block)
        _add_(score, self._biases(batch, block, buckets))
        d_score = d_weights.copy_(torch.ops.aten.silu_backward(d_weights, score))
        _mask_(F.silu(score, inplace=True), batch, block)
        _mask_(d_score, batch, block)
        by_sample = d_score.unflatten(0, (batch.samples, -1)).sum(1)
        deterministic.index_add_(self._d_time, buckets.flatten(), by_sample.flatten())
        if _is_causal(batch):
            _add_diagonals_(by_sample.sum(0), self._d_position)
        else:
            distance = batch.distance(block).expand(by_sample.shape)
            deterministic.index_add_(self._d_position, distance.flatten(), by_sample.flatten())

    def bias_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of position and time, summed over all blocks so far."""
        return self._d_position, self._d_time

    def _buckets(self, batch: PaddedBatch, block: QueryBlock) -> Tensor:
        """Return the time buckets [samples, queries, keys]."""
        assert batch.times is not None
        events = batch.times.event[:, batch.plan.positions(block)]
        interval = batch.times.query[:, block.rows, None] - events[:, None]
        cells = interval.float().abs_().view(torch.int32).bitwise_right_shift_(CELL_SHIFT)
        return self._bucket_table.index_select(0, cells.flatten()).view(cells.shape)

    def _biases(self, batch: PaddedBatch, block: QueryBlock, buckets: Tensor) -> Tensor:
        biases = self._time.index_select(0, buckets.flatten()).view(buckets.shape)
        if _is_causal(batch):
            return biases.add_(_position_band(self._position, block.rows))
        distance = batch.distance(block)
        return biases.add_(self._position.index_select(0, distance.flatten()).view(distance.shape))


def _add_(score: Tensor, biases: Tensor) -> None:
    """Add biases, which are the same for all heads of a sample."""
    score.unflatten(0, (len(biases), -1)).add_(biases[:, None])


def _mask_(pairs: Tensor, batch: PaddedBatch, block: QueryBlock) -> None:
    """Set invisible pairs to 0."""
    if _is_causal(batch):
        pairs[:, :, block.rows].tril_()
    else:
        pairs.unflatten(0, (batch.samples, -1)).mul_(batch.visible(block)[:, None])


def _is_causal(batch: PaddedBatch) -> bool:
    """Return whether every token sees itself and all earlier tokens."""
    return batch.limits is None and batch.begins is None


def _position_band(position: Tensor, rows: slice) -> Tensor:
    """Return the position biases of a block without candidates: [queries, keys]."""
    count = rows.stop - rows.start
    table = F.pad(position[: rows.stop].flip(0), (0, count))  # the padding is read by invisible pairs
    return table.as_strided((count, rows.stop), (1, 1)).flip(0)


def _add_diagonals_(pairs: Tensor, by_distance: Tensor) -> None:
    """Add the sum of each diagonal. Rows are shifted so that pairs of equal distance share a column."""
    rows, keys = pairs.shape
    shifted = pairs.new_zeros(rows * (rows + keys))
    shifted.as_strided(pairs.shape, (rows + keys - 1, 1), rows - 1).copy_(pairs)
    by_distance[:keys] += shifted.view(rows, rows + keys).sum(0)[:keys].flip(0)


class _PairBlock(ctypes.Structure):
    """The struct of pairs.c."""

    _fields_ = (
        *((name, _Count) for name in ("samples", "heads", "rows", "keys", "begin", "max_length")),
        *((name, _Count) for name in ("far", "first", "end", "own", "head", "segment", "period")),
        *(
            (name, _Pointer)
            for name in (
                *("history", "limits", "begins", "query_time", "event_time"),
                *("time", "by_cell", "bucket_of_cell", "reversed"),
            )
        ),
        ("distances", _Count),
    )


class _Scratch(ctypes.Structure):
    """The memory of a thread."""

    _fields_ = tuple((name, _Pointer) for name in ("cells", "runs", "far_time", "far_bias", "d_far_bias"))


@lru_cache
def load_library() -> ctypes.CDLL | str:
    """Compile and load pairs.c; return the reason if that fails."""
    return compile_and_load(Path(__file__).with_name("pairs.c"), [f"-DCELL_SHIFT={CELL_SHIFT}"])


class NativePairs:
    """The same as `TorchPairs` by pairs.c."""

    def __init__(self, x: AttentionInputs, library: ctypes.CDLL) -> None:
        self._library = library
        self._time, self._reversed = x.time.float().contiguous(), x.position.float().flip(0)
        self._bucket_table = time_bucket_table(x.q.device)
        self._by_cell = self._time.index_select(0, self._bucket_table)
        self._threads = torch.get_num_threads()
        self._d_reversed = torch.zeros(self._threads, len(self._reversed), dtype=torch.float32)
        self._d_time = torch.zeros(self._threads, len(self._time), dtype=torch.float32)
        self._batch: PaddedBatch | None = None
        self._of_batch = _BatchArguments((), [])

    def weigh_(self, score: Tensor, batch: PaddedBatch, block: QueryBlock) -> None:
        """Replace scores by silu(score + biases), 0 for invisible pairs."""
        self._run(self._library.weights, (score,), batch, block)

    def weigh_backward_(self, score: Tensor, d_weights: Tensor, batch: PaddedBatch, block: QueryBlock) -> None:
        """Replace scores by weights and their gradients by those of the scores; accumulate those of the biases."""
        sums = list(zip(self._d_reversed, self._d_time, strict=True))
        self._run(self._library.gradients, (score, d_weights), batch, block, sums)

    def bias_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of position and time, summed over all blocks so far."""
        return self._d_reversed.sum(0).flip(0), self._d_time.sum(0)

    def _run(
        self, kernel: _Kernel, scores: Sequence[Tensor], batch: PaddedBatch, block: QueryBlock, sums: _Sums = ()
    ) -> None:
        """Divide the rows among threads. Each thread has its own sums."""
        if batch is not self._batch:
            self._batch, self._of_batch = batch, self._arguments(batch)
        rows, near, keys = block.rows, block.near, block.keys
        count = rows.stop - rows.start
        sizes = batch.samples, batch.heads, count, keys, rows.start, batch.bucket.max_length
        visible = block.far, near.start, near.stop, block.own.start, *(batch.far or _NO_FAR_KEYS)
        struct = _PairBlock(*sizes, *visible, *self._of_batch.pointers, len(self._reversed))
        runs = keys + 3 if batch.begins is not None else 2
        threads = self._threads if scores[0].numel() >= _MIN_PARALLEL_PAIRS else 1

        def run_part(thread: int) -> None:
            memory = (
                torch.empty(keys, dtype=torch.int32),
                torch.empty(runs, 3, dtype=torch.int64),
                torch.empty(block.far, dtype=torch.float64),
                *torch.empty(2, block.far),
            )
            scratch = _Scratch(*(one.data_ptr() for one in memory))
            first, last = (_Count(count * end // threads) for end in (thread, thread + 1))
            accumulators = [_address(total) for total in (sums[thread] if sums else ())]
            kernel(ctypes.byref(struct), *map(_address, scores), first, last, ctypes.byref(scratch), *accumulators)

        if threads == 1:
            run_part(0)
        else:
            list(_thread_pool(threads).map(run_part, range(threads)))

    def _arguments(self, batch: PaddedBatch) -> "_BatchArguments":
        """Return what C reads of a batch in every block."""
        times, (history, limits) = batch.times, _checked_limits(batch, len(self._reversed))
        assert times is not None
        begins = batch.begins if batch.begins is None else batch.begins.contiguous()
        tables = self._time, self._by_cell, self._bucket_table, self._reversed
        tensors = history, limits, begins, times.query, times.event, *tables
        return _BatchArguments(tensors, [None if tensor is None else tensor.data_ptr() for tensor in tensors])


class _BatchArguments(NamedTuple):
    """Tensors, which stay in memory as long as their addresses are used."""

    tensors: tuple[Tensor | None, ...]
    pointers: list[int | None]


def _checked_limits(batch: PaddedBatch, distances: int) -> tuple[Tensor, Tensor]:
    """Return history lengths and limits as C reads them. C does not check its reads."""
    history, limits, max_length = batch.bucket.history, batch.limits, batch.bucket.max_length
    if history is None or limits is None:  # without candidates C does not read limits
        history = limits = torch.full((batch.samples,), max_length)
        max_distance = max_length - 1
    else:
        history, limits = (x.to(torch.int64).contiguous() for x in (history, limits))
        max_distance = int(limits.max())
        if int(limits.min()) < 0 or bool((limits > history[:, None]).any()):
            what = "a candidate sees fewer than 0 tokens, or more than its history has"
            raise DataError(what, remedy="give anchors from 0 to the history length of their sample")
    if max_distance >= distances:
        what = f"two events are {max_distance} positions apart, but the position bias has {distances} rows"
        raise DataError(what, remedy="build the model with `max_seq_len` at least as long as its longest sample")
    return history, limits


os.register_at_fork(after_in_child=lambda: _thread_pool.cache_clear())


@lru_cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="pairs")


def _address(x: Tensor) -> ctypes.c_void_p:
    return _Pointer(x.data_ptr())
