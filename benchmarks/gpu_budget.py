"""Counts kernel launches and host synchronizations of a training step, by thread and source line.

    python benchmarks/gpu_budget.py [--ranks 2] [--steps 6] [--precision fp32] [--json] [--out FILE.json]

Runs the trainer on virtual GPUs (see tests/support/vgpu), which count what a GPU would be asked to do. A step here is
the last one. `main_syncs`, `deferred_syncs`: how often the host waits for the device in the thread of the step and in
that of deferred transfers. `launches`: kernels of a step, all threads. `reports`: faults of stream order.
"""

import argparse
import itertools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.datasets import histories, write_dataset
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small

from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.step import LearningRates
from record import save

DEFERRED = "freescale-deferred"


def count_step(world: World, data: str, folder: str, precision: str, steps: int) -> dict[str, Any]:
    """Train on this rank; return the counts of the last step."""
    from tests.support.vgpu import device

    config = small(data, train={"precision": precision}, tables={"overlap": "on"})
    trainer = build(config, joined(world), Path(folder), quiet=True)
    rates = LearningRates(dense=config.train.lr, tables=config.tables.lr)
    loader = list(Loader(config.data, seed=config.seed, rank=world.rank, world_size=world.ranks))
    batches = list(itertools.islice(itertools.cycle(loader), steps + 1))
    for number, (batch, following) in enumerate(itertools.pairwise(batches), start=1):
        if number == steps:
            device.launches.clear()
            device.waits.clear()
        trainer.components.step.run(batch, rates, following=following)
    waits, launches = device.waits.copy(), device.launches.copy()
    trainer.components.step.synchronize()
    return {
        "main_syncs": sum(n for (thread, _, _), n in waits.items() if thread != DEFERRED),
        "deferred_syncs": sum(n for (thread, _, _), n in waits.items() if thread == DEFERRED),
        "launches": sum(launches.values()),
        "layers": config.model.layers,
        "reports": sum(device.gpu.memory.reports.values()),
        "syncs_by_line": _table(waits),
        "launches_by_line": _table(launches),
    }


def _table(counts: Counter[tuple[str, str, str]]) -> list[list[Any]]:
    return [[*key, count] for key, count in counts.most_common()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp64"], default="fp32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ranks = Ranks(options.ranks, on_virtual_gpus=True)
    with tempfile.TemporaryDirectory() as folder:
        lengths = np.random.default_rng(0).choice([1, 2, 3, 5, 8, 20, 60], 137).tolist()
        data = Path(folder) / "data"
        write_dataset(data, histories(lengths, items=40, candidates=True), rows_per_group=4, items=40)
        counted, *_ = ranks.run(count_step, str(data), f"{folder}/run", options.precision, options.steps)
    ranks.close()
    tables = {"syncs_by_line", "launches_by_line"}
    if options.json:
        print(json.dumps({name: value for name, value in counted.items() if name not in tables}))
    else:
        for name in sorted(tables):
            print(name)
            for thread, line, what, count in counted[name][:40]:
                print(f"  {count:5d}  {thread:20s} {line:45s} {what}")
        print({name: value for name, value in counted.items() if name not in tables})
    save(options.out, [counted])


if __name__ == "__main__":
    main()
