"""Simulates 8 to 16,384 GPUs: which term grows first, and what each remedy changes.

    python benchmarks/scale.py --out benchmarks/results/scale.json

Lengths of `kuairand`, 8 layers of 512, batches of 128, H100 with 8 x 400 Gb/s, items with production popularity, whose
rows are dealt to the owners in zig-zag. At every size: a step with nothing and with everything, and everything with
each remedy and with both: a two-level exchange, and planning in groups of 256 ranks; and, in groups, with the popular
rows on every rank that the trainer would replicate with the flat exchange. Beside them what grows: time of planning on
this machine and of gathering lengths, the time before urgent rows leave a host (latency, and what ranks of a host pass
to each other), the share of rows that collide, the busiest owner of rows, and the slowest rank.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from freescale.balance.cost import Cost
from freescale.balance.placement import Floats
from freescale.config import RECIPES
from freescale.data import synthetic
from freescale.embedding.replicated_rows import Requesters, choose_replicated
from freescale.embedding.row_order import RowOrder, bit_reversal
from freescale.overlap.schedule import overlapped
from freescale.simulate import cluster
from freescale.simulate.lookups import Popularity, RowOwners
from freescale.simulate.operations import BALANCE, DeviceModel, OperationCosts
from freescale.simulate.whatif import ABLATION, Scenario, SimulationResult, simulate
from freescale.simulate.workload import ModelCost, TableCost
from record import save

REMEDIES = {
    "everything": {"two_level": False, "group_ranks": 0},
    "two-level": {"two_level": True, "group_ranks": 0},
    "in groups": {"two_level": False, "group_ranks": 256},
    "both": {"two_level": True, "group_ranks": 256},
    "popular rows": {"two_level": False, "group_ranks": 256, "replicates": True},
    "popular rows, two-level": {"two_level": True, "group_ranks": 256, "replicates": True},
}
EXPONENT = 1.05
FREQUENT = 1 << 20  # items that are placed on owners one by one


def zipf(items: int, *, first: int = 1) -> tuple[Floats, Floats]:
    """Production popularity of items from some rank on: how many of nearly the same rank, and the weight of each."""
    edges = np.unique(np.geomspace(1, items + 1, 400).astype(np.int64))
    edges = np.unique(np.append(edges[edges > first], [first, items + 1]))
    many = np.diff(edges).astype(np.float64)
    weight = ((edges[:-1] + edges[1:] - 1) / 2.0) ** -EXPONENT
    return many, weight


def popularity(items: int) -> tuple[Popularity, RowOwners]:
    """Production popularity of a catalogue of any size, and the owners of its rows."""
    many, weight = zipf(items)
    total, frequent = float(many @ weight), min(items, FREQUENT)
    order = RowOrder.of(items, "zigzag")
    position = order.position(np.arange(frequent), bit_reversal(order.shards)) / order.positions
    rare_many, rare = zipf(items, first=frequent + 1) if items > frequent else (np.zeros(0), np.zeros(0))
    owners = RowOwners(
        position,
        np.arange(1, frequent + 1, dtype=np.float64) ** -EXPONENT / total,
        others=Popularity(rare_many, rare / total) if len(rare) else None,
    )
    return Popularity(many, weight / total), owners


def question(options: argparse.Namespace) -> Scenario:
    config = RECIPES["hstu-large"]
    cost = Cost.of_model(config.model)
    dense = 4 * cost.token
    popular, owners = popularity(options.items)
    model = ModelCost(
        cost=cost,
        products=1.0,
        tables=(TableCost(dim=config.model.dim, popularity=popular, looked_up=1, owners=owners),),
        dense_bytes=dense,
        last_bytes=min(dense, 25 << 20),
    )
    lengths = synthetic.draw_lengths("kuairand", 50_000, np.random.default_rng(0))
    values, counts = np.unique(lengths, return_counts=True)
    where = cluster.load("h100")
    return Scenario(
        model, values, counts, 128, where, lambda c: DeviceModel.from_cluster(c, model), steps=options.steps
    )


def replicated(asked: Scenario, ranks: int) -> int:
    """How many rows `tables.replicated_rows = "auto"` replicates with the flat exchange."""
    (table,) = asked.model.tables
    assert table.owners is not None
    hosts, events = ranks / asked.local, asked.batch * float(asked.lengths @ asked.counts) / asked.counts.sum()
    requesters = Requesters(max(1, round(hosts)), min(ranks, asked.local), events, ranks)
    return choose_replicated(table.owners.share, requesters).rows


def terms(asked: Scenario, ranks: int) -> dict[str, Any]:
    """What grows with the number of ranks."""
    load = asked.plan_steps(asked.sample_steps(ranks)[:1], ranks, balanced=True)[0]
    costs = OperationCosts(
        asked.cluster,
        asked.device(asked.cluster),
        asked.model,
        world_size=ranks,
        sm_free=True,
        rng=np.random.default_rng(0),
    )
    schedule = {operation.name: operation for operation in (*BALANCE, *overlapped().operations)}
    gathered, urgent = (costs.cost(schedule[name], load).transfer for name in ("gather_lengths", "send_collision_rows"))
    assert gathered is not None
    assert urgent is not None
    requests = load.requests if load.merged is None else load.merged
    found = {
        "replicated_rows": asked.model.replicated_rows,
        "planning_ms": round(1e3 * load.planning, 1),
        "gathering_lengths_ms": round(1e3 * (gathered.latency + max(gathered.levels)), 2),
        "urgent_latency_ms": round(1e3 * urgent.latency, 2),
        "busiest_owner_over_mean": round(float(requests.served.max()), 3),
        "slowest_over_mean": round(float(load.work.max() / load.work.mean()), 4),
    }
    if load.merged is not None:
        for name in ("rows", "shared"):
            whole = getattr(load.merged, name).sum() / getattr(load.requests, name).sum()
            found[f"{name}_of_hosts_over_ranks"] = round(float(whole), 3)
    return found


def summarized(result: SimulationResult) -> dict[str, Any]:
    causes = {line.cause: round(line.ms, 1) for line in result.summary.lines if line.share > 0.001}
    return {
        "step_ms": round(result.summary.step_ms, 1),
        "step_ms_likely": [round(value) for value in result.step_ms],
        "bubble_percent": round(result.summary.bubble_percent, 1),
        "bubble_percent_likely": [round(value, 1) for value in result.bubble_percent],
        "samples_per_second": round(result.samples_per_second),
        "collisions": round(result.collisions, 3),
        "moved": round(result.moved, 4),
        "causes_ms": causes,
    }


def at(asked: Scenario, ranks: int, remedies: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": ranks}
    for name, remedy in [(name, REMEDIES[name]) for name in remedies]:
        rules = replace(asked.rules, group_ranks=remedy["group_ranks"])
        model = asked.model.replicate(replicated(asked, ranks)) if "replicates" in remedy else asked.model
        scenario = replace(asked, two_level=bool(remedy["two_level"]), rules=rules, model=model)
        techniques = (ABLATION[0], ABLATION[-1]) if name == "everything" else (ABLATION[-1],)
        for result in simulate(scenario, ranks, techniques):
            found["nothing" if result.techniques == ABLATION[0] else name] = summarized(result)
        found[name] |= terms(scenario, ranks)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024, 4096, 16_384])
    parser.add_argument("--items", type=int, default=10**9)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--remedies", nargs="+", default=[*REMEDIES], choices=[*REMEDIES])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked, results = question(options), []
    for ranks in options.ranks:
        results.append(at(asked, ranks, options.remedies))
        print(json.dumps(results[-1]), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
