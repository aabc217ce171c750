"""What attention means, sample by sample, each as a whole matrix: readable, slow, and what the others must equal."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor

from freescale.models.sequence import Bias, Layout, time_bucket, visible


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, bias: Bias, scale: float) -> Tensor:
    """Pointwise attention: silu(q k + bias) / scale, summed over v."""
    times = layout.times
    assert times is not None

    def one(tokens: slice, history: int, seen: Tensor) -> Tensor:
        place = torch.arange(len(seen), device=q.device)
        distance = (place.clamp(max=history)[:, None] - place[None, :]).clamp(min=0)
        added = bias.position[distance] + bias.time[time_bucket(times.asked[tokens, None], times.event[None, tokens])]
        weights = F.silu(torch.einsum("qhd,khd->hqk", q[tokens], k[tokens]) + added) / scale
        return torch.einsum("hqk,khd->qhd", weights * seen, v[tokens])

    return _by_sample(one, v, layout)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Scaled dot-product attention."""

    def one(tokens: slice, _history: int, seen: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q[tokens], k[tokens]) / q.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v[tokens])

    return _by_sample(one, v, layout)


def _by_sample(one: Callable[[slice, int, Tensor], Tensor], v: Tensor, layout: Layout) -> Tensor:
    outputs = [v[:0]]
    for begin, length, history in layout.spans.tolist():
        place = torch.arange(length, device=v.device)
        seen = visible(place[:, None], place[None, :], torch.tensor(history))
        outputs.append(one(slice(begin, begin + length), history, seen))
    return torch.cat(outputs)
