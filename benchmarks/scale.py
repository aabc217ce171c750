"""Simulates 8 to 16,384 GPUs: which term grows first.

    python benchmarks/scale.py --out benchmarks/results/scale.json

Lengths of `kuairand`, 8 layers of 512, batches of 128, H100 with 8 x 400 Gb/s, items with production popularity. At
every size: a step with nothing and with everything, the time of planning on this machine, of gathering all lengths and
of an empty all-to-all, the share of rows that collide, and the balance if samples move only inside groups of 256.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from freescale.balance.assign import assign
from freescale.balance.cost import Cost
from freescale.config import RECIPES
from freescale.data import synthetic
from freescale.simulate import cluster
from freescale.simulate.network import Topology
from freescale.simulate.operations import DeviceModel
from freescale.simulate.whatif import ABLATION, Scenario, SimulationResult, simulate
from freescale.simulate.workload import ModelCost, Popularity, SampledStep, StepLoad
from record import save

GROUP = 256


def zipf(items: int, exponent: float = 1.05) -> Popularity:
    """Production popularity of a catalogue of any size: items of nearly the same rank are one group."""
    edges = np.unique(np.geomspace(1, items + 1, 400).astype(np.int64))
    many = np.diff(edges).astype(np.float64)
    share = ((edges[:-1] + edges[1:] - 1) / 2.0) ** -exponent
    return Popularity(many, share / (many @ share))


def question(options: argparse.Namespace) -> Scenario:
    config = RECIPES["hstu-large"]
    cost = Cost.of_model(config.model)
    dense = 4 * cost.token
    model = ModelCost(
        cost=cost,
        products=1.0,
        dim=config.model.dim,
        dense_bytes=dense,
        last_bytes=min(dense, 25 << 20),
        popularity=zipf(options.items),
        looked_up=1,
    )
    lengths = synthetic.draw_lengths("kuairand", 50_000, np.random.default_rng(0))
    values, counts = np.unique(lengths, return_counts=True)
    where = cluster.load("h100")
    return Scenario(
        model, values, counts, 128, where, lambda c: DeviceModel.from_cluster(c, model), steps=options.steps
    )


def in_groups(drawn: SampledStep, cost: Cost, ranks: int) -> float:
    """The slowest rank over the mean, if samples are dealt only inside groups of ranks."""
    costs, load = cost.of(drawn.lengths), np.zeros(ranks)
    for first in range(0, ranks, GROUP):
        mine = (drawn.source_rank >= first) & (drawn.source_rank < first + GROUP)
        size = min(GROUP, ranks - first)
        placed = assign(costs[mine], drawn.source_rank[mine] - first, world_size=size).rank
        load[first : first + size] = np.bincount(placed, weights=costs[mine], minlength=size)
    return float(load.max() / load.mean())


def terms(asked: Scenario, ranks: int, everything: SimulationResult) -> dict[str, Any]:
    """What grows with the number of ranks."""
    drawn = asked.sample_steps(ranks)[:2]
    loads = asked.plan_steps(drawn, ranks, balanced=True)
    topology = Topology(asked.cluster, ranks, np.random.default_rng(0))
    telling = topology.all_gather(8.0 * asked.batch)
    return {
        "planning_ms": round(1e3 * min(load.planning for load in loads), 1),
        "telling_lengths_ms": round(1e3 * (telling.latency + max(telling.levels)), 2),
        "messages_ms": round(1e3 * topology.all_to_all(np.zeros(ranks)).latency, 2),
        "collisions": round(everything.collisions, 3),
        "slowest_over_mean": round(float(max(load.work.max() / load.work.mean() for load in loads)), 4),
        "slowest_over_mean_in_groups": round(in_groups(drawn[0], asked.model.cost, ranks), 4),
        "moved": round(everything.moved, 4),
        "shared_rows_of_a_host_over_its_ranks": _of_hosts(asked, loads[0]),
    }


def _of_hosts(asked: Scenario, load: StepLoad) -> float:
    """Rows that collide, if the ranks of a host ask for each once, over what they ask for one by one."""
    local, popularity, before = round(asked.cluster.ranks_per_host), asked.model.popularity, float(load.events.sum())
    one = np.array([before / len(load.events)])
    together = popularity.shared(local * one, before) / (local * popularity.shared(one, before))
    return round(float(together[0]), 3)


def at(asked: Scenario, ranks: int) -> dict[str, Any]:
    nothing, everything = simulate(asked, ranks, (ABLATION[0], ABLATION[-1]))
    found: dict[str, Any] = {"ranks": ranks}
    for name, one in (("nothing", nothing), ("everything", everything)):
        causes = {line.cause: round(line.ms, 1) for line in one.summary.lines if line.share > 0.01}
        found[name] = {
            "step_ms": round(one.summary.step_ms, 1),
            "step_ms_likely": [round(value) for value in one.step_ms],
            "bubble_percent": round(one.summary.bubble_percent, 1),
            "bubble_percent_likely": [round(value, 1) for value in one.bubble_percent],
            "samples_per_second": round(one.samples_per_second),
            "causes_ms": causes,
        }
    return found | terms(asked, ranks, everything)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024, 4096, 16_384])
    parser.add_argument("--items", type=int, default=10**9)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked, results = question(options), []
    for ranks in options.ranks:
        results.append(at(asked, ranks))
        print(json.dumps(results[-1]), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
