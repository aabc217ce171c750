"""Compares `tables.overlap = "auto"` with every fixed setting, on the lanes of `benchmarks/step.py`.

    python benchmarks/autotune.py [--presets heavy kuairand] [--rounds 12] [--out benchmarks/results/autotune.json]

Every setting has a trainer of its own on the same samples. After 30 steps, in which `auto` selects its setting, all
take turns of a few steps. `auto again` is a second trainer with automatic selection: the ratio of both is the noise of
the comparison. Met if the median of auto over the best fixed setting is at most 1.02, or inside the range of that
ratio.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.lab import lab

from freescale.bench.emulated import EmulatedCompute, calibrate_compute
from freescale.config import RunConfig
from freescale.config.schema import TransportName
from freescale.data import synthetic
from freescale.data.loader import Loader
from freescale.overlap.autotune import TRIAL_STEPS, Setting
from freescale.train.build import build
from freescale.train.sharded_model import build_model_for
from freescale.transport.selection import TransportFactory
from freescale.transport.world import World
from processes import on_ranks
from record import save
from step import PRESETS, settings


class Lane:
    """A trainer that runs a few steps at a time, as `Trainer.fit` does."""

    def __init__(self, config: RunConfig, world: World, folder: Path, compute: EmulatedCompute | None) -> None:
        model = build_model_for(config, Loader.from_run(config))
        self._trainer = build(
            config, world, folder, model=model if compute is None else compute.emulate(model), quiet=True
        )
        self._batches = itertools.chain.from_iterable(itertools.repeat(self._trainer.components.loader))
        self._item = next(self._batches)
        self.selected = ""

    def run(self, steps: int) -> float:
        """Return the milliseconds of a step."""
        components, began = self._trainer.components, time.perf_counter()
        for _ in range(steps):
            batch, following = self._item, None
            if components.autotuner.begin_step():
                following = next(self._batches)
            components.step.run(batch, self._trainer._learning_rates(), following=following)
            components.autotuner.end_step(self._select)
            self._item = next(self._batches) if following is None else following
        components.step.synchronize()
        return 1e3 * (time.perf_counter() - began) / steps

    def _select(self, setting: Setting, _: dict[str, float]) -> None:
        self.selected = str(setting)


def variants(config: RunConfig, world: World) -> dict[str, RunConfig]:
    """The config with each fixed setting, and with automatic selection."""
    names: list[TransportName] = [name for name in TransportFactory(world).available if name != "host_staged"]  # type: ignore[misc]
    found = {"auto": replace(config, tables=replace(config.tables, overlap="auto"))}
    for name in names:
        transport = replace(config.transport, urgent=name, deferred=name)
        for overlap in ("off", "on"):
            tables = replace(config.tables, overlap=overlap)
            found[f"overlap {overlap} over {name}"] = replace(config, tables=tables, transport=transport)
    return found | {"auto again": found["auto"]}


def measured(world: World, config: RunConfig, folder: Path, options: argparse.Namespace, emulated: bool) -> Any:
    compute = calibrate_compute(config, world)
    config = replace(config, balance=replace(config.balance, cost=compute.cost.constants))
    lanes = {
        name: Lane(variant, world, folder / name.replace(" ", "-"), compute if emulated else None)
        for name, variant in variants(config, world).items()
    }
    for lane in lanes.values():
        lane.run(TRIAL_STEPS + 1)
    times: dict[str, list[float]] = {name: [] for name in lanes}
    for number in range(options.rounds):
        names = list(lanes) if number % 2 else list(lanes)[::-1]
        for name in names:
            lanes[name].run(1)  # the step after another trainer's is slower
            world.transport.sum(0, name="turn")
            times[name].append(lanes[name].run(options.steps))
    if not world.is_rank_zero:
        return None
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    best = min((name for name in medians if not name.startswith("auto")), key=lambda name: medians[name])
    ratio = statistics.median(a / b for a, b in zip(times["auto"], times[best], strict=True))
    again = [a / b for a, b in zip(times["auto again"], times["auto"], strict=True)]
    floor = min(again), statistics.median(again), max(again)
    figures = {"ms": medians, "best": best, "auto_over_best": ratio, "auto_again_over_auto": floor}
    met = ratio <= 1.02 or floor[0] <= ratio <= floor[2]
    return figures | {"selected": [lanes["auto"].selected, lanes["auto again"].selected], "met": met}


def of_preset(preset: synthetic.Preset, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Figures of one lane after another."""
    shorter, samples = PRESETS[preset]
    synthetic.write_log(folder / "data", preset, users=20_000, catalogue=options.items, shorter=shorter)
    lanes = [(ranks, "emulated") for ranks in options.ranks] + ([(2, "real")] if options.real else [])
    for ranks, lane in lanes:
        config = settings(options, folder / "data", options.samples or samples, ranks)
        config = replace(config, train=replace(config.train, max_steps=0, epochs=10**6))
        with lab(ranks) if lane == "emulated" else nullcontext() as hosts:
            if hosts is not None:
                hosts.shape(options.mbit)
            found = on_ranks(
                measured, ranks, config, folder / f"{ranks}-{lane}", options, lane == "emulated", lab=hosts
            )
        yield {"preset": preset, "world_size": ranks, "compute": lane} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="with emulated compute")
    parser.add_argument("--mbit", type=float, default=400, help="of the links between the hosts")
    parser.add_argument("--items", type=int, default=1_000_000, help="of the catalogue")
    parser.add_argument("--samples", type=int, help="of a rank")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--negatives", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-real", dest="real", action="store_false", help="leave real compute out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for preset in options.presets:
        with tempfile.TemporaryDirectory() as folder:
            for result in of_preset(preset, options, Path(folder)):
                results.append(result)
                print(json.dumps(result), flush=True)
                save(options.out, results)  # as soon as there are some


if __name__ == "__main__":
    main()
