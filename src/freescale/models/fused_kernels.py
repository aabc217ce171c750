"""Triton kernels of keyed randomness and of the sampled softmax: no atomics, so runs repeat.

The kernels are compiled for a GPU, or run by Triton's interpreter on a CPU (TRITON_INTERPRET=1). See `fused_launch`.
"""

import triton
import triton.language as tl

from freescale import hashing_kernels

# ruff: noqa: N803, N806  compile-time constants are upper case in Triton

EPS = tl.constexpr(1e-12)  # that of torch's normalize


@triton.jit(do_not_specialize=["count"])  # avoids a recompilation per value
def splitmix64(z, out, count, BLOCK: tl.constexpr):
    """Hash integers."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    hashed = hashing_kernels.splitmix64(tl.load(z + place, mask=place < count, other=0).to(tl.uint64))
    tl.store(out + place, hashed.to(tl.int64), mask=place < count)


@triton.jit(do_not_specialize=["words", "salt", "threshold"])  # avoids a recompilation per value
def dropout(x, out, token_keys, words, salt, threshold, WIDTH: tl.constexpr, WORDS: tl.constexpr):
    """Compute `WORDS` hashes and the four elements of each. The last hash of a token may have fewer elements."""
    WORDS_PER_TOKEN: tl.constexpr = (WIDTH + 3) // 4
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    token, place = word // WORDS_PER_TOKEN, word % WORDS_PER_TOKEN
    token_key = tl.load(token_keys + token, mask=word < words, other=0).to(tl.uint64)
    lane = hashing_kernels.splitmix64(place.to(tl.uint64) + (salt.to(tl.uint64) << 32))
    bits = hashing_kernels.splitmix64(token_key ^ lane)
    part = tl.arange(0, 4)
    uniform = ((bits[:, None] >> (16 * part[None, :]).to(tl.uint64)) & 0xFFFF).to(tl.int32)
    # Equals token * WIDTH + 4 * place + part, written so that the compiler sees contiguous addresses.
    element = 4 * word[:, None] + part[None, :] - token[:, None] * (4 * WORDS_PER_TOKEN - WIDTH)
    valid = (word < words)[:, None] & (4 * place[:, None] + part[None, :] < WIDTH)
    values = tl.load(x + element, mask=valid, other=0.0)
    if values.dtype == tl.float64:
        kept = values * (uniform >= threshold).to(tl.float64)
        scaled = kept / ((0x10000 - threshold).to(tl.float64) / 0x10000)
    else:
        kept = values.to(tl.float32) * (uniform >= threshold).to(tl.float32)
        scaled = tl.div_rn(kept, (0x10000 - threshold).to(tl.float32) * (1.0 / 0x10000))
    tl.store(out + element, scaled.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _load_row(base, row, column, DIM: tl.constexpr, SUMS: tl.constexpr):
    return tl.load(base + row * DIM + column, mask=column < DIM, other=0.0).to(SUMS)


@triton.jit
def _project(gradient, unit, norm):
    """Return the gradient of a vector from that of its unit vector."""
    along = tl.sum(gradient * unit)
    return (gradient - tl.where(norm > EPS, along, 0.0) * unit) / tl.maximum(norm, EPS)


@triton.jit
def token_losses(
    output, rows, positive, negatives, loss, d_output, sampled, scores, log_total, error, weight,
    INVERSE_TEMPERATURE: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, NEGATIVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the loss of a token and the gradient of its output."""
    SUMS: tl.constexpr = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    token = tl.program_id(0).to(tl.int64)
    column, lane = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    query = _load_row(output, token, column, DIM, SUMS)
    query_norm = tl.sqrt(tl.sum(query * query))
    unit_query = query / tl.maximum(query_norm, EPS)
    right = tl.load(positive + token).to(tl.int64)
    right_row = _load_row(rows, right, column, DIM, SUMS)
    unit_right = right_row / tl.maximum(tl.sqrt(tl.sum(right_row * right_row)), EPS)
    right_score = tl.sum(unit_query * unit_right) * INVERSE_TEMPERATURE
    first = token * (1 + NEGATIVES)
    tl.store(scores + first, right_score)
    tl.store(sampled + first, right.to(tl.int32))
    largest = right_score
    total = tl.zeros([BLOCK], SUMS)  # exponentials of the negatives, by lane
    mixed = tl.zeros([PADDED], SUMS)
    for begin in range(0, NEGATIVES, BLOCK):
        place = begin + lane
        valid = place < NEGATIVES
        wrong = tl.load(negatives + token * NEGATIVES + place, mask=valid, other=0).to(tl.int64)
        pointer = rows + wrong[:, None] * DIM + column[None, :]
        read = tl.load(pointer, mask=valid[:, None] & (column[None, :] < DIM), other=0.0).to(SUMS)
        inverse_norm = 1.0 / tl.maximum(tl.sqrt(tl.sum(read * read, 1)), EPS)
        score = tl.sum(read * unit_query[None, :], 1) * inverse_norm * INVERSE_TEMPERATURE
        score = tl.where(valid & (wrong != right), score, float("-inf"))
        tl.store(scores + first + 1 + place, score, mask=valid)
        tl.store(sampled + first + 1 + place, wrong.to(tl.int32), mask=valid)
        larger = tl.maximum(largest, tl.max(score))
        shrink = tl.exp(largest - larger)
        exponential = tl.exp(score - larger)
        total = total * shrink + exponential
        mixed = mixed * shrink + tl.sum(read * (exponential * inverse_norm)[:, None], 0)
        largest = larger
    of_negatives = tl.sum(total)
    whole = of_negatives + tl.exp(right_score - largest)
    log_whole = largest + tl.log(whole)
    # The gradient of the score of the positive is -(1 - p). Summing the others leaves no digits to cancellation.
    missing = of_negatives / whole
    d_unit = (mixed / whole - missing * unit_right) * INVERSE_TEMPERATURE
    d_query = _project(d_unit, unit_query, query_norm)
    tl.store(d_output + token * DIM + column, d_query.to(d_output.dtype.element_ty), mask=column < DIM)
    tl.store(loss + token, largest - right_score + tl.log(whole))
    tl.store(log_total + token, log_whole)
    tl.store(error + token, missing)
    tl.store(weight + token, INVERSE_TEMPERATURE / tl.maximum(query_norm, EPS))


@triton.jit
def row_gradients(
    output, rows, scores, log_total, error, weight, order, offsets, gradient, d_rows,
    DIM: tl.constexpr, PADDED: tl.constexpr, NEGATIVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a row: a sum over the tokens that sampled it, in the order of their places."""
    SUMS: tl.constexpr = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    column, lane = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    mixed = tl.zeros([BLOCK, PADDED], SUMS)
    end = tl.load(offsets + row + 1)
    for begin in range(tl.load(offsets + row), end, BLOCK):
        valid = begin + lane < end
        place = tl.load(order + begin + lane, mask=valid, other=0)
        token = place // (1 + NEGATIVES)
        score = tl.load(scores + place, mask=valid, other=float("-inf"))
        probability = tl.exp(score - tl.load(log_total + token, mask=valid, other=0.0))
        is_positive = place % (1 + NEGATIVES) == 0
        d_score = tl.where(is_positive, -tl.load(error + token, mask=valid, other=0.0), probability)
        factor = tl.where(valid, d_score * tl.load(weight + token, mask=valid, other=0.0), 0.0)
        pointer = output + token[:, None] * DIM + column[None, :]
        queries = tl.load(pointer, mask=valid[:, None] & (column[None, :] < DIM), other=0.0).to(SUMS)
        mixed += queries * factor[:, None]
    own = _load_row(rows, row, column, DIM, SUMS)
    norm = tl.sqrt(tl.sum(own * own))
    d_row = _project(tl.sum(mixed, 0), own / tl.maximum(norm, EPS), norm) * tl.load(gradient).to(SUMS)
    tl.store(d_rows + row * DIM + column, d_row.to(d_rows.dtype.element_ty), mask=column < DIM)
