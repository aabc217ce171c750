"""The Triton kernel of the row update: see `row_update`."""

import triton
import triton.language as tl

# ruff: noqa: N803, N806, SIM108  compile-time constants are upper case in Triton; types differ between branches

SGD, ROWWISE_ADAGRAD, ADAGRAD = 0, 1, 2
_SGD, _ROWWISE = tl.constexpr(SGD), tl.constexpr(ROWWISE_ADAGRAD)


@triton.jit(do_not_specialize=["count", "rate_bits"])  # avoids a recompilation per value
def update_rows(
    weights, sums, ordered, order, gradients, count, rate_bits,
    EPS: tl.constexpr, OPTIMIZER: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Update the row of a place in `ordered`, if it is the first one of the row."""
    VALUES: tl.constexpr = weights.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ordered + place)
    if row != tl.load(ordered + place - 1, mask=place > 0, other=-1):
        column = tl.arange(0, PADDED)
        valid = column < DIM
        total = tl.zeros([PADDED], VALUES)
        has_more = place < count
        while has_more:
            source = tl.load(order + place)
            total += tl.load(gradients + source * DIM + column, mask=valid, other=0.0)
            place += 1
            has_more = tl.load(ordered + place, mask=place < count, other=-1) == row
        rate = rate_bits.to(tl.int64).to(tl.float64, bitcast=True).to(VALUES)
        if OPTIMIZER == _SGD:
            step = total * rate
        elif OPTIMIZER == _ROWWISE:
            squares = tl.load(sums + row) + _divide(tl.sum(total * total), tl.full([], DIM, VALUES))
            tl.store(sums + row, squares)
            step = total * (_divide(tl.full([], 1.0, VALUES), _sqrt(squares) + EPS) * rate)
        else:
            squares = tl.load(sums + row * DIM + column, mask=valid, other=0.0) + total * total
            tl.store(sums + row * DIM + column, squares, mask=valid)
            step = total * (_divide(tl.full([PADDED], 1.0, VALUES), _sqrt(squares) + EPS) * rate)
        pointer = weights + row * DIM + column
        tl.store(pointer, tl.load(pointer, mask=valid, other=0.0) - step, mask=valid)


@triton.jit
def _sqrt(x):
    if x.dtype == tl.float64:
        root = tl.sqrt(x)
    else:
        root = tl.sqrt_rn(x)
    return root


@triton.jit
def _divide(x, y):
    if x.dtype == tl.float64:
        quotient = x / y
    else:
        quotient = tl.div_rn(x, y)
    return quotient
