"""HSTU attention as Triton kernels: no padding, no matrix of all pairs, no atomic additions.

Programs walk over blocks of queries (forward; gradients of q and of the biases) or of keys (gradients of k and v), or
parts of them, that `work` dealt to them. Scores are computed anew in backward. Whatever a program adds up is its own
until the end, where it is scaled, so that halves keep their digits. Parts, and sums of several programs, are added
afterwards in a fixed order: two runs give the same bits.

Compiled for a GPU, or run by Triton's interpreter on a CPU (TRITON_INTERPRET=1). Nothing else here imports Triton.
"""

import triton
import triton.language as tl

from freescale.models.sequence import CELL_SHIFT as _CELL_SHIFT

# ruff: noqa: N803  compile-time constants are upper case in Triton


CELL_SHIFT = tl.constexpr(_CELL_SHIFT)


@triton.jit
def _span(spans, sample):
    """First token, length and history of a sample."""
    at = spans + 3 * sample
    return tl.load(at), tl.load(at + 1).to(tl.int32), tl.load(at + 2).to(tl.int32)


@triton.jit
def _seen(query, key, length, history):
    """Whether queries [., 1] of a sample see its keys [1, .]."""
    return (key <= query) & ((key < history) | (key == query)) & (query < length)


@triton.jit
def _cell(asked, event):
    """The leading bits of the time between questions and events, as a float: a logarithm, near enough for a table."""
    return tl.abs(asked - event).to(tl.float32).to(tl.int32, bitcast=True) >> CELL_SHIFT


@triton.jit
def _rows(base, place, stride, known, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load [places of a sample, width of a head]; what is not known is 0. Offsets are short, the base is not."""
    column = tl.arange(0, PADDED)
    at = base + (place[:, None] * stride + column[None, :])
    return tl.load(at, mask=known[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit
def _put(base, place, stride, known, value, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store [places of a sample, width of a head]."""
    column = tl.arange(0, PADDED)
    at = base + (place[:, None] * stride + column[None, :])
    tl.store(at, value.to(base.dtype.element_ty), mask=known[:, None] & (column[None, :] < WIDTH))


@triton.jit
def _part(parts, slot, head, HEADS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Where a part of a block that was cut stands until it is joined with the others."""
    within = tl.arange(0, BLOCK)[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    return parts + (slot.to(tl.int64) * HEADS + head) * (BLOCK * PADDED) + within


@triton.jit
def _give(
    out, first, parts, slot, head, place, known, value,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what a whole block added up to, or leave that of a part where `join` finds it."""
    if slot >= 0:
        tl.store(_part(parts, slot, head, HEADS, PADDED, BLOCK), value)
    else:
        base = out + first * (HEADS * WIDTH) + head * WIDTH
        _put(base, place, HEADS * WIDTH, known, value, WIDTH, PADDED)


@triton.jit
def _tiles_of_row(place, history, BLOCK: tl.constexpr):
    """How many tiles of keys lie in the history that a block of queries sees."""
    return tl.cdiv(tl.minimum(history, (place + 1) * BLOCK), BLOCK)


@triton.jit(do_not_specialize=["turns"])  # or a batch might wait for a compiler
def forward(
    q, k, v, out, parts, spans, asked, event, position, by_cell, items,
    q_stride, k_stride, v_stride, turns, weight,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What every query gathers from the keys that it sees."""
    head = tl.program_id(1)
    own = head * WIDTH
    lane = tl.arange(0, BLOCK)
    for turn in range(turns):
        item = items + 5 * (tl.program_id(0) * turns + turn)
        sample, place, slot = tl.load(item), tl.load(item + 1), tl.load(item + 4)
        if sample >= 0:
            first, length, history = _span(spans, sample)
            query = place * BLOCK + lane
            real = query < length
            queries = _rows(q + first * q_stride + own, query, q_stride, real, WIDTH, PADDED)
            when_asked = tl.load((asked + first) + query, mask=real, other=0)
            mixed = tl.zeros([BLOCK, PADDED], tl.float32)
            before = _tiles_of_row(place, history, BLOCK)
            for tile in range(tl.load(item + 2), tl.load(item + 3)):
                key = tl.where(tile < before, tile, place) * BLOCK + lane
                known = key < length
                keys = _rows(k + first * k_stride + own, key, k_stride, known, WIDTH, PADDED)
                values = _rows(v + first * v_stride + own, key, v_stride, known, WIDTH, PADDED)
                when = tl.load((event + first) + key, mask=known, other=0)
                seen = _seen(query[:, None], key[None, :], length, history)
                distance = tl.maximum(tl.minimum(query, history)[:, None] - key[None, :], 0)
                score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
                score += tl.load(position + distance, mask=seen, other=0.0)
                score += tl.load(by_cell + _cell(when_asked[:, None], when[None, :]), mask=seen, other=0.0)
                weights = tl.where(seen, score * tl.sigmoid(score), 0.0)
                mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
            _give(out, first, parts, slot, head, query, real, mixed * weight, HEADS, WIDTH, PADDED, BLOCK)


@triton.jit(do_not_specialize=["turns"])
def backward_rows(
    q, k, v, d_out, d_q, parts, d_position, d_time, spans, asked, event, position, time, bucket_of_cell, items,
    q_stride, k_stride, v_stride, turns, longest, weight,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    BUCKETS: tl.constexpr,
):  # fmt: skip
    """Gradients of queries; and those of the biases, as far as this program meets them."""
    head = tl.program_id(1)
    own = head * WIDTH
    mine = tl.program_id(0) * HEADS + head
    lane = tl.arange(0, BLOCK)
    band = tl.arange(0, 2 * BLOCK)
    bucket_lane = tl.arange(0, BUCKETS)
    by_bucket = tl.zeros([BUCKETS], tl.float32)
    by_distance = d_position + mine.to(tl.int64) * longest
    for turn in range(turns):
        item = items + 5 * (tl.program_id(0) * turns + turn)
        sample, place, slot = tl.load(item), tl.load(item + 1), tl.load(item + 4)
        if sample >= 0:
            first, length, history = _span(spans, sample)
            query = place * BLOCK + lane
            real = query < length
            stands = tl.minimum(query, history)
            queries = _rows(q + first * q_stride + own, query, q_stride, real, WIDTH, PADDED)
            gradient = _rows(d_out + first * (HEADS * WIDTH) + own, query, HEADS * WIDTH, real, WIDTH, PADDED)
            when_asked = tl.load((asked + first) + query, mask=real, other=0)
            of_queries = tl.zeros([BLOCK, PADDED], tl.float32)
            before = _tiles_of_row(place, history, BLOCK)
            for tile in range(tl.load(item + 2), tl.load(item + 3)):
                begin = tl.where(tile < before, tile, place) * BLOCK
                key = begin + lane
                known = key < length
                keys = _rows(k + first * k_stride + own, key, k_stride, known, WIDTH, PADDED)
                values = _rows(v + first * v_stride + own, key, v_stride, known, WIDTH, PADDED)
                when = tl.load((event + first) + key, mask=known, other=0)
                seen = _seen(query[:, None], key[None, :], length, history)
                distance = tl.maximum(stands[:, None] - key[None, :], 0)
                bucket = tl.load(bucket_of_cell + _cell(when_asked[:, None], when[None, :]), mask=seen, other=-1)
                score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
                score += tl.load(position + distance, mask=seen, other=0.0)
                score += tl.load(time + bucket, mask=seen, other=0.0)
                opened = tl.sigmoid(score)
                slope = opened * (1 + score * (1 - opened))
                of_score = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
                of_score = tl.where(seen, of_score * slope, 0.0)
                of_queries = tl.dot(of_score.to(keys.dtype), keys, of_queries, input_precision=PRECISION)

                # Pairs that are as far apart lie on a diagonal: rows are shifted until they stand in a column.
                alone = (query[:, None] == key[None, :]) & (key[None, :] > history)
                nearest = tl.maximum(tl.min(stands) - begin - (BLOCK - 1), 0)
                column = stands[:, None] - (nearest + band)[None, :] - begin
                shifted = tl.gather(tl.where(alone, 0.0, of_score), tl.minimum(tl.maximum(column, 0), BLOCK - 1), 1)
                along = tl.sum(tl.where((column >= 0) & (column < BLOCK), shifted, 0.0), 0)
                along += tl.where(band == 0, tl.sum(tl.where(alone, of_score, 0.0)), 0.0)
                at = by_distance + nearest + band
                inside = nearest + band < longest
                tl.store(at, tl.load(at, mask=inside, other=0.0) + along * weight, mask=inside)
                tl.debug_barrier()  # the next tile adds to some of these, by other threads

                # Of the time buckets a tile holds few: one or two, once it is far from the diagonal.
                for found in range(tl.min(tl.where(seen, bucket, BUCKETS)), tl.max(bucket) + 1):
                    total = tl.sum(tl.where(bucket == found, of_score, 0.0))
                    by_bucket += tl.where(bucket_lane == found, total, 0.0)
            _give(d_q, first, parts, slot, head, query, real, of_queries * weight, HEADS, WIDTH, PADDED, BLOCK)
    tl.store(d_time + mine * BUCKETS + bucket_lane, by_bucket * weight)


@triton.jit(do_not_specialize=["turns"])
def backward_columns(
    q, k, v, d_out, d_k, d_v, parts, more_parts, spans, asked, event, position, by_cell, items,
    q_stride, k_stride, v_stride, turns, weight,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, from all queries that see them. Scores stand with keys as rows."""
    head = tl.program_id(1)
    own = head * WIDTH
    lane = tl.arange(0, BLOCK)
    for turn in range(turns):
        item = items + 5 * (tl.program_id(0) * turns + turn)
        sample, place, slot = tl.load(item), tl.load(item + 1), tl.load(item + 4)
        if sample >= 0:
            first, length, history = _span(spans, sample)
            key = place * BLOCK + lane
            known = key < length
            keys = _rows(k + first * k_stride + own, key, k_stride, known, WIDTH, PADDED)
            values = _rows(v + first * v_stride + own, key, v_stride, known, WIDTH, PADDED)
            when = tl.load((event + first) + key, mask=known, other=0)
            of_keys = tl.zeros([BLOCK, PADDED], tl.float32)
            of_values = tl.zeros([BLOCK, PADDED], tl.float32)
            for tile in range(tl.load(item + 2), tl.load(item + 3)):
                query = (place + tile) * BLOCK + lane
                real = query < length
                queries = _rows(q + first * q_stride + own, query, q_stride, real, WIDTH, PADDED)
                gradient = _rows(d_out + first * (HEADS * WIDTH) + own, query, HEADS * WIDTH, real, WIDTH, PADDED)
                when_asked = tl.load((asked + first) + query, mask=real, other=0)
                seen = _seen(query[None, :], key[:, None], length, history)
                distance = tl.maximum(tl.minimum(query, history)[None, :] - key[:, None], 0)
                score = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
                score += tl.load(position + distance, mask=seen, other=0.0)
                score += tl.load(by_cell + _cell(when_asked[None, :], when[:, None]), mask=seen, other=0.0)
                opened = tl.sigmoid(score)
                weights = tl.where(seen, score * opened, 0.0)
                of_values = tl.dot(weights.to(gradient.dtype), gradient, of_values, input_precision=PRECISION)
                slope = opened * (1 + score * (1 - opened))
                of_score = tl.dot(values, tl.trans(gradient), input_precision=PRECISION)
                of_score = tl.where(seen, of_score * slope, 0.0)
                of_keys = tl.dot(of_score.to(queries.dtype), queries, of_keys, input_precision=PRECISION)
            _give(d_k, first, parts, slot, head, key, known, of_keys * weight, HEADS, WIDTH, PADDED, BLOCK)
            _give(d_v, first, more_parts, slot, head, key, known, of_values * weight, HEADS, WIDTH, PADDED, BLOCK)


@triton.jit
def join(
    parts, out, spans, joins, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add up the parts of blocks that were cut, in order."""
    slot, head = tl.program_id(0), tl.program_id(1)
    sample, place, count = tl.load(joins + 3 * slot), tl.load(joins + 3 * slot + 1), tl.load(joins + 3 * slot + 2)
    if sample >= 0:
        total = tl.zeros([BLOCK, PADDED], tl.float32)
        for part in range(count):
            total += tl.load(_part(parts, slot + part, head, HEADS, PADDED, BLOCK))
        first, length, _ = _span(spans, sample)
        at = place * BLOCK + tl.arange(0, BLOCK)
        _put(out + first * (HEADS * WIDTH) + head * WIDTH, at, HEADS * WIDTH, at < length, total, WIDTH, PADDED)
