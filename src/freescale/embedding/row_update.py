"""The row update of a GPU as one Triton kernel per width: sums the gradients of each row and applies the optimizer.

Gradients are sorted by row, and there is one program for each. The first program of a row adds all gradients of the row
in their order, so that there are no atomics, and the host does not need the number of distinct rows. The arithmetic is
that of `sharded.PlainShard`, without fused multiply-adds; the mean of squares has another order of additions.
"""

import struct
from typing import Any, NamedTuple

import triton
from torch import Tensor

from freescale.embedding import row_update_kernel

OPTIMIZERS = {
    "sgd": row_update_kernel.SGD,
    "rowwise_adagrad": row_update_kernel.ROWWISE_ADAGRAD,
    "adagrad": row_update_kernel.ADAGRAD,
}
_ELEMENTS_PER_WARP = 128


def launch_options(optimizer: str, *, dim: int, eps: float) -> dict[str, Any]:
    """Return the constexpr arguments of the kernel, and how it is compiled."""
    padded = triton.next_power_of_2(dim)
    warps = min(8, max(1, padded // _ELEMENTS_PER_WARP))
    constants = {"EPS": eps, "OPTIMIZER": OPTIMIZERS[optimizer], "DIM": dim, "PADDED": padded}
    return constants | {"num_warps": warps, "enable_fp_fusion": False}


class SortedRows(NamedTuple):
    """Requested rows, ascending. Equal ones keep their order."""

    rows: Tensor
    order: Tensor
    """The gradient of each."""


def update_rows(
    weights: Tensor, sums: Tensor | None, rows: Tensor, gradients: Tensor, *, lr: float, eps: float, optimizer: str
) -> None:
    """Update rows of a table, each once, from the sum of its gradients. `sums`: the optimizer state; None for SGD."""
    ordered = SortedRows(*rows.sort(stable=True))
    update_sorted_rows(weights, sums, ordered, gradients.contiguous(), lr=lr, eps=eps, optimizer=optimizer)


def update_sorted_rows(
    weights: Tensor,
    sums: Tensor | None,
    ordered: SortedRows,
    gradients: Tensor,
    *,
    lr: float,
    eps: float,
    optimizer: str,
) -> None:
    """Launch the kernel."""
    count, (rate_bits,) = len(gradients), struct.unpack("<q", struct.pack("<d", lr))
    if count:
        options: dict[str, Any] = launch_options(optimizer, dim=weights.shape[1], eps=eps)
        of_rows = ordered.rows, ordered.order, gradients
        state = weights if sums is None else sums
        row_update_kernel.update_rows[(count,)](weights, state, *of_rows, count, rate_bits, **options)
