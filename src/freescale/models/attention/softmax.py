"""Softmax attention (SASRec's) over jagged sequences, by what torch has for variable lengths.

On a GPU its kernel for packed sequences; elsewhere, and with candidates, which that kernel does not know, torch's dense
attention bucket by bucket and block by block of queries.
"""

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor

from freescale.models.attention.matrix import Matrix, matrices
from freescale.models.attention.operands import like
from freescale.models.sequence import Layout, visible


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """Scaled dot-product attention. Tensors are [tokens, heads, width]."""
    if layout.candidates is None and _has_packed_kernel(q):
        from torch.nn.attention.varlen import varlen_attn

        ends, longest = layout.offsets.int(), int(layout.lengths.max())
        return varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))  # type: ignore[return-value]
    return by_blocks(q, k, v, layout.spans)


def _has_packed_kernel(q: Tensor) -> bool:
    """What flash attention asks for."""
    halves, width = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    fits = len(q) > 0 and width % 8 == 0 and width <= 256
    return q.is_cuda and halves and fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


@torch.library.custom_op("freescale::softmax_attention", mutates_args=())
def by_blocks(q: Tensor, k: Tensor, v: Tensor, spans: Tensor) -> Tensor:
    """Mix the values that every query sees."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for matrix in matrices(q, k, v, spans):
        blocks = ((_attending(matrix, rows), _seen(matrix, rows)) for rows in matrix.rows())
        parts = [F.scaled_dot_product_attention(*qkv, attn_mask=seen) for qkv, seen in blocks]
        matrix.put(torch.cat(parts, dim=2).flatten(0, 1), out)
    return out


@torch.library.custom_op("freescale::softmax_attention_backward", mutates_args=())
def by_blocks_backward(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    d_q, d_k, d_v = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (q, k, v))
    for matrix in matrices(q, k, v, spans):
        gradient = matrix.get(d_out)
        of_q, of_k, of_v = torch.empty_like(matrix.q), torch.zeros_like(matrix.k), torch.zeros_like(matrix.v)
        for rows in matrix.rows():
            seen = slice(0, rows.stop)
            queries, d_mixed = matrix.q[:, rows] / q.shape[-1] ** 0.5, gradient[:, rows]
            score = (queries @ matrix.k[:, seen].mT).unflatten(0, (matrix.samples, -1))
            weights = score.masked_fill_(~_seen(matrix, rows), float("-inf")).flatten(0, 1).softmax(-1)
            of_v[:, seen].baddbmm_(weights.mT, d_mixed)
            d_weights = d_mixed @ matrix.v[:, seen].mT
            d_score = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            of_k[:, seen].baddbmm_(d_score.mT, queries)
            torch.bmm(d_score, matrix.k[:, seen], out=of_q[:, rows])
        for found, into in ((of_q.div_(q.shape[-1] ** 0.5), d_q), (of_k, d_k), (of_v, d_v)):
            matrix.put(found, into)
    return d_q, d_k, d_v


def _attending(matrix: Matrix, rows: slice) -> list[Tensor]:
    """Queries of a block and the keys and values that they may see: [samples, heads, places, width]."""
    parts = (matrix.q[:, rows], matrix.k[:, : rows.stop], matrix.v[:, : rows.stop])
    return [part.unflatten(0, (matrix.samples, -1)) for part in parts]


def _seen(matrix: Matrix, rows: slice) -> Tensor:
    """Which pairs count: [samples or 1, 1, queries, keys]."""
    (query, key), history = matrix.places(rows), matrix.bucket.history
    return (key <= query)[None, None] if history is None else visible(query, key, history[:, None, None, None])


by_blocks.register_autograd(
    lambda ctx, d_out: (*by_blocks_backward(d_out, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005  torch gives it
)
by_blocks.register_fake(lambda *args: like(args[2]))
by_blocks_backward.register_fake(lambda *args: tuple(map(like, args[1:4])))
