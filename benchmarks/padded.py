"""What balancing brings to a model that pads: padded cells of the slowest rank, and the step time of a DDP trainer.

    python benchmarks/padded.py --lengths ml-1m=ml-1m.txt --out benchmarks/results/padded.json

Placement: batches of 32 per rank, drawn at random. Padded cells of a rank: its count times its longest sample. Beside
them: the best length-sorted partition, found by dynamic programming, and the placement for jagged compute. Lengths of
public logs are read from files with one length per line; without them, `ml-1m` has the lengths of the preset `ml1m`.

Steps: 4 ranks over gloo with a padded transformer under DDP, lengths of `heavy` capped at 1,024, 16 samples per rank.
Compute is emulated: a real transformer layer is measured on batches of several shapes, and each rank sleeps for the
fitted time of its padded batch. Without balancing, with jagged, with padded, and again without take turns over the same
samples.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tests.support.partitions import best_sorted_partition
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import freescale as fs
from freescale.balance.assign import assign
from freescale.balance.cost import NormalEquations, fit
from freescale.data import synthetic
from freescale.transport.world import World
from processes import on_ranks
from record import save

PER_RANK, RANKS, SAMPLES, LONGEST, DIM = 32, 4, 16, 1024, 64
Floats, Ints = NDArray[np.float64], NDArray[np.int64]
TURNS: dict[str, Literal["jagged", "padded"] | None] = {
    "without": None,
    "jagged": "jagged",
    "padded": "padded",
    "without again": None,
}


def slowest_cells(lengths: Ints, rank: Ints, ranks: int) -> float:
    longest = np.zeros(ranks)
    np.maximum.at(longest, rank, lengths)
    return float((np.bincount(rank, minlength=ranks) * longest).max())


def placement(name: str, pool: Ints, ranks: int, steps: int) -> dict[str, Any]:
    """Return ratios of the slowest rank's padded cells over steps: [mean, largest]."""
    rng, source = np.random.default_rng(ranks), np.repeat(np.arange(ranks), PER_RANK)
    found: dict[str, list[float]] = {}

    def note(kind: str, value: float) -> None:
        found.setdefault(kind, []).append(value)

    for _ in range(steps):
        lengths = pool[rng.integers(0, len(pool), len(source))]
        began = time.perf_counter()
        padded = assign(lengths, source, world_size=ranks, tokens=lengths, compute="padded")
        note("plan_ms", 1e3 * (time.perf_counter() - began))
        jagged = assign(lengths, source, world_size=ranks, tokens=lengths)
        before, after = (slowest_cells(lengths, rank, ranks) for rank in (source, padded.rank))
        note("padded_over_best_sorted_partition", after / best_sorted_partition(lengths, ranks))
        note("padded_over_without", after / before)
        note("jagged_over_without", slowest_cells(lengths, jagged.rank, ranks) / before)
        note("slowest_rank_over_cells_without_padding", padded.max_over_mean)
        note("moved_tokens", padded.moved_tokens)
    ratios = {kind: [round(statistics.mean(values), 4), round(max(values), 4)] for kind, values in found.items()}
    return {"lengths": name, "ranks": ranks, "steps": steps, "figures": "[mean, largest]"} | ratios


def measured_cost(repeats: int) -> tuple[fs.Cost, float]:
    """Return the seconds of a padded transformer layer by samples, tokens and pairs, and the error of the fit."""
    layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0, batch_first=True)
    shapes = [(1, 64), (4, 64), (16, 64), (1, 256), (4, 256), (16, 256), (1, 1024), (4, 1024)]
    equations = NormalEquations()
    for _ in range(repeats):
        for count, longest in shapes:
            rows = torch.randn(count, longest, DIM, requires_grad=True)
            began = time.perf_counter()
            layer(rows).sum().backward()
            seconds = time.perf_counter() - began
            equations.add([[1, count, count * longest, count * longest * (longest + 1) / 2]], [seconds])
    found = fit(equations)
    return found.cost, found.error


class _Sleep(torch.autograd.Function):
    """Sleeps for a third of the time in forward and for the rest in backward. All gradients are zero."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        ctx, ctx.seconds, *ctx.weights = args
        time.sleep(ctx.seconds / 3)
        return ctx.weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds / 3)
        return None, *(torch.zeros_like(weight) for weight in ctx.weights)


class EmulatedTransformer(nn.Module):
    """Has the weights of a transformer layer and takes the measured time for a padded batch."""

    def __init__(self, cost: fs.Cost) -> None:
        super().__init__()
        self.layer, self.cost = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, dropout=0.0), cost

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        count, longest = batch["item"].shape
        return _Sleep.apply(count * float(self.cost.of(longest)), *self.layer.parameters())


def timed(model: DistributedDataParallel, batches: Iterable[Any]) -> tuple[float, float]:
    """Return the mean milliseconds of a step and the mean padded cells of its slowest rank."""
    dist.barrier()
    cells, began = [], time.perf_counter()
    for batch in batches:
        model(batch).backward()
        cells.append(float(batch["item"].numel()))
    slowest = torch.tensor(cells)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 1e3 * (time.perf_counter() - began) / len(cells), float(slowest.mean())


def in_turns(world: World, options: argparse.Namespace, cost: fs.Cost) -> dict[str, list[tuple[float, float]]]:
    model = DistributedDataParallel(EmulatedTransformer(cost))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in TURNS}
    for turn in range(options.rounds):
        batches = [_batch(np.random.default_rng([turn, step, world.rank])) for step in range(options.steps)]
        for name, compute in TURNS.items():
            if compute is None:
                found[name].append(timed(model, batches))
            else:
                lengths, padding = (lambda batch: batch["length"]), {"item": 0}
                loader = fs.BalancedLoader(batches, lengths=lengths, cost=cost, pad_values=padding, compute=compute)
                found[name].append(timed(model, loader))
    return found


def _batch(rng: np.random.Generator) -> dict[str, Tensor]:
    lengths = torch.from_numpy(np.minimum(synthetic.draw_lengths("heavy", SAMPLES, rng), LONGEST))
    width = int(lengths.max())
    return {"item": (torch.arange(width) < lengths[:, None]).long(), "length": lengths}


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians over rounds, and ratios within a round with their range."""
    torch.set_num_threads(1)
    cost, error = measured_cost(options.repeats)
    found = on_ranks(in_turns, RANKS, options, cost)
    ms = {name: [time for time, _ in values] for name, values in found.items()}
    without, again = ms["without"], ms["without again"]
    before = [(a + b) / 2 for a, b in zip(without, again, strict=True)]

    def ratio(values: list[float], others: list[float]) -> list[float]:
        ratios = [value / other for value, other in zip(values, others, strict=True)]
        return [round(value, 4) for value in (statistics.median(ratios), min(ratios), max(ratios))]

    return {
        "ranks": RANKS,
        "samples_per_rank": SAMPLES,
        "rounds": options.rounds,
        "steps": options.steps,
        "seconds_of_a_sample_token_pair": [float(f"{value:.3g}") for value in cost.constants],
        "fit_off_by": round(error, 3),
        "step_ms": {name: round(statistics.median(values), 1) for name, values in ms.items()},
        "slowest_cells": {name: round(statistics.mean(c for _, c in values)) for name, values in found.items()},
        "ratios": "[median, least, largest]",
        "padded_over_without": ratio(ms["padded"], before),
        "jagged_over_without": ratio(ms["jagged"], before),
        "without_again_over_without": ratio(again, without),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="*", default=[], help="NAME=FILE, one length per line")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    pools = {
        "heavy": synthetic.draw_lengths("heavy", 200_000, rng),
        "ml-1m": synthetic.draw_lengths("ml1m", 6_040, rng),
        "kuairand": synthetic.draw_lengths("kuairand", 200_000, rng),
    }
    for word in options.lengths:
        name, _, path = word.partition("=")
        pools[name] = np.loadtxt(path, dtype=np.int64)
    results = [placement(name, pool, ranks, options.draws) for name, pool in pools.items() for ranks in options.ranks]
    results.append({"step": "emulated compute"} | steps(options))
    for result in results:
        print(json.dumps(result))
    save(options.out, results)


if __name__ == "__main__":
    main()
