"""Compares the step of a model whose items have dynamic ids with that of a fixed vocabulary.

    python benchmarks/dynamic_step.py [--ranks 2] [--rounds 10] [--steps 10] [--out FILE.json]

Trainers take turns of some steps in the same processes, on the same events in the order of the log. 5% of the catalogue
changes daily: dynamic ids change with it, so that slots are given and evicted; in the vocabulary a new item has the id
of the one that it replaces. Both tables have as many rows, all of them in use after the warm-up. `vocabulary again` is
a second trainer with the vocabulary: its ratio to the first is the A/A range. Figures are milliseconds of a step, of
the wall clock and of the CPU time of all ranks. Met if the median ratio is at most 1.03, or inside the A/A range.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune import Lane
from dynamic_quality import drift, write
from freescale.config import DataConfig, FeatureConfig, ModelConfig, RunConfig, TablesConfig, TaskConfig, TrainConfig
from freescale.data.synthetic_drift import DAYS, catalogue_of
from freescale.transport.world import World
from processes import on_ranks
from record import save

LANES = {"vocabulary": "vocabulary", "dynamic": "dynamic", "vocabulary again": "vocabulary"}
MOST, WARM_UP_STEPS = 1.03, 30


def write_logs(folder: Path, options: argparse.Namespace) -> int:
    """Write the events with both kinds of ids; return the rows of the dynamic table."""
    sessions = drift(folder, options.items, options.sessions, seed=0)
    catalogues = np.concatenate([catalogue_of(day, options.items) for day in range(DAYS)])
    ids, first = np.unique(catalogues, return_index=True)
    place = first[np.searchsorted(ids, sessions.item)] % options.items
    for table, item, known in (("dynamic", sessions.item, 0), ("vocabulary", place, sessions.rows)):
        write(sessions, item, known, sessions.day >= 0, folder / table)
    return sessions.rows


def config_of(data: Path, rows: int, options: argparse.Namespace) -> RunConfig:
    features = {"item": FeatureConfig(ids="dynamic", rows=rows, eviction="lru")} if data.name == "dynamic" else {}
    return RunConfig(
        data=DataConfig(path=str(data), split="none", order="log", global_batch=options.samples * options.ranks),
        model=ModelConfig(dim=64, layers=2, heads=2),
        task=TaskConfig(negatives=64, seen="allow"),
        tables=TablesConfig(overlap="on"),
        train=TrainConfig(epochs=10**6, save_every=10**9, log_every=10**6),
        features=features,
    )


def measured(world: World, folder: Path, rows: int, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of every turn by clock and lane."""
    lanes = {
        name: Lane(config_of(folder / table, rows, options), world, folder / name.replace(" ", "-"), None)
        for name, table in LANES.items()
    }
    for lane in lanes.values():
        lane.run(WARM_UP_STEPS)
    times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in lanes} for clock in ("wall", "cpu")}
    for number in range(options.rounds):
        for name in list(lanes) if number % 2 else list(lanes)[::-1]:
            lanes[name].run(1)  # the step after another trainer's is slower
            world.transport.sum(0, name="turn")
            began = time.process_time()
            times["wall"][name].append(lanes[name].run(options.steps))
            spent = torch.tensor([(time.process_time() - began) * 1e3 / options.steps], dtype=torch.float64)
            times["cpu"][name].append(float(world.transport.reduce_values(spent, name="CPU time")))
    return times


def summarize(clock: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and the ratios to the vocabulary: least, median and most."""
    base = times["vocabulary"]
    ratios = {name: [a / b for a, b in zip(of, base, strict=True)] for name, of in times.items() if of is not base}
    over = {name: [min(of), statistics.median(of), max(of)] for name, of in ratios.items()}
    (_, ratio, _), (least, _, most) = over["dynamic"], over["vocabulary again"]
    medians = {name: statistics.median(of) for name, of in times.items()}
    return {"clock": clock, "ms": medians, "over_vocabulary": over, "met": ratio <= MOST or least <= ratio <= most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128, help="of a rank")
    parser.add_argument("--items", type=int, default=4_000, help="of the catalogue of a day")
    parser.add_argument("--sessions", type=int, default=500, help="of a day")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = write_logs(Path(folder), options)
        times = on_ranks(measured, options.ranks, Path(folder), rows, options)
    results = [summarize(clock, of_lanes) for clock, of_lanes in times.items()]
    print(json.dumps(results, indent=1))
    save(options.out, results)


if __name__ == "__main__":
    main()
