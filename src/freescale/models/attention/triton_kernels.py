"""Triton kernels of HSTU attention: no padding, no matrix of all pairs, no atomics.

Programs process blocks of queries (forward; gradients of q and of the biases) or of keys (gradients of k and v), or
parts of blocks, as `triton_launch` schedules them. Backward recomputes the scores. Each program accumulates in fp32 and
scales at the end, which preserves the precision of 16-bit results. Parts, and sums of several programs, are added
afterwards in a fixed order, so two runs give the same bits.

The kernels are compiled for a GPU, or run by Triton's interpreter on a CPU (TRITON_INTERPRET=1).
"""

import triton
import triton.language as tl

from freescale.models.jagged import CELL_SHIFT as _CELL_SHIFT

# ruff: noqa: N803  compile-time constants are upper case in Triton


CELL_SHIFT = tl.constexpr(_CELL_SHIFT)


@triton.jit
def _span(spans, sample):
    """Return first token and length of a sample."""
    pointer = spans + 3 * sample
    return tl.load(pointer), tl.load(pointer + 1).to(tl.int32)


@triton.jit
def _of_token(values, first, place, length):
    """Return the values of places of a sample. Places after its end have that of its last token.

    So tables of biases are read without a mask: every pair has a valid distance and a valid cell. Rows of q, k, v and
    gradients after the end are 0, so their pairs add nothing.
    """
    return tl.load((values + first) + tl.minimum(place, length - 1))


@triton.jit
def _begin_of_token(begins, first, place, length, RULE: tl.constexpr):
    """Return the first near key of places of a sample; 0 without a rule of visibility."""
    begin = tl.zeros_like(place)
    if RULE:
        begin = _of_token(begins, first, place, length).to(tl.int32)
    return begin


@triton.jit
def _visible(query, key, limit, begin, head, segment, period, RULE: tl.constexpr):
    """Return whether queries of a sample attend to its keys; `limit`, `begin`: of the queries."""
    before = key < limit
    if RULE:
        is_far = (key < head) | ((key - head) % period >= segment)  # of keys in the head the remainder is below 0
        before &= (key >= begin) | is_far
    return before | (key == query)


@triton.jit
def _item(items, number):
    """Return an item of the schedule: sample, block, slot of the part, first tile, last tile + 1, near tiles, jump."""
    item = items + 9 * number
    return (
        tl.load(item), tl.load(item + 1), tl.load(item + 4), tl.load(item + 2), tl.load(item + 3),
        tl.load(item + 5), tl.load(item + 6),
    )  # fmt: skip


@triton.jit
def _key_tile(tile, near, jump, items, number, far_tiles, RULE: tl.constexpr):
    """Return the place of a tile of keys among those of its sample: tiles with far keys come first."""
    place = tile + tl.where(tile < near, 0, jump)
    if RULE:
        far, shift = tl.load(items + 9 * number + 7), tl.load(items + 9 * number + 8)
        place = tl.where(tile < far, tl.load(far_tiles + tile, mask=tile < far, other=0), place + shift)
    return place


@triton.jit
def _cell(query_time, event_time):
    """Return the leading bits of the intervals as floats: the index of the time tables."""
    bits = (query_time - event_time).to(tl.float32).to(tl.int32, bitcast=True)
    return (bits & 0x7FFFFFFF) >> CELL_SHIFT  # without the sign: cheaper than the absolute value of 64 bits


@triton.jit
def _load_rows(base, row, stride, valid, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load [positions of a sample, width of a head], 0 where invalid. Offsets are 32-bit, the base is 64-bit."""
    column = tl.arange(0, PADDED)
    pointer = base + (row[:, None] * stride + column[None, :])
    return tl.load(pointer, mask=valid[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit
def _store_rows(base, row, stride, valid, value, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store [positions of a sample, width of a head]."""
    column = tl.arange(0, PADDED)
    pointer = base + (row[:, None] * stride + column[None, :])
    tl.store(pointer, value.to(base.dtype.element_ty), mask=valid[:, None] & (column[None, :] < WIDTH))


@triton.jit
def _part_pointers(parts, slot, head, HEADS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers to the partial sums of a split block."""
    within = tl.arange(0, BLOCK)[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
    return parts + (slot.to(tl.int64) * HEADS + head) * (BLOCK * PADDED) + within


@triton.jit
def _store_block(
    out, first, parts, slot, head, row, valid, value,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the result of a whole block, or the partial sums of a split one for `join`."""
    if slot >= 0:
        tl.store(_part_pointers(parts, slot, head, HEADS, PADDED, BLOCK), value)
    else:
        base = out + first * (HEADS * WIDTH) + head * WIDTH
        _store_rows(base, row, HEADS * WIDTH, valid, value, WIDTH, PADDED)


@triton.jit(do_not_specialize=["turns"])  # avoids a recompilation per value
def forward(
    q, k, v, out, parts, spans, limits, begins, query_time, event_time, position, by_cell, items, far_tiles,
    q_stride, k_stride, v_stride, turns, weight,
    head_keys, segment, period,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Compute the output of every query."""
    head = tl.program_id(1)
    head_offset = head * WIDTH
    lane, tile_lane = tl.arange(0, BLOCK), tl.arange(0, TILE)
    for turn in tl.range(turns, disable_licm=True):
        number = tl.program_id(0) * turns + turn
        sample, block, slot, begin_tile, end_tile, near, jump = _item(items, number)
        if sample >= 0:
            first, length = _span(spans, sample)
            query = block * BLOCK + lane
            query_valid = query < length
            limit = _of_token(limits, first, query, length).to(tl.int32)
            near_begin = _begin_of_token(begins, first, query, length, RULE)
            queries = _load_rows(q + first * q_stride + head_offset, query, q_stride, query_valid, WIDTH, PADDED)
            query_times = _of_token(query_time, first, query, length)
            mixed = tl.zeros([BLOCK, PADDED], tl.float32)
            for tile in range(begin_tile, end_tile):
                key = _key_tile(tile, near, jump, items, number, far_tiles, RULE) * TILE + tile_lane
                valid = key < length
                keys = _load_rows(k + first * k_stride + head_offset, key, k_stride, valid, WIDTH, PADDED)
                values = _load_rows(v + first * v_stride + head_offset, key, v_stride, valid, WIDTH, PADDED)
                event_times = _of_token(event_time, first, key, length)
                visible = _visible(
                    query[:, None], key[None, :], limit[:, None], near_begin[:, None], head_keys, segment, period, RULE
                )
                distance = tl.maximum(limit[:, None] - key[None, :], 0)
                score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
                score += tl.load(position + distance)
                score += tl.load(by_cell + _cell(query_times[:, None], event_times[None, :]))
                weights = tl.where(visible, score * tl.sigmoid(score), 0.0)
                mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
            _store_block(out, first, parts, slot, head, query, query_valid, mixed * weight, HEADS, WIDTH, PADDED, BLOCK)


@triton.jit(do_not_specialize=["turns"])
def backward_rows(
    q, k, v, d_out, d_q, parts, d_position, d_time, spans, limits, begins, query_time, event_time, position, time,
    bucket_of_cell, items, far_tiles, q_stride, k_stride, v_stride, turns, max_distance, weight,
    head_keys, segment, period,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, RULE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, and this program's sums of the gradients of the biases."""
    head = tl.program_id(1)
    head_offset = head * WIDTH
    program = tl.program_id(0) * HEADS + head
    lane, tile_lane = tl.arange(0, BLOCK), tl.arange(0, TILE)
    bucket_lane = tl.arange(0, BUCKETS)
    by_bucket = tl.zeros([BUCKETS], tl.float32)
    by_distance = d_position + program.to(tl.int64) * max_distance
    for turn in tl.range(turns, disable_licm=True):
        number = tl.program_id(0) * turns + turn
        sample, block, slot, begin_tile, end_tile, near, jump = _item(items, number)
        if sample >= 0:
            first, length = _span(spans, sample)
            query = block * BLOCK + lane
            query_valid = query < length
            limit = _of_token(limits, first, query, length).to(tl.int32)
            near_begin = _begin_of_token(begins, first, query, length, RULE)
            queries = _load_rows(q + first * q_stride + head_offset, query, q_stride, query_valid, WIDTH, PADDED)
            gradient = _load_rows(
                d_out + first * (HEADS * WIDTH) + head_offset, query, HEADS * WIDTH, query_valid, WIDTH, PADDED
            )
            query_times = _of_token(query_time, first, query, length)
            d_queries = tl.zeros([BLOCK, PADDED], tl.float32)
            for tile in range(begin_tile, end_tile):
                begin = _key_tile(tile, near, jump, items, number, far_tiles, RULE) * TILE
                key = begin + tile_lane
                valid = key < length
                keys = _load_rows(k + first * k_stride + head_offset, key, k_stride, valid, WIDTH, PADDED)
                values = _load_rows(v + first * v_stride + head_offset, key, v_stride, valid, WIDTH, PADDED)
                event_times = _of_token(event_time, first, key, length)
                visible = _visible(
                    query[:, None], key[None, :], limit[:, None], near_begin[:, None], head_keys, segment, period, RULE
                )
                distance = tl.maximum(limit[:, None] - key[None, :], 0)
                bucket = tl.load(bucket_of_cell + _cell(query_times[:, None], event_times[None, :]))
                score = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
                score += tl.load(position + distance)
                score += tl.load(time + bucket)
                gate = tl.sigmoid(score)
                slope = gate * (1 + score * (1 - gate))
                d_score = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
                d_score = tl.where(visible, d_score * slope, 0.0)
                d_queries = tl.dot(d_score.to(keys.dtype), keys, d_queries, input_precision=PRECISION)

                # A tile has few time buckets: one or two, once it is far from the diagonal.
                first_bucket = tl.min(tl.where(visible, bucket, BUCKETS))
                for bucket_index in range(first_bucket, tl.max(tl.where(visible, bucket, -1)) + 1):
                    total = tl.sum(tl.where(bucket == bucket_index, d_score, 0.0))
                    by_bucket += tl.where(bucket_lane == bucket_index, total, 0.0)

                # Pairs of equal distance lie on a diagonal: rows are shifted so that they share a column, one band of
                # BLOCK distances after the other: wider bands need more registers. The pair of a candidate with itself
                # has distance 0, and lies on none of these diagonals.
                own_pair = (query[:, None] == key[None, :]) & (key[None, :] > limit[:, None])
                own_total = tl.sum(tl.where(own_pair, d_score, 0.0))
                farthest = limit - begin
                first_distance = tl.maximum(tl.min(farthest) - (TILE - 1), 0)
                last_distance = tl.maximum(tl.max(farthest), 0)
                for nearest in range(first_distance, last_distance + 1, BLOCK):
                    column = farthest[:, None] - (nearest + lane)[None, :]
                    shifted = tl.gather(d_score, tl.minimum(tl.maximum(column, 0), TILE - 1), 1)
                    along = tl.sum(tl.where((column >= 0) & (column < TILE), shifted, 0.0), 0)
                    along += tl.where(nearest + lane == 0, own_total, 0.0)
                    pointer = by_distance + nearest + lane
                    inside = nearest + lane < max_distance
                    tl.store(pointer, tl.load(pointer, mask=inside, other=0.0) + along * weight, mask=inside)
                    tl.debug_barrier()  # the next band or tile adds to some of these with other threads
            _store_block(
                d_q, first, parts, slot, head, query, query_valid, d_queries * weight, HEADS, WIDTH, PADDED, BLOCK
            )
    tl.store(d_time + program * BUCKETS + bucket_lane, by_bucket * weight)


@triton.jit(do_not_specialize=["turns"])
def backward_columns(
    q, k, v, d_out, d_k, d_v, parts, more_parts, spans, limits, begins, query_time, event_time, position, by_cell,
    items, q_stride, k_stride, v_stride, turns, weight,
    head_keys, segment, period,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values. Scores are transposed: keys are the rows."""
    head = tl.program_id(1)
    head_offset = head * WIDTH
    lane, tile_lane = tl.arange(0, BLOCK), tl.arange(0, TILE)
    for turn in tl.range(turns, disable_licm=True):
        number = tl.program_id(0) * turns + turn
        sample, block, slot, begin_tile, end_tile, near, jump = _item(items, number)
        if sample >= 0:
            first, length = _span(spans, sample)
            key = block * BLOCK + lane
            valid = key < length
            keys = _load_rows(k + first * k_stride + head_offset, key, k_stride, valid, WIDTH, PADDED)
            values = _load_rows(v + first * v_stride + head_offset, key, v_stride, valid, WIDTH, PADDED)
            event_times = _of_token(event_time, first, key, length)
            d_keys = tl.zeros([BLOCK, PADDED], tl.float32)
            d_values = tl.zeros([BLOCK, PADDED], tl.float32)
            for tile in range(begin_tile, end_tile):
                query = block * BLOCK + (tile + tl.where(tile < near, 0, jump)) * TILE + tile_lane
                query_valid = query < length
                limit = _of_token(limits, first, query, length).to(tl.int32)
                near_begin = _begin_of_token(begins, first, query, length, RULE)
                queries = _load_rows(q + first * q_stride + head_offset, query, q_stride, query_valid, WIDTH, PADDED)
                gradient = _load_rows(
                    d_out + first * (HEADS * WIDTH) + head_offset, query, HEADS * WIDTH, query_valid, WIDTH, PADDED
                )
                query_times = _of_token(query_time, first, query, length)
                visible = _visible(
                    query[None, :], key[:, None], limit[None, :], near_begin[None, :], head_keys, segment, period, RULE
                )
                distance = tl.maximum(limit[None, :] - key[:, None], 0)
                score = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
                score += tl.load(position + distance)
                score += tl.load(by_cell + _cell(query_times[None, :], event_times[:, None]))
                gate = tl.sigmoid(score)
                weights = tl.where(visible, score * gate, 0.0)
                d_values = tl.dot(weights.to(gradient.dtype), gradient, d_values, input_precision=PRECISION)
                slope = gate * (1 + score * (1 - gate))
                d_score = tl.dot(values, tl.trans(gradient), input_precision=PRECISION)
                d_score = tl.where(visible, d_score * slope, 0.0)
                d_keys = tl.dot(d_score.to(queries.dtype), queries, d_keys, input_precision=PRECISION)
            _store_block(d_k, first, parts, slot, head, key, valid, d_keys * weight, HEADS, WIDTH, PADDED, BLOCK)
            _store_block(d_v, first, more_parts, slot, head, key, valid, d_values * weight, HEADS, WIDTH, PADDED, BLOCK)


@triton.jit
def join(
    parts, out, spans, joins, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add the partial sums of split blocks, in order."""
    slot, head = tl.program_id(0), tl.program_id(1)
    sample, block, count = tl.load(joins + 3 * slot), tl.load(joins + 3 * slot + 1), tl.load(joins + 3 * slot + 2)
    if sample >= 0:
        total = tl.zeros([BLOCK, PADDED], tl.float32)
        for part in range(count):
            total += tl.load(_part_pointers(parts, slot + part, head, HEADS, PADDED, BLOCK))
        first, length = _span(spans, sample)
        row = block * BLOCK + tl.arange(0, BLOCK)
        _store_rows(
            out + first * (HEADS * WIDTH) + head * WIDTH, row, HEADS * WIDTH, row < length, total, WIDTH, PADDED
        )
