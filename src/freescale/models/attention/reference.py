"""The definition of attention: its operands, a readable implementation, and the errors of others against it.

The implementation computes one sample at a time as a full matrix. It is slow; all others must equal it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale.models.jagged import TIME_BUCKETS, BiasTables, EventTimes, JaggedLayout, is_visible, time_bucket
from freescale.visibility import FarKeys, Visibility

SCALE = 50.0
_PRODUCTS = 6  # matrix products of forward and backward


class AttentionInputs(NamedTuple):
    """The operands of HSTU attention. q, k and v are [tokens, heads, width]."""

    q: Tensor
    k: Tensor
    v: Tensor
    spans: Tensor
    limits: Tensor
    query_time: Tensor
    event_time: Tensor
    position: Tensor
    time: Tensor
    scale: float
    begins: Tensor | None = None
    """The first near key of each token; None without a rule of visibility."""
    far: FarKeys | None = None


class AttentionGradients(NamedTuple):
    """The gradients of the differentiable operands."""

    q: Tensor
    k: Tensor
    v: Tensor
    position: Tensor
    time: Tensor


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, layout: JaggedLayout, *, bias: BiasTables, scale: float) -> Tensor:
    """Pointwise attention: silu(q k + bias) / scale, summed over v."""
    times = layout.times
    assert times is not None

    def attend(tokens: slice, visible: Tensor) -> Tensor:
        place = torch.arange(len(visible), device=q.device)
        distance = (layout.limits[tokens, None] - place[None, :]).clamp(min=0)
        added = bias.position[distance] + bias.time[time_bucket(times.query[tokens, None], times.event[None, tokens])]
        weights = F.silu(torch.einsum("qhd,khd->hqk", q[tokens], k[tokens]) + added) / scale
        return torch.einsum("hqk,khd->qhd", weights * visible, v[tokens])

    return _by_sample(attend, v, layout)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, layout: JaggedLayout) -> Tensor:
    """Scaled dot-product attention."""

    def attend(tokens: slice, visible: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q[tokens], k[tokens]) / q.shape[-1] ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v[tokens])

    return _by_sample(attend, v, layout)


def _by_sample(attend: Callable[[slice, Tensor], Tensor], v: Tensor, layout: JaggedLayout) -> Tensor:
    outputs = [v[:0]]
    for begin, length, _ in layout.spans.tolist():
        tokens, place = slice(begin, begin + length), torch.arange(length, device=v.device)
        begins = None if layout.begins is None else layout.begins[tokens, None]
        visible = is_visible(place[:, None], place[None, :], layout.limits[tokens, None], begins, layout.far)
        outputs.append(attend(tokens, visible))
    return torch.cat(outputs)


@dataclass(frozen=True)
class AttentionProblem:
    """A random batch with its tensors, to check and time implementations."""

    layout: JaggedLayout
    q: Tensor
    k: Tensor
    v: Tensor
    bias: BiasTables
    d_out: Tensor
    """The gradient of the output."""

    @staticmethod
    def random(
        lengths: Sequence[int],
        *,
        heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        candidates: Sequence[int] | None = None,
        anchors: Sequence[int] | None = None,
        visibility: Visibility | None = None,
    ) -> "AttentionProblem":
        """Draw values of the magnitude of a model; q, k and v are parts of one tensor, as in a model."""
        torch.manual_seed(0)

        def optional(counts: Sequence[int] | None) -> Tensor | None:
            return None if counts is None else torch.tensor(counts, dtype=torch.int64, device=device)

        offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
        layout = JaggedLayout(offsets, optional(candidates), anchors=optional(anchors), visibility=visibility)
        event = layout.position * 60 + layout.position**2
        layout = replace(layout, times=EventTimes(event, event + 40 * (layout.position % 7)))
        parts = torch.randn(layout.tokens, 3 * heads * width, device=device).to(dtype).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, width)).detach().requires_grad_() for part in parts)
        sizes = max(lengths, default=1), TIME_BUCKETS
        bias = BiasTables(*(torch.randn(size, device=device).requires_grad_() for size in sizes))
        return AttentionProblem(layout, q, k, v, bias, torch.randn(q.shape, device=device).to(dtype))

    @staticmethod
    def edge_cases(*, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> "AttentionProblem":
        """Short and empty samples, block boundaries and candidates; on a GPU enough samples for all programs.

        Candidates see the whole history, or evenly spaced parts of it, from nothing on.
        """
        lengths = [0, 1, 31, 32, 33, 64, 65, 300, *([1000] * 64 if device.type == "cuda" else [])]
        candidates = [0 if place % 3 == 2 else n // 4 for place, n in enumerate(lengths)]
        anchors = [
            (n - count) * (each if place % 3 else count) // count
            for place, (n, count) in enumerate(zip(lengths, candidates, strict=True))
            for each in range(count)
        ]
        return AttentionProblem.random(
            lengths, heads=heads, width=width, dtype=dtype, device=device, candidates=candidates, anchors=anchors
        )

    @property
    def inputs(self) -> AttentionInputs:
        """The operands of an implementation, without gradients."""
        layout, times = self.layout, self.layout.times
        assert times is not None
        q, k, v, position, time = (x.detach() for x in self.leaves)
        spans, limits = layout.spans, layout.limits
        rule = layout.begins, layout.far
        return AttentionInputs(q, k, v, spans, limits, times.query, times.event, position, time, SCALE, *rule)

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that have a gradient."""
        return [self.q, self.k, self.v, self.bias.position, self.bias.time]

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward over the visible pairs."""
        pairs = self.layout.pairs
        return 2 * _PRODUCTS * pairs * self.q.shape[1] * self.q.shape[2]

    def run(self, attend: Callable[..., Tensor]) -> list[Tensor]:
        """Return the output and all gradients of an implementation of HSTU attention."""
        out = attend(self.q, self.k, self.v, self.layout, bias=self.bias, scale=SCALE)
        return self._with_gradients(out, self.leaves)

    def run_softmax(self, attend: Callable[..., Tensor]) -> list[Tensor]:
        """Return the output and all gradients of an implementation of softmax attention, which has no biases."""
        return self._with_gradients(attend(self.q, self.k, self.v, self.layout), self.leaves[:3])

    def _with_gradients(self, out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, leaves, self.d_out.to(out.dtype))]


def relative_errors(
    problem: AttentionProblem, attend: Callable[..., Tensor], *, softmax: bool = False
) -> dict[str, float]:
    """Return the relative error of the output and every gradient against the reference in fp64."""
    q, k, v, *biases = (x.detach().double().requires_grad_() for x in problem.leaves)
    in_fp64 = replace(problem, q=q, k=k, v=v, bias=BiasTables(*biases))
    exact = in_fp64.run_softmax(softmax_attention) if softmax else in_fp64.run(hstu_attention)
    names = ("output", "grad of q", "grad of k", "grad of v", "grad of position", "grad of time")
    pairs = zip(problem.run_softmax(attend) if softmax else problem.run(attend), exact, strict=True)
    errors = [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]
    return dict(zip(names, errors, strict=False))
