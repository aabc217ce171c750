"""Losses as sums over what the batch holds; the caller divides by the global count, so that placement cannot matter."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor

_CHUNK = 128  # tokens whose scores are at hand at a time: they stay in a core's cache
_CHEAPER_TO_MULTIPLY = 64  # scores of all rows cost less than gathering some, up to so many times more of them


def sampled_softmax(output: Tensor, rows: Tensor, *, right: Tensor, wrong: Tensor, temperature: float) -> Tensor:
    """Sum of -log of the share that the right item gets among itself and the wrong ones, by cosine.

    `output` [tokens, dim] is compared with the items of `rows` [distinct, dim]: `right` [tokens] and `wrong`
    [tokens, count] say which. A wrong item that is the right one is left out.
    """
    chosen = torch.cat([right[:, None], wrong], dim=1)
    hidden = F.pad(wrong == right[:, None], (1, 0))
    with torch.autocast(output.device.type, enabled=False):  # cosines over a small temperature need their digits
        output, rows = F.normalize(output.to(rows.dtype), dim=-1), F.normalize(rows, dim=-1)
        return _ChosenSoftmax.apply(output / temperature, rows, chosen, hidden)


class _ChosenSoftmax(torch.autograd.Function):
    """Sum of -log softmax of the first chosen row among all chosen ones, for every token.

    Gradients are found in the forward pass, chunk by chunk, so that no matrix of [tokens, rows] or
    [tokens, chosen, dim] ever exists.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        output, rows, chosen, hidden = inputs
        total = output.new_zeros(())
        of_output, of_rows = torch.empty_like(output), torch.zeros_like(rows)
        multiply = len(rows) <= _CHEAPER_TO_MULTIPLY * chosen.shape[1]
        for begin in range(0, len(output), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            scores = _by_product if multiply else _by_gather
            total += scores(output[part], rows, chosen[part], hidden[part], of_output[part], of_rows)
        ctx.save_for_backward(of_output, of_rows)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_output, of_rows = ctx.saved_tensors
        return of_output * gradients[0], of_rows * gradients[0], None, None


def _by_product(o: Tensor, rows: Tensor, chosen: Tensor, hidden: Tensor, of_output: Tensor, of_rows: Tensor) -> Tensor:
    """Scores of all rows, of which the chosen ones are taken."""
    every = o @ rows.T
    loss, gradient = _softmax(every.gather(1, chosen), hidden)
    every.zero_().scatter_add_(1, chosen, gradient)
    torch.mm(every, rows, out=of_output)
    of_rows.addmm_(every.T, o)
    return loss


def _by_gather(o: Tensor, rows: Tensor, chosen: Tensor, hidden: Tensor, of_output: Tensor, of_rows: Tensor) -> Tensor:
    """Scores of the chosen rows alone."""
    taken = rows[chosen]
    loss, gradient = _softmax(torch.einsum("td,tkd->tk", o, taken), hidden)
    of_output.copy_(torch.einsum("tk,tkd->td", gradient, taken))
    of_rows.index_add_(0, chosen.flatten(), (gradient[:, :, None] * o[:, None]).flatten(0, 1))
    return loss


def _softmax(scores: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of the first column against the others, and the gradient of the scores."""
    scores = scores.masked_fill_(hidden, float("-inf"))
    whole = scores.logsumexp(1)
    loss = (whole - scores[:, 0]).sum()
    gradient = (scores - whole[:, None]).exp_()
    gradient[:, 0] -= 1.0
    return loss, gradient


def binary_tasks(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of binary cross entropies of several tasks [candidates, tasks]."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
