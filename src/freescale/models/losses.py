"""Losses as sums over what the batch holds; the caller divides by the global count, so that placement cannot matter."""

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor


def sampled_softmax(
    output: Tensor, positive: Tensor, negative: Tensor, *, same: Tensor, weight: Tensor, temperature: float
) -> Tensor:
    """Sum of -log of the share that the right item gets among itself and its negatives.

    `output` [tokens, dim] is compared with `positive` [tokens, dim] and `negative` [tokens, count, dim] by cosine.
    `same` says which negatives are the positive itself; `weight` is 0 for tokens that have no next item.
    """
    output, positive, negative = (F.normalize(x, dim=-1) for x in (output, positive, negative))
    right = (output * positive).sum(-1) / temperature
    wrong = torch.einsum("td,tkd->tk", output, negative) / temperature
    every = torch.cat([right[:, None], wrong.masked_fill(same, float("-inf"))], dim=1)
    return ((every.logsumexp(1) - right) * weight).sum()


def binary_tasks(logits: Tensor, labels: Tensor, *, weight: Tensor) -> Tensor:
    """Sum of binary cross entropies of several tasks [candidates, tasks]."""
    return (F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * weight[:, None]).sum()
