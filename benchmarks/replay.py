"""Stragglers of 256 ranks, replayed: every rank's share of a step is really computed, one after another, and timed.

    python benchmarks/replay.py --out benchmarks/results/replay.json

Lengths of `kuairand` (up to 21,000) over 20, 128 samples per rank, one layer of SASRec of width 32, forward and back
on one thread, in micro-batches of 16 samples of like length. Shares are as drawn, and as balanced by a cost that was
fitted to other shares. All are computed in turns, several times, and of each micro-batch the least time counts: what
this machine does beside it is no imbalance. Beside them one and the same share is computed as if it were that of 64
ranks: the floor of the measurement. On a noisy machine the slowest of many is the unluckiest, so its time is also taken
from passes that had no say in choosing it: that errs to the other side.
"""

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from freescale.balance.assign import assign
from freescale.balance.cost import Cost, NormalEquations, fit, sizes
from freescale.config import ModelConfig
from freescale.data import synthetic
from freescale.models.encoders import SASRec
from jagged import step
from record import save

SHORTER, LONGEST, BATCH, DIM, MICRO_BATCH = 20, 21_000, 128, 32, 16
PROCESSES, EQUAL = 2, 64
Floats, Ints = NDArray[np.float64], NDArray[np.int64]
Share = list[list[int]]
"""Lengths of each micro-batch."""


class Drawn(NamedTuple):
    """One step: the share of each rank, as drawn and as balanced, and what the plan says."""

    random: list[Share]
    balanced: list[Share]
    at_home: float
    max_over_mean: float
    moved_tokens: float


def share(lengths: Ints) -> Share:
    return [part.tolist() for part in np.split(np.sort(lengths), range(MICRO_BATCH, len(lengths), MICRO_BATCH))]


def computed(shares: list[Share], passes: int) -> list[list[list[float]]]:
    """Seconds of each micro-batch of each share, pass by pass; all are computed once before any is computed again."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = SASRec(ModelConfig(dim=DIM, layers=1, heads=1, dropout=0.0), max_seq_len=LONGEST // SHORTER)
    return [[[step(model, part, DIM) for part in one] for one in shares] for _ in range(passes)]


def timed(shares: list[Share], passes: int) -> list[list[Floats]]:
    """The same by a process per core: of each share and each micro-batch, the seconds of every pass."""
    # Memory stays with the process: fetching it anew for every tensor takes longer at some times than at others.
    os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        parts = pool.starmap(computed, [(shares[first::PROCESSES], passes) for first in range(PROCESSES)])
    found: list[list[Floats]] = [[]] * len(shares)
    for first, of_passes in enumerate(parts):
        found[first::PROCESSES] = [list(np.array(share).T) for share in zip(*of_passes, strict=True)]
    return found


def least(found: list[list[Floats]], chosen: slice = slice(None)) -> Floats:
    """Seconds of each share: the sum over its micro-batches of their least, over some passes."""
    return np.array([sum(seconds[chosen].min() for seconds in share) for share in found])


def drawn(ranks: int, rng: np.random.Generator) -> Ints:
    return np.maximum(1, synthetic.draw_lengths("kuairand", ranks * BATCH, rng) // SHORTER)


def calibrated(options: argparse.Namespace, rng: np.random.Generator) -> tuple[Cost, float]:
    """What a sample costs, its part of a micro-batch's own cost included; and by how much that is off."""
    shares = [share(lengths) for lengths in np.split(drawn(options.calibration, rng), options.calibration)]
    products = NormalEquations()
    for one, found_of in zip(shares, timed(shares, options.passes), strict=True):
        seconds = [float(of_passes.min()) for of_passes in found_of]
        of_parts = [[float(size.sum()) for size in sizes(part)] for part in one]
        products.add([(1, len(part), *of) for part, of in zip(one, of_parts, strict=True)], seconds)
    found = fit(products)
    return Cost(found.cost.sample + found.step / MICRO_BATCH, found.cost.token, found.cost.pair), found.error


def planned(cost: Cost, ranks: int, rng: np.random.Generator) -> Drawn:
    lengths, homes = drawn(ranks, rng), np.repeat(np.arange(ranks), BATCH)
    placement = assign(cost.of(lengths), homes, world_size=ranks, tokens=lengths)
    random, balanced = ([share(lengths[where == rank]) for rank in range(ranks)] for where in (homes, placement.rank))
    return Drawn(random, balanced, placement.max_over_mean_before, placement.max_over_mean, placement.moved_tokens)


def straggler(seconds: Floats) -> float:
    """Percent of a rank's time that it waits for the slowest, mean of steps: [steps, ranks]."""
    return round(100 * float((1 - seconds.mean(axis=1) / seconds.max(axis=1)).mean()), 2)


def cross_checked(even: Floats, odd: Floats) -> float:
    """The same, where the slowest is chosen by half of the passes, and its time and the mean come from the others."""

    def one_way(choosing: Floats, timing: Floats) -> float:
        slowest = np.take_along_axis(timing, choosing.argmax(axis=1)[:, None], axis=1)[:, 0]
        return float((1 - timing.mean(axis=1) / slowest).mean())

    return round(50 * (one_way(even, odd) + one_way(odd, even)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--passes", type=int, default=16)
    parser.add_argument("--calibration", type=int, default=48)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng, began, ranks = np.random.default_rng(0), time.perf_counter(), options.ranks
    cost, error = calibrated(options, rng)
    steps = [planned(cost, ranks, rng) for _ in range(options.steps)]
    kinds = [[s for one in steps for s in one.random], [s for one in steps for s in one.balanced]]
    equal = [steps[0].random[0]] * min(ranks, EQUAL)
    found = timed([*kinds[0], *kinds[1], *equal], options.passes)
    seconds, even, odd = (least(found, chosen) for chosen in (slice(None), slice(0, None, 2), slice(1, None, 2)))
    random, balanced = seconds[: -len(equal)].reshape(2, len(steps), ranks)
    halves = [half[: -len(equal)].reshape(2, len(steps), ranks) for half in (even, odd)]
    result: dict[str, Any] = {
        "ranks": ranks,
        "passes": options.passes,
        "straggler_percent_random": straggler(random),
        "straggler_percent_balanced": straggler(balanced),
        "straggler_percent_of_equal_shares": straggler(seconds[None, -len(equal) :]),
        "straggler_percent_random_cross_checked": cross_checked(*(half[0] for half in halves)),
        "straggler_percent_balanced_cross_checked": cross_checked(*(half[1] for half in halves)),
        "straggler_percent_of_equal_shares_cross_checked": cross_checked(
            even[None, -len(equal) :], odd[None, -len(equal) :]
        ),
        "straggler_percent_random_by_cost": round(100 * float(np.mean([1 - 1 / one.at_home for one in steps])), 2),
        "straggler_percent_balanced_by_cost": round(
            100 * float(np.mean([1 - 1 / one.max_over_mean for one in steps])), 2
        ),
        "step_time_ratio": round(float((random.max(axis=1) / balanced.max(axis=1)).mean()), 3),
        "tokens_moved_percent": round(100 * float(np.mean([one.moved_tokens for one in steps])), 2),
        "cost": dict(zip(("sample", "token", "pair"), (float(f"{c:.4g}") for c in cost.constants), strict=True)),
        "cost_off_percent_of_a_micro_batch": round(100 * error, 2),
        "seconds_per_share": round(float(random.mean()), 3),
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }
    print(json.dumps(result, indent=1))
    save(options.out, [result])


if __name__ == "__main__":
    main()
