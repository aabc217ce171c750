"""Planning in groups of ranks beside one plan for all ranks, with kuairand's lengths and hosts of eight ranks.

Cost of a sample: 6 L d^2 + L^2 d, d = 256, as in balance.py. Of each shape, RANKSxSAMPLES, and over seeds: the slowest
rank over the mean, and the tokens that move. In groups a sample may move twice, between groups and inside of one; both
count. Times are CPU times of one rank, the least of some runs: in groups that is the plan of one group, what groups
give to each other, and the samples that the rank gives. Flat, it is the plan of all samples, which every rank makes.

python benchmarks/balance_groups.py --out benchmarks/results/balance_groups.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from balance import Floats, Ints, cost
from freescale.balance.assign import assign
from freescale.balance.rank_groups import (
    RankGroups,
    give_between_groups,
    samples_to_give,
    tolerance_between,
    tolerance_inside,
    transfers_between,
)
from freescale.data import synthetic
from record import save

TOLERANCE, LOCAL = 0.005, 8
T = TypeVar("T")


def timed(work: Callable[[], T], repeats: int) -> tuple[T, float]:
    """The result and the least milliseconds of CPU time."""
    took = []
    for _ in range(repeats):
        began = time.thread_time()
        result = work()
        took.append(1e3 * (time.thread_time() - began))
    return result, min(took)


def giving_ms(costs: Floats, source: Ints, groups: RankGroups, repeats: int) -> float:
    """Milliseconds of what a rank decides before it plans: rank 0, or the most loaded rank of the fullest group."""
    work = np.bincount(source, weights=costs).astype(np.float64)
    of_groups = np.bincount(groups.group, weights=work).astype(np.float64)
    ranks = groups.sizes.astype(np.float64)
    fullest = int(of_groups.argmax())
    members = groups.members(fullest)
    place = int(work[members].argmax())
    own = costs[source == members[place]]

    def give() -> tuple[Ints, Ints] | None:
        given = transfers_between(of_groups, ranks, tolerance_between(TOLERANCE))[fullest]
        return samples_to_give(own, work[members], place=place, given=given) if given.any() else None

    return timed(give, repeats)[1]


def in_groups(lengths: Ints, source: Ints, hosts: Ints, most: int, repeats: int) -> dict[str, float]:
    """Place the samples of a step as the ranks of all groups do."""
    costs, groups = cost(lengths), RankGroups.of_hosts(hosts, most)
    held = give_between_groups(costs, source, groups, tolerance_between(TOLERANCE))
    mean = costs.sum() / len(hosts)
    between, load, inside, took = int(lengths[held != source].sum()), np.zeros(len(hosts)), 0, []
    for number in range(len(groups.sizes)):
        members = groups.members(number)
        own = np.flatnonzero(groups.group[held] == number)
        place = np.searchsorted(members, held[own])
        tolerance = tolerance_inside(TOLERANCE, mean, costs[own].sum() / len(members))
        options = {"world_size": len(members), "tokens": lengths[own], "hosts": hosts[members], "tolerance": tolerance}
        placed, ms = timed(lambda o=own, p=place, w=options: assign(costs[o], p, **w), repeats)
        took.append(ms)
        load[members] = np.bincount(placed.rank, weights=costs[own], minlength=len(members))
        inside += int(lengths[own][placed.rank != place].sum())
    alone = np.bincount(groups.group[source], weights=costs) / groups.sizes
    return {
        "slowest_over_mean": float(load.max() / load.mean()),
        "fullest_group_over_mean_before": float(alone.max() / (costs.sum() / len(hosts))),
        "moved_tokens": (between + inside) / int(lengths.sum()),
        "moved_between_groups": between / int(lengths.sum()),
        "plan_ms": statistics.mean(took),
        "plan_ms_worst": max(took),
        "giving_ms": giving_ms(costs, source, groups, repeats),
    }


def of_shape(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Means over seeds, and the worst."""
    ranks, batch = map(int, shape.split("x"))
    pool = synthetic.draw_lengths("kuairand", 200_000, np.random.default_rng(0))
    source, hosts, rows = np.repeat(np.arange(ranks), batch), np.arange(ranks) // LOCAL, []
    for seed in range(options.seeds):
        lengths = pool[np.random.default_rng(seed).integers(0, len(pool), ranks * batch)]
        row = in_groups(lengths, source, hosts, options.group, options.repeats)
        if seed < options.flat_seeds:
            words = {"world_size": ranks, "tokens": lengths, "hosts": hosts, "tolerance": TOLERANCE}
            flat, ms = timed(lambda lengths=lengths, w=words: assign(cost(lengths), source, **w), 1)
            row |= {"flat_slowest_over_mean": flat.max_over_mean, "flat_moved_tokens": flat.moved_tokens}
            row |= {"flat_plan_ms": ms, "moved_over_flat": row["moved_tokens"] / flat.moved_tokens}
        rows.append(row)
    found: dict[str, Any] = {"ranks": ranks, "batch": batch, "group": options.group, "seeds": options.seeds}
    for kind in rows[0]:
        values = [row[kind] for row in rows if kind in row]
        found[kind] = round(max(values) if kind.endswith("_worst") else statistics.mean(values), 4)
    return found | {"slowest_over_mean_worst": round(max(row["slowest_over_mean"] for row in rows), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1024x128", "16384x128", "1024x8", "16384x8"])
    parser.add_argument("--group", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--flat-seeds", type=int, default=1, help="seeds with the plan for all ranks, which takes long")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for shape in options.shapes:
        results.append(of_shape(shape, options))
        print(json.dumps(results[-1]), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
