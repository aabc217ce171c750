"""Measures how evenly micro-batches divide a step, and the peak memory of a step: split by count and by cost.

    python benchmarks/micro_batches.py --out benchmarks/results/micro_batches.json

Cost: 64 samples with lengths of the preset `kuairand`, many draws. Memory: real steps of the trainer on one rank, on
the same lengths 16 times shorter, in turns: as one batch, split by count (contiguous parts of equally many samples), by
cost, and by count again. Of each step, the peak that it adds to the memory of the process.
"""

import argparse
import ctypes
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from freescale.balance.assign import assign
from freescale.balance.cost import Cost
from freescale.config import RunConfig, resolve
from freescale.data import synthetic
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.train import step
from freescale.train.build import build
from freescale.train.step import LearningRates, Step
from freescale.transport.world import World
from processes import on_ranks
from record import save

SAMPLES, PARTS = 64, 4
_M_MMAP_THRESHOLD = -3  # of malloc.h
Split = Callable[[Batch, int, Cost], list[Batch]]


def split_by_count(batch: Batch, count: int, _: Cost) -> list[Batch]:
    """Split a batch into contiguous parts of equally many samples."""
    return [batch.select(samples) for samples in torch.arange(len(batch)).tensor_split(count)]


TURNS: dict[str, tuple[int, Split]] = {
    "one batch": (1, step.split_by_cost),
    "by count": (PARTS, split_by_count),
    "by cost": (PARTS, step.split_by_cost),
    "by count again": (PARTS, split_by_count),
}


def evenness(cost: Cost, draws: int) -> dict[str, Any]:
    """Return the largest part's cost and tokens over the mean: mean and worst over draws."""
    count_part, found = np.arange(SAMPLES) * PARTS // SAMPLES, {}
    for draw in range(draws):
        lengths = synthetic.draw_lengths("kuairand", SAMPLES, np.random.default_rng(draw))
        costs = cost.of(lengths)
        cost_part = assign(costs, np.zeros(SAMPLES), world_size=PARTS, strategy="lpt").rank
        for name, part in (("by_count", count_part), ("by_cost", cost_part)):
            for what, weights in (("cost", costs), ("tokens", lengths)):
                loads = np.bincount(part, weights=weights, minlength=PARTS)
                found.setdefault(f"{what}_{name}", []).append(loads.max() / loads.mean())
    summary = {name: [round(statistics.mean(values), 4), round(max(values), 4)] for name, values in found.items()}
    return {"samples": SAMPLES, "parts": PARTS, "draws": draws, "max_over_mean": "[mean, worst]"} | summary


def settings(options: argparse.Namespace, parts: int) -> RunConfig:
    fields = {
        "data.path": options.data,
        "data.max-history": 21_000,
        "data.global-batch": SAMPLES,
        "data.split": "none",
        "model.dim": options.dim,
        "model.layers": 2,
        "task.negatives": 16,
        "train.micro-batches": parts,
    }
    return resolve("tiny", [word for name, value in fields.items() for word in (f"--{name}", str(value))])


def added_peak_mb(run: Callable[[], object]) -> float:
    """Return the megabytes that a call adds to the peak of this process."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak_mb()
    run()
    return _peak_mb() - before


def _peak_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def peaks(world: World, options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the peak of every step, by the way in which its batch is split."""
    # Large blocks return to the system when they are freed, so a peak does not depend on earlier steps.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    steps: dict[str, Step] = {}
    for name, (parts, _) in TURNS.items():
        steps[name] = build(settings(options, parts), world, folder / name, quiet=True).components.step
    found: dict[str, list[float]] = {name: [] for name in TURNS}
    batches = list(Loader(settings(options, 1).data, seed=0))
    for number, batch in enumerate([batches[0], *batches[: options.batches]]):  # the first one warms up
        for name, (_, split) in TURNS.items():
            with mock.patch.object(step, "split_by_cost", split):
                run = steps[name].run
                peak = added_peak_mb(lambda run=run, batch=batch: run(batch, LearningRates(1e-3, 1e-3)))
            found[name] += [peak] if number else []
    return found


def compared(found: dict[str, list[float]], shorter: int) -> dict[str, Any]:
    """Return medians over batches, and ratios on one batch."""

    def ratio(name: str, other: str) -> list[float]:
        ratios = [a / b for a, b in zip(found[name], found[other], strict=True)]
        return [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))]

    def line(values: Iterable[float]) -> float:
        return round(statistics.median(values), 1)

    return {
        "batches": len(found["by cost"]),
        "shorter": shorter,
        "peak_mb": {name: line(values) for name, values in found.items()},
        "largest_peak_mb": {name: round(max(values), 1) for name, values in found.items()},
        "by_cost_over_by_count": ratio("by cost", "by count"),
        "by_count_again_over_by_count": ratio("by count again", "by count"),
        "by_cost_over_one_batch": ratio("by cost", "one batch"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--shorter", type=int, default=16, help="factor by which histories are shorter than the preset's"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [{"cost": "hstu, dim 256, 8 layers"} | evenness(Cost.hstu(dim=256, layers=8), options.draws)]
    with tempfile.TemporaryDirectory() as folder:
        options.data = f"{folder}/data"
        users = SAMPLES * options.batches
        synthetic.write_log(options.data, "kuairand", users=users, catalogue=4_000, shorter=options.shorter)
        results.append(compared(on_ranks(peaks, 1, options, Path(folder)), options.shorter))
    for result in results:
        print(json.dumps(result))
    save(options.out, results)


if __name__ == "__main__":
    main()
