"""Attention over jagged sequences: the one place where an implementation is chosen.

Every token sees itself and what came before it; a candidate sees the history and itself, never another candidate.
`reference_*` say what is meant, sample by sample; the others do it bucket by bucket and block by block of queries, so
that their work follows the sum of squared lengths, causal half only.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor

from freescale.models.sequence import Bucket, Layout

_BLOCK = 256

Bias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(distance in positions, time of the query, time of the key) -> what is added to the scores."""


def visible(query: Tensor, key: Tensor, history: Tensor) -> Tensor:
    """Whether the query at one position sees the key at another, in a sample with so much history."""
    return (key <= query) & ((key < history) | (key == query))


def hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, time: Tensor, layout: Layout, *, bias: Bias, scale: float
) -> Tensor:
    """Pointwise attention: silu(q k + bias) / scale, summed over v. Tensors are [tokens, heads, width]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, added: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + added[:, None]
        return torch.einsum("bhqk,bkhd->bqhd", F.silu(scores) * seen[:, None] / scale, v)

    return _by_bucket(q, k, v, time, layout, bias, attend)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Scaled dot-product attention. Tensors are [tokens, heads, width]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, _added: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None]).transpose(1, 2)

    return _by_bucket(q, k, v, layout.position, layout, None, attend)


def _by_bucket(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    time: Tensor,
    layout: Layout,
    bias: Bias | None,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    outputs = []
    for bucket in layout.buckets:
        padded = [bucket.gather(x) for x in (q, k, v, time)]
        longest = bucket.index.shape[1]
        blocks = [
            _block(bucket, padded, begin, min(begin + _BLOCK, longest), bias, attend)
            for begin in range(0, longest, _BLOCK)
        ]
        outputs.append(torch.cat(blocks, dim=1)[bucket.valid])
    if not outputs:
        return torch.zeros_like(v) + 0 * (q.sum() + k.sum() + v.sum())  # stays in the graph: peers expect gradients
    return torch.cat(outputs)[layout.out_of_buckets]


def _block(
    bucket: Bucket,
    padded: list[Tensor],
    begin: int,
    end: int,
    bias: Bias | None,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Queries [begin, end) of a bucket against the keys that any of them may see."""
    q, k, v, time = padded
    query = torch.arange(begin, end, device=q.device)[None, :, None]
    key = torch.arange(end, device=q.device)[None, None, :]
    seen = visible(query, key, bucket.history[:, None, None])
    added = torch.zeros((), dtype=q.dtype, device=q.device).expand(seen.shape)
    if bias is not None:
        added = bias((query - key).expand(seen.shape), time[:, begin:end, None], time[:, None, :end])
    return attend(q[:, begin:end], k[:, :end], v[:, :end], seen, added)


def reference_hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, time: Tensor, layout: Layout, *, bias: Bias, scale: float
) -> Tensor:
    """What `hstu_attention` means."""

    def one(q: Tensor, k: Tensor, v: Tensor, time: Tensor, seen: Tensor) -> Tensor:
        place = torch.arange(len(q), device=q.device)
        added = bias(place[:, None] - place[None, :], time[:, None], time[None, :])
        weights = F.silu(torch.einsum("qhd,khd->hqk", q, k) + added) / scale
        return torch.einsum("hqk,khd->qhd", weights * seen, v)

    return _by_sample(one, q, k, v, time, layout)


def reference_softmax_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """What `softmax_attention` means."""

    def one(q: Tensor, k: Tensor, v: Tensor, _time: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)

    return _by_sample(one, q, k, v, layout.position, layout)


def _by_sample(one: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, time: Tensor, layout: Layout) -> Tensor:
    outputs = [v[:0]]
    for begin, end, history in zip(
        layout.offsets[:-1].tolist(), layout.offsets[1:].tolist(), layout.history.tolist(), strict=True
    ):
        place = torch.arange(end - begin, device=q.device)
        seen = visible(place[:, None], place[None, :], torch.tensor(history))
        outputs.append(one(q[begin:end], k[begin:end], v[begin:end], time[begin:end], seen))
    return torch.cat(outputs)
