"""Launches the Triton kernels of keyed randomness and of the sampled softmax.

Dropout is one kernel that hashes, masks and scales. It computes the gradient, too: nothing is kept for backward. The
mask and the values are bitwise those of `keyed`.

The sampled softmax is two kernels. One program per token reads its rows once, as flash attention reads its keys: it
keeps the largest score so far, the sum of exponentials and the weighted sum of rows, which is the gradient of the
output. One program per row then adds the gradients of all tokens that sampled it, in the order of a stable sort. Rows
are normalized where they are read, so there is no matrix of [tokens, sampled, dim] and no copy of the rows. Sums are
fp32, or fp64 for rows in fp64.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from freescale.models import fused_kernels

DROPOUT_WORDS, DROPOUT_WARPS = 256, 4
"""Hashes of a program, each for four elements, and its warps."""
HASH_BLOCK = 1024
_PROGRAMS = {"token_losses": (4096, 64, 4), "row_gradients": (2048, 32, 2)}
"""Elements of a tile, its most rows, and warps. Few tokens sample a row, so its program is small."""


def splitmix64(z: Tensor) -> Tensor:
    """Hash integers, element by element."""
    z, out = z.contiguous(), z.new_empty(z.shape)
    if z.numel():
        options: dict[str, Any] = {"BLOCK": HASH_BLOCK}
        fused_kernels.splitmix64[(triton.cdiv(z.numel(), HASH_BLOCK),)](z, out, z.numel(), **options)
    return out


def dropout(x: Tensor, token_keys: Tensor, *, salt: int, threshold: int) -> Tensor:
    """Drop elements of [tokens, width] whose 16 bits of a hash are below `threshold`, and scale the others."""
    x, out = x.contiguous(), x.new_empty(x.shape)
    words = x.shape[0] * -(-x.shape[1] // 4)
    if words:
        options: dict[str, Any] = {"WIDTH": x.shape[1], "WORDS": DROPOUT_WORDS, "num_warps": DROPOUT_WARPS}
        grid = (triton.cdiv(words, DROPOUT_WORDS),)
        fused_kernels.dropout[grid](x, out, token_keys.contiguous(), words, salt, threshold, **options)
    return out


class TokenLosses(NamedTuple):
    """The results of all tokens, and what the gradients of the rows need of them."""

    loss: Tensor
    """[tokens]"""
    d_output: Tensor
    """Gradient of the output: [tokens, dim]."""
    sampled: Tensor
    """Indices of the sampled rows, the positive first: [tokens, 1 + negatives], as int32 to be sorted faster."""
    scores: Tensor
    """Of the sampled rows; -inf where a negative equals the positive."""
    log_total: Tensor
    """Logarithm of the sum of exponentials: [tokens]."""
    error: Tensor
    """1 - probability of the positive: [tokens]."""
    weight: Tensor
    """What normalizes and scales an output: 1 / (norm * temperature): [tokens]."""


class SampledRows(NamedTuple):
    """The tokens that sampled each row."""

    order: Tensor
    """Places of a flat [tokens, 1 + negatives], sorted by row."""
    offsets: Tensor
    """First entry of each row in `order`, and the number of all entries."""

    @staticmethod
    def from_index(sampled: Tensor, rows: int) -> "SampledRows":
        """Sort the indices of rows [tokens, 1 + negatives]."""
        by_row, order = sampled.flatten().sort(stable=True)
        ends = torch.arange(rows + 1, device=sampled.device, dtype=sampled.dtype)
        return SampledRows(order, torch.searchsorted(by_row, ends))


def launch_options(kernel: str, *, dim: int, negatives: int) -> dict[str, int]:
    """Return the constexpr arguments of a kernel that depend on shapes, and its warps."""
    elements, max_block, warps = _PROGRAMS[kernel]
    padded = triton.next_power_of_2(dim)
    block = max(1, min(max_block, elements // padded))
    return {"DIM": dim, "PADDED": padded, "NEGATIVES": negatives, "BLOCK": block, "num_warps": warps}


def compute_token_losses(
    output: Tensor, rows: Tensor, positive: Tensor, negatives: Tensor, temperature: float
) -> TokenLosses:
    """Return the loss of every token, the gradient of its output, and the scores."""
    tokens, count = negatives.shape
    output, rows, positive, negatives = (x.contiguous() for x in (output, rows, positive, negatives))
    sums = torch.float64 if rows.dtype == torch.float64 else torch.float32

    def empty(*shape: int, dtype: torch.dtype = sums) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=rows.device)

    sampled, scores = empty(tokens, 1 + count, dtype=torch.int32), empty(tokens, 1 + count)
    losses = TokenLosses(empty(tokens), torch.empty_like(output), sampled, scores, *(empty(tokens) for _ in range(3)))
    if tokens:
        options: dict[str, Any] = launch_options("token_losses", dim=output.shape[1], negatives=count)
        options["INVERSE_TEMPERATURE"] = 1.0 / temperature
        fused_kernels.token_losses[(tokens,)](output, rows, positive, negatives, *losses, **options)
    return losses


def compute_row_gradients(
    output: Tensor, rows: Tensor, losses: TokenLosses, sampled: SampledRows, gradient: Tensor
) -> Tensor:
    """Return the gradients of all rows. `gradient`: that of the sum of the losses, a scalar on the device."""
    output, rows, d_rows = output.contiguous(), rows.contiguous(), rows.new_empty(rows.shape)
    if len(rows):
        negatives = losses.scores.shape[1] - 1
        options: dict[str, Any] = launch_options("row_gradients", dim=output.shape[1], negatives=negatives)
        of_tokens = losses.scores, losses.log_total, losses.error, losses.weight
        fused_kernels.row_gradients[(len(rows),)](output, rows, *of_tokens, *sampled, gradient, d_rows, **options)
    return d_rows
