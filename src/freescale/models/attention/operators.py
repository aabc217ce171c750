"""Attention as torch operators: HSTU's pointwise attention and SASRec's softmax attention.

`torch.compile` sees one node with known shapes for each. This is the only place that selects an implementation: for
HSTU Triton kernels or `blocks`; for softmax torch's dense attention on padded batches; for serving the plain operators
of the layout. Flash attention for jagged batches is not used: its backward adds gradients by atomics, so two runs would
differ.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale.kernel_selection import has_triton
from freescale.log import info_once, warning_once
from freescale.models.attention import blocks
from freescale.models.attention.reference import AttentionGradients, AttentionInputs
from freescale.models.jagged import BiasTables, JaggedLayout
from freescale.models.padded_batches import PaddedBatch, QueryBlock, SplitKeys, padded_batches
from freescale.models.plain_layout import PlainLayout
from freescale.visibility import FarKeys

_NAME = "freescale::hstu_attention"


def hstu_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: JaggedLayout | PlainLayout, *, bias: BiasTables, scale: float
) -> Tensor:
    """Pointwise attention: silu(q k + bias) / scale, summed over v. Tensors are [tokens, heads, width]."""
    if not isinstance(layout, JaggedLayout):
        return layout.hstu(q, k, v, bias, scale)
    assert layout.times is not None
    times = layout.times
    arguments = layout.spans, layout.limits, times.query, times.event, bias.position, bias.time, scale
    return hstu_operator(q, k, v, *arguments, layout.begins, _numbers(layout.far))


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
    position: Tensor, time: Tensor, scale: float, begins: Tensor | None = None, far: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return the output of HSTU attention."""
    inputs = AttentionInputs(
        q, k, v, spans, limits, query_time, event_time, position, time, scale, begins, _far_keys(far)
    )
    return select_implementation(q).forward(inputs)


@torch.library.custom_op(f"{_NAME}_backward", mutates_args=())
def hstu_operator_backward(
    d_out: Tensor,
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, limits: Tensor, query_time: Tensor, event_time: Tensor,
    position: Tensor, time: Tensor, scale: float, begins: Tensor | None = None, far: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, position and time."""
    inputs = AttentionInputs(
        q, k, v, spans, limits, query_time, event_time, position, time, scale, begins, _far_keys(far)
    )
    return tuple(select_implementation(q).backward(inputs, d_out))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  torch passes it
    *tensors, ctx.scale, begins, ctx.far = inputs
    ctx.save_for_backward(*tensors, begins)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, begins = ctx.saved_tensors
    grads = AttentionGradients(*hstu_operator_backward(d_out, *tensors, ctx.scale, begins, ctx.far))
    return grads.q, grads.k, grads.v, None, None, None, None, grads.position, grads.time, None, None, None


def _numbers(far: FarKeys | None) -> list[int] | None:
    """Return far keys as operators take them."""
    return None if far is None else list(far)


def _far_keys(numbers: Sequence[int] | None) -> FarKeys | None:
    return None if numbers is None else FarKeys(*numbers)


def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


hstu_operator.register_autograd(_backward, setup_context=_save)
hstu_operator.register_fake(lambda *args: _fake(args[2]))
hstu_operator_backward.register_fake(lambda *args: tuple(map(_fake, (*args[1:4], *args[8:10]))))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, layout: JaggedLayout | PlainLayout) -> Tensor:
    """Scaled dot-product attention. Tensors are [tokens, heads, width]."""
    if not isinstance(layout, JaggedLayout):
        return layout.softmax(q, k, v)
    return softmax_operator(q, k, v, layout.spans, layout.limits, layout.begins, _numbers(layout.far))


@torch.library.custom_op("freescale::softmax_attention", mutates_args=())
def softmax_operator(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, limits: Tensor,
    begins: Tensor | None = None, far: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return the output of softmax attention, by blocks of queries of padded batches."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for batch in padded_batches(q, k, v, spans, limits, begins=begins, far=_far_keys(far)):
        keys, values = batch.plan.split(batch.k), batch.plan.split(batch.v)
        operands = (
            (_block_operands(batch, block, keys, values), batch.visible(block)[:, None]) for block in batch.plan.blocks
        )
        parts = [F.scaled_dot_product_attention(*qkv, attn_mask=mask) for qkv, mask in operands]
        batch.unpad(torch.cat(parts, dim=2).flatten(0, 1), out)
    return out


@torch.library.custom_op("freescale::softmax_attention_backward", mutates_args=())
def softmax_operator_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, limits: Tensor,
    begins: Tensor | None = None, far: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v. Scores are recomputed."""
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for batch in padded_batches(q, k, v, spans, limits, begins=begins, far=_far_keys(far)):
        plan, gradient = batch.plan, batch.pad(d_out)
        k_parts, v_parts = plan.split(batch.k), plan.split(batch.v)
        padded_dq = torch.empty_like(batch.q)
        padded_dk, padded_dv = (SplitKeys(torch.zeros_like(x.all), torch.zeros_like(x.far)) for x in (k_parts, v_parts))
        for block in plan.blocks:
            rows, keys = block.rows, k_parts.select(block)
            queries, d_mixed = batch.q[:, rows] / q.shape[-1] ** 0.5, gradient[:, rows]
            score = (queries @ keys.mT).unflatten(0, (batch.samples, -1))
            visible = batch.visible(block)[:, None]
            weights = score.masked_fill_(~visible, float("-inf")).flatten(0, 1).softmax(-1)
            padded_dv.add_products_(weights, d_mixed, block)
            d_weights = d_mixed @ v_parts.select(block).mT
            d_score = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            padded_dk.add_products_(d_score, queries, block)
            torch.bmm(d_score, keys, out=padded_dq[:, rows])
        gradients = padded_dq.div_(q.shape[-1] ** 0.5), padded_dk.join_(plan), padded_dv.join_(plan)
        for padded, packed in zip(gradients, (d_q, d_k, d_v), strict=True):
            batch.unpad(padded, packed)
    return d_q, d_k, d_v


def _block_operands(batch: PaddedBatch, block: QueryBlock, keys: SplitKeys, values: SplitKeys) -> list[Tensor]:
    """Return the queries of a block, its keys and their values: [samples, heads, places, width]."""
    selected = (x.select(block) for x in (keys, values))
    return [part.unflatten(0, (batch.samples, -1)) for part in (batch.q[:, block.rows], *selected)]


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  torch passes it
    *tensors, ctx.far = inputs
    ctx.save_for_backward(*tensors)


softmax_operator.register_autograd(
    lambda ctx, d_out: (*softmax_operator_backward(d_out, *ctx.saved_tensors, ctx.far), None, None, None, None),
    setup_context=_save_softmax,
)
softmax_operator.register_fake(lambda *args: _fake(args[2]))
softmax_operator_backward.register_fake(lambda *args: tuple(map(_fake, args[1:4])))
