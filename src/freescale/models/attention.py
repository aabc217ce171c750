"""Attention over jagged sequences: the one place where an implementation is chosen.

Every token sees itself and what came before it; a candidate sees the history and itself, never another candidate.
`reference_*` say what is meant, sample by sample; the others do it bucket by bucket and block by block of queries, so
that their work follows the sum of squared lengths, causal half only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor

from freescale.models.sequence import Block, Layout, time_bucket, visible


@dataclass(frozen=True)
class Bias:
    """Learned amounts that are added to a score for how far two events are apart."""

    position: Tensor
    """By distance in positions, up to the longest."""
    time: Tensor
    """By bucket of the logarithm of seconds: [TIME_BUCKETS]."""


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, bias: Bias, scale: float) -> Tensor:
    """Pointwise attention: silu(q k + bias) / scale, summed over v. Tensors are [tokens, heads, width]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Tensor:
        added = _picked(bias.position, block.distance) + _picked(bias.time, block.apart)
        weights = F.silu(torch.einsum("bqhd,bkhd->bhqk", q, k) + added[:, None])
        return torch.einsum("bhqk,bkhd->bqhd", weights * (block.seen.to(v.dtype) / scale)[:, None], v)

    return _by_block(q, k, v, layout, attend)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Scaled dot-product attention. Tensors are [tokens, heads, width]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=block.seen[:, None]).transpose(1, 2)

    return _by_block(q, k, v, layout, attend)


def _by_block(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, attend: Callable[[Tensor, Tensor, Tensor, Block], Tensor]
) -> Tensor:
    outputs = []
    for of_bucket in layout.blocks:
        bucket = of_bucket[0].bucket
        padded_q, padded_k, padded_v = (bucket.gather(x) for x in (q, k, v))
        done = [attend(padded_q[:, b.begin : b.end], padded_k[:, : b.end], padded_v[:, : b.end], b) for b in of_bucket]
        outputs.append(torch.cat(done, dim=1)[bucket.valid])
    if not outputs:
        return torch.zeros_like(v) + 0 * (q.sum() + k.sum() + v.sum())  # stays in the graph: peers expect gradients
    return torch.cat(outputs).index_select(0, layout.out_of_buckets)


def _picked(amounts: Tensor, index: Tensor) -> Tensor:
    """amounts[index], by the operator whose forward and backward are several times as fast on a CPU."""
    return amounts.index_select(0, index.flatten()).view(index.shape)


def reference_hstu_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, bias: Bias, scale: float) -> Tensor:
    """What `hstu_attention` means."""
    times = layout.times
    assert times is not None

    def one(tokens: slice, history: int, seen: Tensor) -> Tensor:
        place = torch.arange(len(seen), device=q.device)
        distance = (place.clamp(max=history)[:, None] - place[None, :]).clamp(min=0)
        added = bias.position[distance] + bias.time[time_bucket(times.asked[tokens, None], times.event[None, tokens])]
        weights = F.silu(torch.einsum("qhd,khd->hqk", q[tokens], k[tokens]) + added) / scale
        return torch.einsum("hqk,khd->qhd", weights * seen, v[tokens])

    return _by_sample(one, v, layout)


def reference_softmax_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """What `softmax_attention` means."""

    def one(tokens: slice, _history: int, seen: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q[tokens], k[tokens]) / q.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v[tokens])

    return _by_sample(one, v, layout)


def _by_sample(one: Callable[[slice, int, Tensor], Tensor], v: Tensor, layout: Layout) -> Tensor:
    outputs = [v[:0]]
    for begin, end, history in zip(
        layout.offsets[:-1].tolist(), layout.offsets[1:].tolist(), layout.history.tolist(), strict=True
    ):
        place = torch.arange(end - begin, device=v.device)
        seen = visible(place[:, None], place[None, :], torch.tensor(history))
        outputs.append(one(slice(begin, end), history, seen))
    return torch.cat(outputs)
