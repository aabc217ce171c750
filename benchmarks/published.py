"""Compares the simulator with published runs: their settings are inputs, and nothing is fitted.

    python benchmarks/published.py --out benchmarks/results/published.json

Unpublished settings are drawn from a stated range; results are the median and the 10% and 90% quantiles.

FreeScale (MLSys 2026, as reported by third parties): up to 256 H100, 8 x 200 Gb/s, histories up to 21,000 or 8,000,
batches of 128; row-wise tables. Not published: lengths, widths, layers, features, how many ids repeat.
recsys-examples (NVIDIA, its HSTU benchmark): 16 H100, batches of 32, lengths Zipf 1.2 up to 4,096, 8 layers of 1,024
with 4 heads, an item and an action per event, equal numbers of samples on all ranks.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freescale.balance.cost import Cost
from freescale.bubbles.summary import Summary
from freescale.config import BalanceConfig
from freescale.data import synthetic
from freescale.simulate import cluster
from freescale.simulate.operations import DeviceModel
from freescale.simulate.whatif import ABLATION, Scenario, Techniques, simulate_steps
from freescale.simulate.workload import ModelCost, SampledStep, TableCost, extend_steps, plan_step, sample_steps
from record import save

Floats = NDArray[np.float64]
RANGES = {
    "sigma": (0.75, 1.1),  # of the logarithm of lengths; KuaiRand-1K has 0.93
    "dim": (256, 1024),
    "layers": (4, 12),
    "features": (1, 8),  # rows per event, each in a table of its own
    "distinct": (0.26, 0.47),  # of a rank's ids: counted for production popularity with 10^6 to 10^7 items
    "collisions": (0.02, 0.12),  # as reported
}
TRAFFIC = ("ids", "urgent rows", "deferred rows", "row gradients", "other traffic")
NOTHING, BALANCE, EVERYTHING = ABLATION[0], ABLATION[1], ABLATION[-1]


@dataclass(frozen=True)
class Known:
    """Rows of which only shares are known: distinct ones of the ids, and shared ones of those."""

    per_event: float
    collisions: float

    def rows(self, events: Floats) -> Floats:
        return self.per_event * events

    def shared(self, events: Floats, before: float) -> Floats:
        return self.collisions * self.rows(events) * (before > 0)


class Setting(NamedTuple):
    """A run as somebody else did it, with one draw of what they did not say."""

    model: ModelCost
    lengths: NDArray[np.int64]
    batch: int
    rules: BalanceConfig = BalanceConfig()


def paper(rng: np.random.Generator, longest: int, **other: tuple[float, float]) -> Setting:
    """The FreeScale paper's, at some longest history. `other`: ranges instead of those above."""
    drawn = {name: float(rng.uniform(low, high)) for name, (low, high) in (RANGES | other).items()}
    dim, layers = 64 * round(drawn["dim"] / 64), round(drawn["layers"])
    cost = Cost.hstu(dim=dim, layers=layers, heads=4)
    dense = 4 * cost.token
    model = ModelCost(
        cost=cost,
        products=1.0,
        dense_bytes=dense,
        last_bytes=min(dense, 25 << 20),
        tables=(
            TableCost(
                dim=dim,
                popularity=Known(drawn["features"] * drawn["distinct"], drawn["collisions"]),
                looked_up=round(drawn["features"]),
            ),
        ),
    )
    lengths = np.clip(rng.lognormal(8.93, drawn["sigma"], 20_000), 1, longest).astype(np.int64)
    return Setting(model, lengths, 128)


def recsys_examples(rng: np.random.Generator) -> Setting:
    """NVIDIA's. Their attention kernel was slower than their products; by how much is drawn."""
    cost = Cost.hstu(dim=1024, layers=8, heads=4)
    slower = float(rng.uniform(1.0, 6.0))
    model = ModelCost(
        cost=replace(cost, pair=slower * cost.pair),
        products=1.0,
        dense_bytes=4 * cost.token,
        last_bytes=25 << 20,
        tables=(TableCost(dim=128, popularity=Known(0.7, 0.5), looked_up=1),),
    )
    return Setting(model, 2 * synthetic.draw_lengths("heavy", 20_000, rng), 32, BalanceConfig(counts="equal"))


def simulated(setting: Setting, ranks: int, where: str, techniques: Techniques, seed: int) -> Summary:
    """Some steps of one draw."""
    rng = np.random.default_rng([seed, 1])  # not that of the settings
    found = cluster.load(where).draw(rng)
    values, counts = np.unique(setting.lengths, return_counts=True)
    drawn: list[SampledStep] = list(
        sample_steps(values, counts, world_size=ranks, batch=setting.batch, steps=5, rng=rng)
    )
    loads = [
        plan_step(one, setting.model, world_size=ranks, rules=setting.rules if techniques.balance else None)
        for one in drawn
    ]
    machine = DeviceModel.from_cluster(found, setting.model)
    question = Scenario(setting.model, values, counts, setting.batch, found, lambda _: machine)
    return simulate_steps(question, found, ranks, techniques, extend_steps(loads, 13, rng), rng)


def spread(
    draws: int, setting: Callable[[np.random.Generator], Setting], figure: Callable[[Setting, int], float]
) -> list[float]:
    """Of many draws: a tenth is below the first, half below the second, a tenth above the third."""
    found = [figure(setting(np.random.default_rng(seed)), seed) for seed in range(draws)]
    return [round(value, 4) for value in np.quantile(found, [0.1, 0.5, 0.9]).tolist()]


def exposed(summary: Summary) -> float:
    """Milliseconds of a step that wait for embeddings."""
    return sum(line.ms for line in summary.lines if line.cause in TRAFFIC)


def stragglers(draws: int) -> list[dict[str, Any]]:
    """22% -> 2.4% at 64 ranks, and more at 256."""
    published = {(64, "nothing"): 22.0, (64, "balance"): 2.4}
    return [
        {
            "what": "straggler, % of a step, histories up to 21,000",
            "ranks": ranks,
            "with": techniques.name,
            "published": published.get((ranks, techniques.name), "grows"),
            "predicted": spread(
                draws,
                lambda rng: paper(rng, 21_000),
                lambda s, seed, r=ranks, t=techniques: simulated(s, r, "h100-200g", t, seed).straggler_percent,
            ),
        }
        for ranks in (64, 256)
        for techniques in (NOTHING, BALANCE)
    ]


def embeddings(draws: int) -> list[dict[str, Any]]:
    """111 -> 13 ms at histories up to 8,000, on 64 ranks."""

    def waits(techniques: Techniques) -> Callable[[Setting, int], float]:
        return lambda s, seed: exposed(simulated(s, 64, "h100-200g", techniques, seed))

    before, after = waits(BALANCE), waits(Techniques(True, True, True))
    lines = {"nothing hidden": (111.0, before), "priority": (13.0, after)}
    lines["left, as a share"] = (0.117, lambda s, seed: after(s, seed) / before(s, seed))
    return [
        {
            "what": "embedding traffic exposed, ms of a step, histories up to 8,000",
            "ranks": 64,
            "with": name,
            "published": published,
            "predicted": spread(draws, lambda rng: paper(rng, 8_000), figure),
        }
        for name, (published, figure) in lines.items()
    ]


def shuffler(draws: int) -> list[dict[str, Any]]:
    """1.53x of 16 ranks by balancing."""

    def gain(setting: Setting, seed: int) -> float:
        without, balanced = (simulated(setting, 16, "h100", t, seed).step_ms for t in (NOTHING, BALANCE))
        return without / balanced

    predicted = spread(draws, recsys_examples, gain)
    return [
        {"what": "throughput by balancing", "ranks": 16, "with": "balance", "published": 1.53, "predicted": predicted}
    ]


def headline(draws: int, ranks: int) -> list[dict[str, Any]]:
    """Up to 90.3% fewer bubbles on 256 H100, at histories up to 21,000."""

    def percent(techniques: Techniques) -> Callable[[Setting, int], float]:
        return lambda s, seed: simulated(s, ranks, "h100-200g", techniques, seed).bubble_percent

    def bubbles_ms(setting: Setting, techniques: Techniques, seed: int) -> float:
        found = simulated(setting, ranks, "h100-200g", techniques, seed)
        return found.step_ms * found.bubble_percent / 100

    def fewer(techniques: Techniques) -> Callable[[Setting, int], float]:
        return lambda s, seed: 100 * (1 - bubbles_ms(s, techniques, seed) / bubbles_ms(s, NOTHING, seed))

    def line(name: str, techniques: Techniques, **other: tuple[float, float]) -> dict[str, Any]:
        def setting(rng: np.random.Generator) -> Setting:
            return paper(rng, 21_000, **other)

        return {
            "what": "bubbles, histories up to 21,000",
            "ranks": ranks,
            "with": name,
            "published": 90.3 if techniques == EVERYTHING else None,
            "percent_of_step": spread(draws, setting, percent(techniques)),
            "percent_fewer_than_nothing": spread(draws, setting, fewer(techniques)),
        }

    lines = [line(techniques.name, techniques) for techniques in ABLATION]
    return [*lines, line("everything, if 54-78% of the rows collide", EVERYTHING, collisions=(0.54, 0.78))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=256, help="of the headline")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [
        *stragglers(options.draws),
        *embeddings(options.draws),
        *shuffler(options.draws),
        *headline(options.draws, options.ranks),
    ]
    for result in results:
        print(json.dumps(result))
    save(options.out, results)


if __name__ == "__main__":
    main()
