"""The sampled softmax over cosines: the loss of retrieval.

On a GPU `fused_launch` computes it with two kernels, however many tokens there are. Torch operators compute it chunk by
chunk on a CPU, where the scores of a chunk stay in the cache of a core.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale import deterministic
from freescale.kernel_selection import uses_kernels

_CHUNK = 128  # tokens per chunk: their scores stay in the cache of a core
_MAX_PRODUCT_RATIO = 64  # a product with all rows is cheaper than a gather up to this ratio of rows to samples


def sampled_softmax(output: Tensor, rows: Tensor, *, positive: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Return the sum of the cross entropies of the positive item among itself and the negatives, by cosine.

    `output` [tokens, dim] is compared with items of `rows` [distinct, dim], which `positive` [tokens] and `negatives`
    [tokens, count] index. A negative that equals the positive is masked.
    """
    if uses_kernels(rows, "sampled softmax"):
        return _KernelSampledSoftmax.apply(output, rows, positive, negatives, temperature)
    sampled = torch.cat([positive[:, None], negatives], dim=1)
    masked = F.pad(negatives == positive[:, None], (1, 0))
    with torch.autocast(output.device.type, enabled=False):  # cosines over a small temperature need full precision
        output, rows = F.normalize(output.to(rows.dtype), dim=-1), F.normalize(rows, dim=-1)
        return _SampledSoftmax.apply(output / temperature, rows, sampled, masked)


class _KernelSampledSoftmax(torch.autograd.Function):
    """The sum by one kernel for all tokens, and the gradients of the rows by one for all rows."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, output: Tensor, rows: Tensor, positive: Tensor, negatives: Tensor, temperature: float
    ) -> Tensor:
        from freescale.models import fused_launch

        losses = fused_launch.compute_token_losses(output, rows, positive, negatives, temperature)
        ctx.save_for_backward(output, rows, *losses)
        return losses.loss.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from freescale.models import fused_launch

        output, rows, *kept = ctx.saved_tensors
        losses = fused_launch.TokenLosses(*kept)
        sampled = fused_launch.SampledRows.from_index(losses.sampled, len(rows))
        d_rows = fused_launch.compute_row_gradients(output, rows, losses, sampled, gradients[0])
        return losses.d_output * gradients[0], d_rows, None, None, None


class _SampledSoftmax(torch.autograd.Function):
    """Sum of -log softmax of the first sampled row among all sampled rows, over all tokens.

    The forward pass computes the gradients too, chunk by chunk, so that no matrix of [tokens, rows] or
    [tokens, sampled, dim] exists.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        output, rows, sampled, masked = inputs
        total = output.new_zeros(())
        d_output, d_rows = torch.empty_like(output), torch.zeros_like(rows)
        chunk_loss = _loss_by_product if len(rows) <= _MAX_PRODUCT_RATIO * sampled.shape[1] else _loss_by_gather
        for begin in range(0, len(output), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            total += chunk_loss(output[part], rows, sampled[part], masked[part], d_output[part], d_rows)
        ctx.save_for_backward(d_output, d_rows)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_output, d_rows = ctx.saved_tensors
        return d_output * gradients[0], d_rows * gradients[0], None, None


def _loss_by_product(
    output: Tensor, rows: Tensor, sampled: Tensor, masked: Tensor, d_output: Tensor, d_rows: Tensor
) -> Tensor:
    """Compute the scores of all rows and select the sampled ones."""
    scores = output @ rows.T
    loss, gradient = _cross_entropy(scores.gather(1, sampled), masked)
    deterministic.scatter_add_(scores.zero_(), sampled, gradient)
    torch.mm(scores, rows, out=d_output)
    d_rows.addmm_(scores.T, output)
    return loss


def _loss_by_gather(
    output: Tensor, rows: Tensor, sampled: Tensor, masked: Tensor, d_output: Tensor, d_rows: Tensor
) -> Tensor:
    """Compute the scores of the sampled rows only."""
    gathered = rows[sampled]
    loss, gradient = _cross_entropy(torch.einsum("td,tkd->tk", output, gathered), masked)
    d_output.copy_(torch.einsum("tk,tkd->td", gradient, gathered))
    deterministic.index_add_(d_rows, sampled.flatten(), (gradient[:, :, None] * output[:, None]).flatten(0, 1))
    return loss


def _cross_entropy(scores: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of the first column against the others, and the gradient of the scores."""
    scores = scores.masked_fill_(masked, float("-inf"))
    log_total = scores.logsumexp(1)
    loss = (log_total - scores[:, 0]).sum()
    gradient = (scores - log_total[:, None]).exp_()
    gradient[:, 0] -= 1.0
    return loss, gradient
