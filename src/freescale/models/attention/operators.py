"""HSTU attention as an operator of torch, and the one place where its implementation is chosen.

To a compiler it is one node with known shapes; autograd knows its backward, which is an operator too.
"""

import importlib.util
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from freescale.log import info_once, warning_once
from freescale.models.attention import blocks
from freescale.models.attention.operands import Gradients, Inputs, like
from freescale.models.sequence import Bias, Layout

_NAME = "freescale::hstu_attention"


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, bias: Bias, scale: float) -> Tensor:
    """Pointwise attention: silu(q k + bias) / scale, summed over v. Tensors are [tokens, heads, width]."""
    assert layout.times is not None
    when = layout.times
    return attend(q, k, v, layout.spans, when.asked, when.event, bias.position, bias.time, scale)


def implementation(q: Tensor) -> ModuleType:
    """Triton kernels for GPUs, blocks of matrices for everything else; what is chosen is said."""
    if q.device.type == "cpu":
        return blocks
    if q.device.type == "cuda" and q.dtype != torch.float64 and _has_triton():
        from freescale.models.attention import fused

        info_once("attention: Triton kernels")
        return fused
    why = "kernels have no fp64" if q.dtype == torch.float64 else f"there is no Triton for {q.device.type} here"
    warning_once(f"attention: blocks of matrices, since {why}; kernels would be several times as fast")
    return blocks


@lru_cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@torch.library.custom_op(_NAME, mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, asked: Tensor, event: Tensor, position: Tensor, time: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """Mix the values that every query sees."""
    return implementation(q).forward(Inputs(q, k, v, spans, asked, event, position, time, scale))


@torch.library.custom_op(f"{_NAME}_backward", mutates_args=())
def attend_backward(
    d_out: Tensor,
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, asked: Tensor, event: Tensor, position: Tensor, time: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, position and time."""
    inputs = Inputs(q, k, v, spans, asked, event, position, time, scale)
    return tuple(implementation(q).backward(inputs, d_out))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  torch gives it
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    found = Gradients(*attend_backward(d_out, *ctx.saved_tensors, ctx.scale))
    return found.q, found.k, found.v, None, None, None, found.position, found.time, None


attend.register_autograd(_backward, setup_context=_keep)
attend.register_fake(lambda *args: like(args[2]))
attend_backward.register_fake(lambda *args: tuple(map(like, (*args[1:4], *args[7:9]))))
