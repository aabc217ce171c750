"""Triton kernels of zero-collision tables: see `zero_collision_launch`. Bit for bit what zero_collision.c computes."""

import triton
import triton.language as tl

from freescale import hashing_kernels

# ruff: noqa: N803  compile-time constants are upper case in Triton

NONE, TTL, LRU, LFU = 0, 1, 2, 3
_TTL, _LRU, _LFU = (tl.constexpr(kind) for kind in (TTL, LRU, LFU))
_EMPTY = tl.constexpr(-1)
_FREE, _NEVER = tl.constexpr(-(1 << 63)), tl.constexpr((1 << 63) - 1)


@triton.jit
def _first_slot(id, SLOTS: tl.constexpr):  # noqa: A002
    return (hashing_kernels.murmur3(id.to(tl.uint64)) % SLOTS).to(tl.int64)


@triton.jit(do_not_specialize=["first", "owned", "step", "time"])  # avoids a recompilation per value
def find_slots(
    ids, is_wanted, rows, slot_ids, last_step, times, uses, faults, first, owned, step, time,
    BITS: tl.constexpr, SLOTS: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Find the row of an id, the shared one of its bucket if it has no slot, and note the use of a slot."""
    place = tl.program_id(0).to(tl.int64)
    id = tl.load(ids + place)  # noqa: A001
    bucket = first.to(tl.int64)
    if BITS > 0:
        bucket = (hashing_kernels.splitmix64(id.to(tl.uint64)) >> (64 - BITS)).to(tl.int64)
    local = bucket - first
    row = tl.full([], SLOTS, tl.int64)  # of an id that is not wanted: the first shared row
    if tl.load(is_wanted + place):
        if (id == _EMPTY) | (local < 0) | (local >= owned):
            tl.store(faults, 1)
        else:
            begin, slot = local * (SLOTS + 1), _first_slot(id, SLOTS)
            probe = tl.arange(0, PADDED)
            held = tl.load(slot_ids + begin + (slot + probe) % SLOTS, mask=probe < WINDOW, other=_EMPTY)
            at = tl.min(tl.where(held == id, probe, PADDED))
            row = begin + SLOTS
            if at < PADDED:
                row = begin + (slot + at) % SLOTS
                if tl.load(last_step + row) != step:
                    tl.store(last_step + row, step)
                    tl.store(uses + row, tl.load(uses + row) + 1)
                    tl.store(times + row, tl.maximum(tl.load(times + row), time))
    tl.store(rows + place, row + first.to(tl.int64) * (SLOTS + 1))


@triton.jit
def _eviction_keys(
    row, valid, last_step, times, uses, step, time, ttl, protected, KIND: tl.constexpr
):  # fmt: skip
    used = tl.load(last_step + row, mask=valid, other=0).to(tl.int64)
    is_evictable = step - used > protected
    if KIND == _LRU:
        key = used
    elif KIND == _LFU:
        key = (tl.load(uses + row, mask=valid, other=0).to(tl.int64) << 32) | used
    else:
        key = tl.load(times + row, mask=valid, other=0).to(tl.int64)
        is_evictable = is_evictable & (time - key > ttl)
    return tl.where(is_evictable, key, _NEVER)


@triton.jit(do_not_specialize=["first", "count", "step", "time", "ttl", "protected"])
def insert_ids(
    ids, buckets, order, rows, evicted, slot_ids, last_step, times, uses, first, count, step, time, ttl, protected,
    BUCKETS: tl.constexpr, SLOTS: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Insert the ids of a bucket one after the other, if this place of the ascending `buckets` is the bucket's first.

    Places with the number BUCKETS insert nothing. `order`: the place of each of them in the other arrays.
    """
    place = tl.program_id(0).to(tl.int64)
    bucket = tl.load(buckets + place)
    if (bucket < BUCKETS) & (bucket != tl.load(buckets + place - 1, mask=place > 0, other=-1)):
        offset = first.to(tl.int64) * (SLOTS + 1)
        begin = bucket * (SLOTS + 1) - offset
        probe = tl.arange(0, PADDED)
        valid = probe < WINDOW
        has_more = place < count
        while has_more:
            source = tl.load(order + place)
            id = tl.load(ids + source)  # noqa: A001
            slot = _first_slot(id, SLOTS)
            window = begin + (slot + probe) % SLOTS
            held = tl.load(slot_ids + window, mask=valid, other=0)
            key = tl.full([PADDED], _NEVER, tl.int64)
            if KIND > 0:
                key = _eviction_keys(window, valid, last_step, times, uses, step, time, ttl, protected, KIND)
            key = tl.where(valid, tl.where(held == _EMPTY, _FREE, key), _NEVER)
            best = tl.min(key)
            at = tl.min(tl.where(key == best, probe, PADDED - 1))
            row = begin + tl.where(best < _NEVER, (slot + at) % SLOTS, SLOTS)
            tl.store(rows + source, row + offset)
            tl.store(evicted + source, tl.load(slot_ids + row))
            tl.debug_barrier()  # all threads have read the slot
            if best < _NEVER:
                tl.store(slot_ids + row, id)
                tl.store(last_step + row, step)
                tl.store(times + row, time)
                tl.store(uses + row, 1)
            tl.debug_barrier()  # all threads read it in the next window
            place += 1
            has_more = tl.load(buckets + place, mask=place < count, other=-1) == bucket


@triton.jit(do_not_specialize=["key", "scale_bits"])
def initialize_rows(
    weights, sums, rows, ids, is_new, key, scale_bits,
    DIM: tl.constexpr, PADDED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write the initial values of a row, if its id is new, and zeros to its optimizer state of `SUMS` columns."""
    place = tl.program_id(0).to(tl.int64)
    if tl.load(is_new + place):
        row, id = tl.load(rows + place), tl.load(ids + place)  # noqa: A001
        column = tl.arange(0, PADDED)
        base = hashing_kernels.splitmix64((id ^ key).to(tl.uint64))
        number = hashing_kernels.splitmix64(base + column.to(tl.uint64))
        unit = (number >> 11).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))
        scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True)
        value = (unit * 2.0 - 1.0) * scale
        tl.store(weights + row * DIM + column, value.to(weights.dtype.element_ty), mask=column < DIM)
        if SUMS > 0:
            zeros = tl.zeros([PADDED], sums.dtype.element_ty)
            tl.store(sums + row * SUMS + column, zeros, mask=column < SUMS)
