"""How well samples are placed, how much moves for it, and how long planning takes.

Cost of a sample: 6 L d^2 + L^2 d, d = 256; batches of 128 per rank, drawn at random; no cap on lengths. Beside ours:
zig-zag (the paper's), LPT and, with equal counts, Karmarkar-Karp, which all deal from a global sort and move nearly
everything. Lengths of public logs are read from files with one length per line:

python benchmarks/balance.py --lengths ml-1m=ml-1m.txt gowalla=gowalla.txt --out benchmarks/results/balance.json
"""

import argparse
import heapq
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.support.threads import waits

from freescale.balance.assign import assign
from freescale.balance.placement import Placement
from freescale.data import synthetic
from record import save

BATCH, DIM = 128, 256
Floats, Ints = NDArray[np.float64], NDArray[np.int64]


def cost(lengths: Ints) -> Floats:
    return 6.0 * lengths * DIM**2 + 1.0 * lengths**2 * DIM


def karmarkar_karp(costs: Floats, ranks: int) -> float:
    """Largest difference first, with equal counts: time of the slowest rank over the mean."""
    order = np.sort(costs)[::-1].reshape(-1, ranks)
    parts = [(-float(np.ptp(row)), number, row) for number, row in enumerate(order)]
    heapq.heapify(parts)
    for number in range(len(parts), 2 * len(parts) - 1):
        one, two = heapq.heappop(parts)[2], heapq.heappop(parts)[2]
        joined = np.sort(one)[::-1] + np.sort(two)
        heapq.heappush(parts, (-float(np.ptp(joined)), number, joined))
    return float(parts[0][2].max() / parts[0][2].mean())


def quality(name: str, pool: Ints, ranks: int, steps: int) -> dict[str, Any]:
    """Means over steps."""
    rng, homes = np.random.default_rng(ranks), np.repeat(np.arange(ranks), BATCH)
    found: dict[str, list[float]] = {}

    def note(kind: str, value: float) -> None:
        found.setdefault(kind, []).append(value)

    for _ in range(steps):
        lengths = pool[rng.integers(0, len(pool), ranks * BATCH)]
        costs = cost(lengths)
        placed: dict[str, Placement] = {"free": assign(costs, homes, world_size=ranks, tokens=lengths)}
        if ranks <= 256:
            placed["equal"] = assign(costs, homes, world_size=ranks, tokens=lengths, equal_counts=True)
            placed["lpt_equal"] = assign(
                costs, homes, world_size=ranks, tokens=lengths, equal_counts=True, strategy="lpt"
            )
            note("kk_equal", karmarkar_karp(costs, ranks))
        placed["zigzag"] = assign(costs, homes, world_size=ranks, tokens=lengths, strategy="zigzag")
        loads = np.bincount(homes, weights=costs)
        note("random", float(loads.max() / loads.mean()))
        note("bound", placed["free"].lower_bound)
        note("free_over_bound", placed["free"].max_over_mean / placed["free"].lower_bound)
        for kind, one in placed.items():
            note(kind, one.max_over_mean)
            note(f"{kind}_moved_tokens", one.moved_tokens)
    means = {kind: round(statistics.mean(values), 4) for kind, values in found.items()}
    return {"lengths": name, "ranks": ranks, "steps": steps} | means


def planning(pool: Ints, ranks: int, repeats: int) -> dict[str, Any]:
    """Seconds of a plan against a stable sort of the same costs, in turns, and how long others wait beside it."""
    lengths = pool[np.random.default_rng(0).integers(0, len(pool), ranks * BATCH)]
    costs, homes = cost(lengths), np.repeat(np.arange(ranks), BATCH)
    ratios, plans, gaps = [], [], []
    for _ in range(repeats):
        began = time.perf_counter()
        assign(costs, homes, world_size=ranks, tokens=lengths)
        middle = time.perf_counter()
        np.argsort(costs, kind="stable")
        ratios.append((middle - began) / (time.perf_counter() - middle))
        plans.append(middle - began)
        gaps += waits(lambda: assign(costs, homes, world_size=ranks, tokens=lengths))
    return {
        "ranks": ranks,
        "samples": len(costs),
        "plan_ms": round(1e3 * statistics.median(plans), 1),
        "over_stable_argsort": round(statistics.median(ratios), 2),
        "longest_wait_beside_it_ms": round(1e3 * max(gaps), 2),
        "waits_99_percent_ms": round(1e3 * float(np.quantile(gaps, 0.99)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="*", default=[], help="NAME=FILE, one length per line")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 256, 2048])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    pools = {
        "kuairand": synthetic.draw_lengths("kuairand", 200_000, rng),
        "heavy": synthetic.draw_lengths("heavy", 200_000, rng),
    }
    for word in options.lengths:
        name, _, path = word.partition("=")
        pools[name] = np.loadtxt(path, dtype=np.int64)
    results = []
    for name, pool in pools.items():
        for ranks in options.ranks:
            results.append(quality(name, pool, ranks, options.steps * (5 if ranks == 8 else 1)))
            print(json.dumps(results[-1]))
    for name, pool in pools.items():
        for ranks in options.ranks:
            results.append({"planning": name} | planning(pool, ranks, options.repeats))
            print(json.dumps(results[-1]))
    save(options.out, results)


if __name__ == "__main__":
    main()
