"""How well samples are placed, how much moves for it, and how long planning takes.

Cost of a sample: 6 L d^2 + L^2 d, d = 256; batches of 128 per rank, drawn at random; no cap on lengths. Beside ours:
zig-zag (the paper's), LPT and, with equal counts, Karmarkar-Karp, which all deal from a global sort and move nearly
everything. Lengths of public logs are read from files with one length per line:

python benchmarks/balance.py --lengths ml-1m=ml-1m.txt gowalla=gowalla.txt --out benchmarks/results/balance.json

`--small-batches` measures few samples per rank with kuairand's lengths, and costs of which few samples hold most: 1, 2
or 5% are 20,000 long, the others 1 to 400. Movement is compared with two floors. The excess floor: a rank above the
limit, which is the bound plus the tolerance, has to give up whole samples that cover its excess; it sums the fewest
tokens that do so, exact by dynamic programming, and leaves out where the samples go. The shared floor counts that too
where long samples must share ranks: a rank that takes one has to give up short ones. `--shapes`, `--lumpy-shapes` and
`--seeds` shorten it:

python benchmarks/balance.py --small-batches --out benchmarks/results/balance_small_batches.json
"""

import argparse
import heapq
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
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
TOLERANCE = 0.005
SMALL = ["256x4", "256x8", "64x8", "8x8", "256x16", "256x128", "2048x8"]
LUMPY = ["64x128", "256x128"]
LONG_SHARES = (0.01, 0.02, 0.05)
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


def fewest_tokens(costs: Floats, tokens: Ints, excess: float) -> int:
    """Fewest tokens of whole samples whose costs cover an excess: the best cost for every number of tokens."""
    largest = np.argsort(-costs, kind="stable")
    needed = int(np.searchsorted(np.cumsum(costs[largest]), excess)) + 1
    most = int(min(tokens[largest[:needed]].sum(), tokens[costs >= excess].min(initial=tokens.sum())))
    best = np.zeros(most + 1)
    for size, worth in zip(tokens.tolist(), costs.tolist(), strict=True):
        if size <= most:
            best[size:] = np.maximum(best[size:], best[: most + 1 - size] + worth)
    return int(np.argmax(best >= excess * (1 - 1e-12)))


def excess_floor(costs: Floats, tokens: Ints, homes: Ints, limit: float) -> Ints:
    """Tokens that have to leave each rank: what covers its excess over the limit."""
    excess = np.bincount(homes, weights=costs) - limit
    fewest = np.zeros(len(excess), dtype=np.int64)
    for rank in np.flatnonzero(excess > 0):
        fewest[rank] = fewest_tokens(costs[homes == rank], tokens[homes == rank], excess[rank])
    return fewest


def shared_floor(costs: Floats, tokens: Ints, homes: Ints, limit: float, least: Ints) -> int:
    """Tokens that have to move because long samples must share ranks; not below those of `least`, the excess floor.

    A sample is long if no k + 1 of such fit on a rank. Then ranks hold k at most, and with more than k - 1 per rank on
    average so many ranks must hold k: these give up short samples to fit. All choices of these ranks are covered by
    taking those for which it costs least.
    """
    ranks, descending = len(least), np.argsort(-costs, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(costs[descending])])
    best = int(least.sum())
    for k in range(1, len(costs) // ranks + 1):
        count = int(np.count_nonzero(sums[k + 1 :] - sums[: -k - 1] > limit))
        long = descending[: count + k] if count else descending[:0]
        must_hold = len(long) - (k - 1) * ranks
        if must_hold <= 0:
            continue
        is_short = np.ones(len(costs), dtype=bool)
        is_short[long] = False
        held, least_tokens = np.bincount(homes[long], minlength=ranks), tokens[long].min()
        shorts = excess_floor(costs[is_short], tokens[is_short], homes[is_short], limit - k * costs[long].min())
        holding = np.maximum(least, np.maximum(held - k, 0) * least_tokens + shorts)
        others = np.maximum(least, np.maximum(held - k + 1, 0) * least_tokens)
        more = np.sort(holding - others)
        best = max(best, int(others.sum() + more[:must_hold].sum() + np.minimum(more[must_hold:], 0).sum()))
    return best


def cpu_ms(work: Callable[[], object], repeats: int) -> float:
    """Least CPU time of some runs."""
    took = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return 1e3 * min(took)


def small_batches(
    name: str, draw: Callable[[int, np.random.Generator], Ints], shape: str, seeds: int
) -> dict[str, Any]:
    """Balance, movement over its floor and planning time of one shape, over seeds."""
    ranks, batch = map(int, shape.split("x"))
    homes, rows = np.repeat(np.arange(ranks), batch), []
    for seed in range(seeds):
        lengths = draw(ranks * batch, np.random.default_rng(seed))
        costs = cost(lengths)
        plan = partial(assign, costs, homes, world_size=ranks, tokens=lengths, tolerance=TOLERANCE)
        placed, lpt = plan(), plan(strategy="lpt")
        limit = (1 + TOLERANCE) * placed.lower_bound
        plan_ms, sort_ms = cpu_ms(plan, 3), cpu_ms(lambda costs=costs: np.argsort(costs, kind="stable"), 5)
        total, most = int(lengths.sum()), limit * float(costs.sum()) / ranks
        excess = excess_floor(costs, lengths, homes, most)
        shared = shared_floor(costs, lengths, homes, most, excess)
        rows.append(
            {
                "max_over_bound": placed.max_over_mean / placed.lower_bound,
                "max_over_lpt_or_limit": placed.max_over_mean / max(lpt.max_over_mean, limit),
                "moved_tokens": placed.moved_tokens,
                "excess_floor": int(excess.sum()) / total,
                "moved_over_excess_floor": placed.moved_tokens * total / int(excess.sum()),
                "moved_over_shared_floor": placed.moved_tokens * total / shared,
                "plan_cpu_ms": plan_ms,
                "plan_over_stable_argsort": plan_ms / sort_ms,
            }
        )
    found: dict[str, Any] = {"lengths": name, "ranks": ranks, "batch": batch, "seeds": seeds}
    for kind in rows[0]:
        values = [row[kind] for row in rows]
        found |= {kind: round(statistics.mean(values), 4), f"{kind}_worst": round(max(values), 4)}
    return found


def lumpy(share: float, count: int, rng: np.random.Generator) -> Ints:
    """Few samples that hold nearly all cost."""
    return np.where(rng.random(count) < share, 20_000, rng.integers(1, 401, count))


def measure_small_batches(shapes: list[str], lumpy_shapes: list[str], seeds: int) -> list[dict[str, Any]]:
    pool = synthetic.draw_lengths("kuairand", 200_000, np.random.default_rng(0))
    cases = [("kuairand", lambda count, rng: pool[rng.integers(0, len(pool), count)], shape) for shape in shapes]
    cases += [
        (f"{share:.0%} of 20,000", partial(lumpy, share), shape) for share in LONG_SHARES for shape in lumpy_shapes
    ]
    results = []
    for case in cases:
        results.append(small_batches(*case, seeds))
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="*", default=[], help="NAME=FILE, one length per line")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 256, 2048])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--small-batches", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=SMALL, help="RANKSxSAMPLES of --small-batches, kuairand")
    parser.add_argument("--lumpy-shapes", nargs="*", default=LUMPY, help="the same, few samples with most of the cost")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.small_batches:
        save(options.out, measure_small_batches(options.shapes, options.lumpy_shapes, options.seeds))
        return
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
