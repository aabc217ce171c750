"""How right HSTU attention is on a device, against the reference, and how quick, in turns with its competitors.

Work is counted as the pairs of which one sees the other: six products of matrices of that size, forward and backward.
What a kernel computes beyond that (tiles that are half hidden, scores computed anew) is its own affair.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor

from freescale.models.attention import reference
from freescale.models.attention.operators import hstu_attention
from freescale.models.sequence import TIME_BUCKETS, Bias, Layout, Times, time_bucket
from freescale.progress import track

_SCALE = 50.0
_SIDE = 1024  # of the dense matrices that stand for the best that a device does
_PRODUCTS = 6


@dataclass(frozen=True)
class Problem:
    """A batch and its tensors."""

    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias
    upstream: Tensor
    """The gradient that comes from what follows."""

    @staticmethod
    def of(
        lengths: Sequence[int],
        *,
        heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        candidates: Sequence[int] | None = None,
    ) -> "Problem":
        """Random numbers of the size that a model has; q, k and v are parts of one tensor, as a model makes them."""
        torch.manual_seed(0)
        offered = None if candidates is None else torch.tensor(candidates, device=device)
        layout = Layout(torch.tensor([0, *lengths], device=device).cumsum(0), offered)
        event = layout.position * 60 + layout.position**2
        layout = replace(layout, times=Times(event, event + 40 * (layout.position % 7)))
        parts = torch.randn(layout.tokens, 3 * heads * width, device=device).to(dtype).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, width)).detach().requires_grad_() for part in parts)
        longest = max(lengths, default=1)
        bias = Bias(*(torch.randn(size, device=device).requires_grad_() for size in (longest, TIME_BUCKETS)))
        return Problem(layout, q, k, v, bias, torch.randn(q.shape, device=device).to(dtype))

    @staticmethod
    def checked(*, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> "Problem":
        """Short and empty samples, edges of blocks, candidates; on a GPU so much that no program is idle."""
        lengths = [0, 1, 31, 32, 33, 64, 65, 300, *([1000] * 64 if device.type == "cuda" else [])]
        offered = [n // 4 if place % 3 == 0 else 0 for place, n in enumerate(lengths)]
        return Problem.of(lengths, heads=heads, width=width, dtype=dtype, device=device, candidates=offered)

    @property
    def learnt(self) -> list[Tensor]:
        """What has a gradient."""
        return [self.q, self.k, self.v, self.bias.position, self.bias.time]

    @property
    def flops(self) -> int:
        """Of forward and backward, over pairs that see each other."""
        lengths = self.layout.lengths
        pairs = int((lengths * (lengths + 1) // 2).sum())
        return 2 * _PRODUCTS * pairs * self.q.shape[1] * self.q.shape[2]


@dataclass(frozen=True)
class Timed:
    """A competitor."""

    name: str
    seconds: float
    flops_per_second: float
    of_dense: float
    """Share of what dense products of matrices reach on the same device."""


def errors(problem: Problem) -> dict[str, float]:
    """How far result and gradients are from the reference in fp64, as shares of their norms."""
    q, k, v, *biases = (x.detach().double().requires_grad_() for x in problem.learnt)
    exact = replace(problem, q=q, k=k, v=v, bias=Bias(*biases))
    found, meant = _result(problem, hstu_attention), _result(exact, reference.hstu_attention)
    names = ("result", "of q", "of k", "of v", "of position", "of time")
    off = [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, meant, strict=True)]
    return dict(zip(names, off, strict=True))


def compete(problem: Problem, competitors: dict[str, Callable[[Problem], None]], *, rounds: int) -> list[Timed]:
    """Time everybody in turns, each right after dense products of the same FLOPs; medians of seconds and of ratios."""
    dense = dense_products(problem)
    for run in track(competitors.values(), "warming up"):
        run(problem)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in competitors}
    order = [competitor for _ in range(rounds) for competitor in competitors.items()]
    for name, run in track(order, "timing attention", unit="turns", in_background=False):
        before = _seconds(dense, problem.q.device)
        turns[name].append((_seconds(lambda run=run: run(problem), problem.q.device), before))
    found = {n: (median(own for own, _ in of), median(best / own for own, best in of)) for n, of in turns.items()}
    found["dense"] = median(best for of in turns.values() for _, best in of), 1.0
    return [Timed(name, seconds, problem.flops / seconds, share) for name, (seconds, share) in found.items()]


def ours(problem: Problem) -> None:
    """The operator, forward and backward."""
    _result(problem, hstu_attention)


def padded(problem: Problem) -> None:
    """The same by plain operators on samples padded to the longest: the whole matrix of pairs at once."""
    layout, bias = problem.layout, problem.bias
    assert layout.times is not None
    held = torch.arange(int(layout.lengths.max()), device=problem.q.device) < layout.lengths[:, None]

    def filled(x: Tensor) -> Tensor:
        return x.new_zeros(*held.shape, *x.shape[1:]).masked_scatter(held.view(*held.shape, *[1] * (x.dim() - 1)), x)

    q, k, v = map(filled, (problem.q, problem.k, problem.v))
    event, asked = filled(layout.times.event), filled(layout.times.asked)
    place, buckets = torch.arange(held.shape[1], device=q.device), time_bucket(asked[:, :, None], event[:, None])
    added = bias.position[(place[:, None] - place).clamp(min=0)] + bias.time[buckets]
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) + added[:, None].to(q.dtype)
    seen = (place <= place[:, None]) & held[:, None]
    out = torch.einsum("bhqk,bkhd->bqhd", F.silu(score) * (seen[:, None].to(q.dtype) / _SCALE), v)
    torch.autograd.grad(out[held], problem.learnt, problem.upstream)


def flex_on(problem: Problem) -> Callable[[Problem], None]:
    """torch's flex attention: softmax, no biases, the same pairs. Not the same model, but a well-known yardstick."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lengths, device = problem.layout.lengths, problem.q.device
    sample = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    compiled, count = torch.compile(flex_attention), len(sample)

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (sample[query] == sample[key]) & (key <= query)

    mask = create_block_mask(seen, None, None, count, count, device=device)

    def run(of: Problem) -> None:
        q, k, v = (x.transpose(0, 1)[None] for x in (of.q, of.k, of.v))
        out: Tensor = compiled(q, k, v, block_mask=mask)  # type: ignore[assignment]
        torch.autograd.grad(out, of.learnt[:3], of.upstream.transpose(0, 1)[None])

    return run


def dense_products(problem: Problem) -> Callable[[], None]:
    """Products of dense matrices with the FLOPs and the shapes of attention: two of six make scores."""
    width, like = problem.q.shape[2], problem.q.detach()
    scores, tall = like.new_ones(_SIDE, _SIDE), like.new_ones(_SIDE, width)
    count = problem.flops / (2 * _SIDE * _SIDE * width)

    def run() -> None:
        for _ in range(round(count / 3)):
            tall @ tall.mT
        for _ in range(round(2 * count / 3)):
            scores @ tall

    return run


def _result(problem: Problem, attend: Callable[..., Tensor]) -> list[Tensor]:
    out = attend(problem.q, problem.k, problem.v, problem.layout, bias=problem.bias, scale=_SCALE)
    return [out.detach(), *torch.autograd.grad(out, problem.learnt, problem.upstream.to(out.dtype))]


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
