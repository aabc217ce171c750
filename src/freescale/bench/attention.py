"""Times HSTU attention on a device, in turns with its competitors.

FLOPs count visible pairs: six matrix products of forward and backward. Additional work of a kernel (partly masked
tiles, recomputed scores) does not count.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale.models.attention.operators import hstu_attention
from freescale.models.attention.reference import SCALE, AttentionProblem
from freescale.models.jagged import time_bucket
from freescale.progress import track

_DENSE_SIZE = 1024  # rows of the dense matrices that show the peak of the device


@dataclass(frozen=True)
class AttentionTiming:
    """The result of a competitor."""

    name: str
    seconds: float
    flops_per_second: float
    of_dense: float
    """Share of the FLOP/s of dense matrix products on the same device."""


def compare(
    problem: AttentionProblem, competitors: dict[str, Callable[[AttentionProblem], None]], *, rounds: int
) -> list[AttentionTiming]:
    """Time competitors in turns, each right after dense products of the same FLOPs; medians of seconds and ratios."""
    dense, device = dense_products(problem), problem.q.device
    for run in track(competitors.values(), "warming up"):
        run(problem)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in competitors}
    order = [competitor for _ in range(rounds) for competitor in competitors.items()]
    for name, run in track(order, "timing attention", unit="turns", in_background=False):
        dense_seconds = timed_seconds(dense, device)
        times[name].append((timed_seconds(lambda run=run: run(problem), device), dense_seconds))
    results = {
        name: (median(seconds for seconds, _ in pairs), median(dense / seconds for seconds, dense in pairs))
        for name, pairs in times.items()
    }
    results["dense"] = median(dense for pairs in times.values() for _, dense in pairs), 1.0
    return [
        AttentionTiming(name, seconds, problem.flops / seconds, share) for name, (seconds, share) in results.items()
    ]


def run_operator(problem: AttentionProblem) -> None:
    """Run the operator, forward and backward."""
    problem.run(hstu_attention)


def run_padded(problem: AttentionProblem) -> None:
    """Run plain torch operators on samples padded to the longest: the full matrix of pairs at once."""
    layout, bias = problem.layout, problem.bias
    assert layout.times is not None
    valid = torch.arange(int(layout.lengths.max()), device=problem.q.device) < layout.lengths[:, None]

    def pad(x: Tensor) -> Tensor:
        return x.new_zeros(*valid.shape, *x.shape[1:]).masked_scatter(valid.view(*valid.shape, *[1] * (x.dim() - 1)), x)

    q, k, v = map(pad, (problem.q, problem.k, problem.v))
    event, query = pad(layout.times.event), pad(layout.times.query)
    place, buckets = torch.arange(valid.shape[1], device=q.device), time_bucket(query[:, :, None], event[:, None])
    biases = bias.position[(place[:, None] - place).clamp(min=0)] + bias.time[buckets]
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) + biases[:, None].to(q.dtype)
    visible = (place <= place[:, None]) & valid[:, None]
    out = torch.einsum("bhqk,bkhd->bqhd", F.silu(score) * (visible[:, None].to(q.dtype) / SCALE), v)
    torch.autograd.grad(out[valid], problem.leaves, problem.d_out)


def compile_flex(problem: AttentionProblem) -> Callable[[AttentionProblem], None]:
    """Compile torch's flex attention for the same pairs: softmax without biases, as a well-known yardstick."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lengths, device = problem.layout.lengths, problem.q.device
    sample = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
    compiled, count = torch.compile(flex_attention), len(sample)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (sample[query] == sample[key]) & (key <= query)

    mask = create_block_mask(visible, None, None, count, count, device=device)

    def run(problem: AttentionProblem) -> None:
        q, k, v = (x.transpose(0, 1)[None] for x in (problem.q, problem.k, problem.v))
        out: Tensor = compiled(q, k, v, block_mask=mask)  # type: ignore[assignment]
        torch.autograd.grad(out, problem.leaves[:3], problem.d_out.transpose(0, 1)[None])

    return run


def dense_products(problem: AttentionProblem) -> Callable[[], None]:
    """Return dense matrix products with the FLOPs and shapes of attention: two of six compute scores."""
    width, q = problem.q.shape[2], problem.q.detach()
    scores, tall = q.new_ones(_DENSE_SIZE, _DENSE_SIZE), q.new_ones(_DENSE_SIZE, width)
    count = problem.flops / (2 * _DENSE_SIZE * _DENSE_SIZE * width)

    def run() -> None:
        for _ in range(round(count / 3)):
            tall @ tall.mT
        for _ in range(round(2 * count / 3)):
            scores @ tall

    return run


def timed_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the time of a call, until the device has finished it."""
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
