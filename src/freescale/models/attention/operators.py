"""Attention as torch operators: HSTU's pointwise attention and SASRec's softmax attention.

`torch.compile` sees one node with known shapes for each. This is the only place that selects an implementation: for
HSTU Triton kernels or `blocks`; for softmax torch's dense attention on padded batches; for serving the plain operators
of the layout. Flash attention for jagged batches is not used: its backward adds gradients by atomics, so two runs would
differ.
"""

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale.kernel_selection import has_triton
from freescale.log import info_once, warning_once
from freescale.models.attention import blocks
from freescale.models.attention.reference import AttentionGradients, AttentionInputs
from freescale.models.jagged import BiasTables, JaggedLayout, PaddedBatch, is_visible, padded_batches
from freescale.models.plain_layout import PlainLayout

_NAME = "freescale::hstu_attention"


def hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: JaggedLayout | PlainLayout, *, bias: BiasTables, scale: float
) -> Tensor:
    """Pointwise attention: silu(q k + bias) / scale, summed over v. Tensors are [tokens, heads, width]."""
    if not isinstance(layout, JaggedLayout):
        return layout.hstu(q, k, v, bias, scale)
    assert layout.times is not None
    times = layout.times
    return hstu_operator(
        q, k, v, layout.spans, layout.limits, times.query, times.event, bias.position, bias.time, scale
    )


def select_implementation(q: Tensor) -> ModuleType:
    """Return Triton kernels for GPUs, else blocks of padded matrices. Logs the choice."""
    if q.device.type == "cpu":
        return blocks
    if q.dtype != torch.float64 and has_triton():
        from freescale.models.attention import triton_launch

        info_once("attention: Triton kernels")
        return triton_launch
    reason = "kernels have no fp64" if q.dtype == torch.float64 else f"Triton for {q.device.type} is not installed"
    warning_once(f"attention: blocks of padded matrices, because {reason}; kernels would be several times as fast")
    return blocks


@torch.library.custom_op(_NAME, mutates_args=())
def hstu_operator(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, limits: Tensor, query_time: Tensor, event_time: Tensor,
    position: Tensor, time: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Return the output of HSTU attention."""
    inputs = AttentionInputs(q, k, v, spans, limits, query_time, event_time, position, time, scale)
    return select_implementation(q).forward(inputs)


@torch.library.custom_op(f"{_NAME}_backward", mutates_args=())
def hstu_operator_backward(
    d_out: Tensor,
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, limits: Tensor, query_time: Tensor, event_time: Tensor,
    position: Tensor, time: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, position and time."""
    inputs = AttentionInputs(q, k, v, spans, limits, query_time, event_time, position, time, scale)
    return tuple(select_implementation(q).backward(inputs, d_out))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  torch passes it
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    grads = AttentionGradients(*hstu_operator_backward(d_out, *ctx.saved_tensors, ctx.scale))
    return grads.q, grads.k, grads.v, None, None, None, None, grads.position, grads.time, None


def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


hstu_operator.register_autograd(_backward, setup_context=_save)
hstu_operator.register_fake(lambda *args: _fake(args[2]))
hstu_operator_backward.register_fake(lambda *args: tuple(map(_fake, (*args[1:4], *args[8:10]))))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, layout: JaggedLayout | PlainLayout) -> Tensor:
    """Scaled dot-product attention. Tensors are [tokens, heads, width]."""
    if not isinstance(layout, JaggedLayout):
        return layout.softmax(q, k, v)
    return softmax_operator(q, k, v, layout.spans, layout.limits)


@torch.library.custom_op("freescale::softmax_attention", mutates_args=())
def softmax_operator(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, limits: Tensor) -> Tensor:
    """Return the output of softmax attention, by blocks of queries of padded batches."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for batch in padded_batches(q, k, v, spans, limits):
        operands = ((_block_operands(batch, rows), _mask(batch, rows)) for rows in batch.query_blocks())
        parts = [F.scaled_dot_product_attention(*qkv, attn_mask=mask) for qkv, mask in operands]
        batch.unpad(torch.cat(parts, dim=2).flatten(0, 1), out)
    return out


@torch.library.custom_op("freescale::softmax_attention_backward", mutates_args=())
def softmax_operator_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. Scores are recomputed."""
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for batch in padded_batches(q, k, v, spans, limits):
        gradient = batch.pad(d_out)
        padded_dq, padded_dk, padded_dv = (
            torch.empty_like(batch.q),
            torch.zeros_like(batch.k),
            torch.zeros_like(batch.v),
        )
        for rows in batch.query_blocks():
            keys = slice(0, rows.stop)
            queries, d_mixed = batch.q[:, rows] / q.shape[-1] ** 0.5, gradient[:, rows]
            score = (queries @ batch.k[:, keys].mT).unflatten(0, (batch.samples, -1))
            weights = score.masked_fill_(~_mask(batch, rows), float("-inf")).flatten(0, 1).softmax(-1)
            padded_dv[:, keys].baddbmm_(weights.mT, d_mixed)
            d_weights = d_mixed @ batch.v[:, keys].mT
            d_score = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            padded_dk[:, keys].baddbmm_(d_score.mT, queries)
            torch.bmm(d_score, batch.k[:, keys], out=padded_dq[:, rows])
        for padded, packed in ((padded_dq.div_(q.shape[-1] ** 0.5), d_q), (padded_dk, d_k), (padded_dv, d_v)):
            batch.unpad(padded, packed)
    return d_q, d_k, d_v


def _block_operands(batch: PaddedBatch, rows: slice) -> list[Tensor]:
    """Return the queries of a block and the keys and values up to its end: [samples, heads, places, width]."""
    parts = (batch.q[:, rows], batch.k[:, : rows.stop], batch.v[:, : rows.stop])
    return [part.unflatten(0, (batch.samples, -1)) for part in parts]


def _mask(batch: PaddedBatch, rows: slice) -> Tensor:
    """Return the visible pairs of a block: [samples or 1, 1, queries, keys]."""
    query, key = batch.positions(rows)
    limits = query[None] if batch.limits is None else batch.limits[:, rows, None]
    return is_visible(query, key, limits)[:, None]


softmax_operator.register_autograd(
    lambda ctx, d_out: (*softmax_operator_backward(d_out, *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005  torch passes it
)
softmax_operator.register_fake(lambda *args: _fake(args[2]))
softmax_operator_backward.register_fake(lambda *args: tuple(map(_fake, args[1:4])))
