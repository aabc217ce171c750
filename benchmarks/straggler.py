"""What balancing gains in a step: the share of time that ranks wait for the slowest one.

    python benchmarks/straggler.py --out benchmarks/results/straggler.json

Two real ranks, 16 samples each, lengths of `heavy` capped at 1,024. A run with real compute measures what a sample
costs here. Then, with emulated compute (sleeps of that length), runs without, with, and again without balance take
turns over the same samples; then the same with real compute. Last, with emulated compute, one rank is made 1.6 times
slower for the first half of a run, with and without `balance.adapt`.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freescale.balance.cost import Cost
from freescale.bench.emulated import EmulatedModel
from freescale.bubbles.ledger import account
from freescale.bubbles.records import read_intervals, read_samples
from freescale.bubbles.summary import summarize
from freescale.config import RunConfig, resolve
from freescale.data import synthetic
from freescale.data.loader import Loader
from freescale.models.protocol import Inputs
from freescale.train.build import build
from freescale.train.sharded_model import build_model
from freescale.transport.world import World
from processes import on_ranks
from record import save

RANKS, SAMPLES, LONGEST = 2, 16, 1024
SLOWER = 1.6
TURNS = (("without", "off"), ("with", "on"), ("without again", "off"))


@dataclass(frozen=True)
class MeasuredCompute:
    """Measured seconds of a step."""

    step: float
    cost: Cost

    def of(self, lengths: Any) -> float:
        """Return the seconds of a rank with samples of these lengths."""
        return self.step + float(self.cost.of(lengths).sum())

    def lane(self, config: RunConfig, slower: Callable[[], float] = lambda: 1.0) -> EmulatedModel:
        """Return an emulated model that takes this time."""

        def seconds(inputs: Inputs) -> tuple[float, float]:
            whole = slower() * self.of(inputs.layout.lengths.numpy())  # type: ignore[attr-defined]
            return whole / 3, whole * 2 / 3

        return EmulatedModel(build_model(config, items=Loader(config.data, seed=0).vocabulary.rows), seconds)


def settings(options: argparse.Namespace, steps: int, seed: int, *words: str) -> RunConfig:
    fields = {
        "seed": seed,
        "data.path": options.data,
        "data.max-history": LONGEST,
        "data.global-batch": RANKS * SAMPLES,
        "data.split": "none",
        "model.dim": options.dim,
        "model.layers": 2,
        "task.negatives": 32,
        "tables.overlap": "off",
        "train.max-steps": steps,
        "train.epochs": 100,
        "train.save-every": 10**9,
        "train.log-every": 10**6,
    }
    return resolve("tiny", [*(word for name, value in fields.items() for word in (f"--{name}", str(value))), *words])


def trained(config: RunConfig, world: World, folder: Path, model: EmulatedModel | None = None) -> Any:
    """Train and return the trainer."""
    trainer = build(config, world, folder, model=model)
    trainer.fit()
    return trainer


def shares(folder: Path) -> dict[str, float]:
    """Return the step time and the causes that balancing affects."""
    found = summarize(read_intervals(folder))
    ms = {line.cause: line.ms for line in found.lines}
    return {
        "step_ms": found.step_ms,
        "straggler": found.straggler_percent / 100,
        "exposed_ms": ms["samples"] + ms["data"] + ms["host"],
        "compute_ms": ms["forward"] + ms["backward"],
    }


def calibrated(world: World, options: argparse.Namespace, folder: Path) -> tuple[MeasuredCompute, float]:
    """Return the cost of a sample from a run with real compute, and its error; the same on all ranks."""
    config = settings(options, options.calibration_steps, 99, "--balance.adapt")
    planner = trained(config, world, folder).components.planner
    found = planner.calibration
    return MeasuredCompute(found.step, found.cost), found.error


def in_turns(
    world: World, options: argparse.Namespace, folder: Path, compute: MeasuredCompute, *, emulated: bool
) -> dict[str, Any]:
    """Run without, with, and again without balancing over the same samples; then over other samples."""
    words = ["--balance.cost", *map(str, compute.cost.constants)]
    found: dict[str, list[dict[str, float]]] = {name: [] for name, _ in TURNS}
    plans = []
    for turn in range(options.turns):
        for name, mode in TURNS:
            config = settings(options, options.steps, turn, *words, "--balance.mode", mode)
            place = folder / f"{'emulated' if emulated else 'real'}-{turn}-{name}"
            trainer = trained(config, world, place, compute.lane(config) if emulated else None)
            found[name].append(shares(place) if world.is_rank_zero else {})
            if mode == "on":
                plans.append(trainer.components.planner.means)
    return compared(found, plans, compute) if world.is_rank_zero else {}


def _predicted_gain(without: dict[str, float], plan: dict[str, float], compute: MeasuredCompute) -> float:
    """Predict the gain: the slowest rank computes less."""
    work = without["compute_ms"] - 1e3 * compute.step
    return without["step_ms"] / (without["step_ms"] - work * (plan["max_over_mean_before"] - plan["max_over_mean"]))


def compared(found: dict[str, list[dict[str, float]]], plans: list[Any], compute: MeasuredCompute) -> dict[str, Any]:
    """Medians over turns, and ratios within a turn."""
    without, balanced, again = found.values()
    pairs = list(zip(without, balanced, again, strict=True))

    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 4)

    return {
        "straggler_without": median(a["straggler"] for a, _, _ in pairs),
        "straggler_with": median(b["straggler"] for _, b, _ in pairs),
        "straggler_falls_by": median(1 - b["straggler"] / ((a["straggler"] + c["straggler"]) / 2) for a, b, c in pairs),
        "straggler_without_again_over_without": median(c["straggler"] / a["straggler"] for a, _, c in pairs),
        "step_ms_without": median(a["step_ms"] for a, _, _ in pairs),
        "step_ms_with": median(b["step_ms"] for _, b, _ in pairs),
        "exposed_ms_without": median(a["exposed_ms"] for a, _, _ in pairs),
        "exposed_ms_with": median(b["exposed_ms"] for _, b, _ in pairs),
        "exposed_added": median(
            (b["exposed_ms"] - (a["exposed_ms"] + c["exposed_ms"]) / 2) / b["step_ms"] for a, b, c in pairs
        ),
        "throughput_gain": median((a["step_ms"] + c["step_ms"]) / 2 / b["step_ms"] for a, b, c in pairs),
        "throughput_gain_again": median(a["step_ms"] / c["step_ms"] for a, _, c in pairs),
        "throughput_gain_predicted": median(
            _predicted_gain(a, p, compute) for a, p in zip(without, plans, strict=True)
        ),
        "slowest_over_mean_planned": median(p["max_over_mean"] for p in plans),
        "slowest_over_mean_without": median(p["max_over_mean_before"] for p in plans),
        "moved_tokens": median(p["moved_tokens"] for p in plans),
    }


def idle(folder: Path, begin: int, end: int) -> float:
    """Return the share of time that ranks wait for slower ones, over the sampled steps of a range."""
    waited = wall = 0
    for step, samples in read_samples(folder).items():
        for ledger in (account(sample.step, sample.last) for sample in samples if begin < step <= end):
            waited, wall = waited + ledger.cause_ns("straggler"), wall + ledger.wall
    return waited / wall


def slow_rank(world: World, options: argparse.Namespace, folder: Path, compute: MeasuredCompute) -> dict[str, Any]:
    """The last rank is slower for the first half of a run."""
    half, found = options.adapt_steps // 2, []
    for turn in range(options.turns):
        line: dict[str, float] = {}
        for adapt in (False, True):
            words = ["--balance.cost", *map(str, compute.cost.constants), *(["--balance.adapt"] if adapt else [])]
            config = settings(options, 2 * half, turn, *words)
            steps = itertools.count(1)
            slow = world.rank == world.world_size - 1

            def slower(steps: Iterator[int] = steps, slow: bool = slow) -> float:
                return SLOWER if slow and next(steps) <= half else 1.0

            place = folder / f"slow-{turn}-{adapt}"
            trained(config, world, place, compute.lane(config, slower))
            if world.is_rank_zero:
                name = "adapting" if adapt else "fixed"
                line |= {f"{name}_slow": idle(place, 20, half), f"{name}_recovered": idle(place, half + 20, 2 * half)}
        found.append(line)
    if not world.is_rank_zero:
        return {}
    means = {f"idle_{name}": round(statistics.median(line[name] for line in found), 4) for name in found[0]}
    falls = statistics.median(1 - line["adapting_slow"] / line["fixed_slow"] for line in found)
    return means | {"idle_falls_by": round(falls, 4)}


def on_rank(world: World, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    compute, error = calibrated(world, options, folder / "calibration")
    constants = {"step": compute.step} | dict(zip(("sample", "token", "pair"), compute.cost.constants, strict=True))
    return [
        {"calibration": {name: float(f"{value:.4g}") for name, value in constants.items()}, "off": round(error, 4)},
        {"compute": "emulated"} | in_turns(world, options, folder, compute, emulated=True),
        {"compute": "real"} | in_turns(world, options, folder, compute, emulated=False),
        {"compute": "emulated", "slower_rank": SLOWER} | slow_rank(world, options, folder, compute),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--adapt-steps", type=int, default=80)
    parser.add_argument("--calibration-steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.data = f"{folder}/data"
        synthetic.write_log(options.data, "heavy", users=6000, catalogue=4_000)
        results = on_ranks(on_rank, RANKS, options, Path(folder))
    for result in results:
        print(json.dumps(result))
    save(options.out, results)


if __name__ == "__main__":
    main()
