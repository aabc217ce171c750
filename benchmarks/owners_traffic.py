"""What the owners of rows do to row traffic: 4 ranks on 4 hosts (network namespaces), steps on emulated compute.

    freescale data import amazon gowalla.txt data/gowalla
    python benchmarks/owners_traffic.py data/gowalla [--out benchmarks/results/owners_traffic.json]

Before: items numbered by their key, contiguous blocks of rows. After: numbered by popularity, dealt in zig-zag. Both
take turns on the same users, without overlap, so that all row traffic is exposed. `before again` gives the noise.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from tests.support.lab import lab

from freescale.bench.emulated import EmulatedModel
from freescale.bubbles.records import read_intervals
from freescale.bubbles.summary import summarize
from freescale.config import (
    BalanceConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    TablesConfig,
    TaskConfig,
    TrainConfig,
    TransportConfig,
)
from freescale.data import synthetic, writer
from freescale.data.loader import Loader
from freescale.data.vocabulary import VOCABULARY_FILE
from freescale.train.build import build
from freescale.train.sharded_model import build_model_for
from freescale.transport.world import World
from owners import read_histories
from processes import on_ranks
from record import save

LANES = {"before": ("key", "block"), "after": ("popularity", "zigzag"), "before again": ("key", "block")}
COMPUTE_SECONDS = 0.05
ROW_TRAFFIC = ("ids", "urgent rows", "row gradients")


def write_numbered(source: Path, target: Path) -> None:
    """Write the log twice: with the ids of the import, which follow popularity, and with ids in the order of keys."""
    keys = pl.read_parquet(source / VOCABULARY_FILE)["key"]
    by_key = keys.rank("ordinal").to_numpy().astype(np.int64) - 1
    histories = read_histories(source)
    offsets = np.concatenate([[0], np.cumsum([len(history) for history in histories])])
    item, user = np.concatenate(histories), np.arange(len(histories))
    times = np.concatenate([np.arange(len(history)) for history in histories])
    for name, ids in (("popularity", item), ("key", by_key[item])):
        lists = {"item_id": synthetic.list_array(offsets, ids), "timestamp": synthetic.list_array(offsets, times)}
        table = pa.table({"user_id": pa.array(user), **lists})
        with writer.atomic_folder(target / name) as folder:
            writer.write_dataset(folder, [table], rows_per_group=64, items=len(keys))


def measured(world: World, data: Path, out: Path, turns: int, steps: int) -> Any:
    """Train every lane in turns; return the milliseconds of exposed row traffic of a step."""
    found: dict[str, list[float]] = {name: [] for name in LANES}
    for turn in range(turns):
        for name in LANES if turn % 2 else reversed(LANES):
            numbering, owners = LANES[name]
            config = RunConfig(
                seed=turn,
                data=DataConfig(
                    path=str(data / numbering), global_batch=64 * world.world_size, max_history=200, shards=16
                ),
                model=ModelConfig(dim=64, layers=1),
                task=TaskConfig(negatives=4),
                balance=BalanceConfig(mode="off"),
                tables=TablesConfig(owners=owners, overlap="off"),  # type: ignore[arg-type]
                transport=TransportConfig(urgent="c10d", deferred="c10d"),
                train=TrainConfig(max_steps=steps, save_every=10**9, log_every=1),
            )
            loader = Loader.from_run(config, rank=world.rank, world_size=world.world_size)
            model = EmulatedModel(
                build_model_for(config, loader), lambda _: (COMPUTE_SECONDS / 3, COMPUTE_SECONDS * 2 / 3)
            )
            folder = out / f"{turn}-{name.replace(' ', '-')}"
            trainer = build(config, world, folder, model=model, quiet=True)
            trainer.fit()
            trainer.close()
            if world.is_rank_zero:
                lines = summarize(read_intervals(folder)).lines
                found[name].append(sum(line.ms for line in lines if line.cause in ROW_TRAFFIC))
    if not world.is_rank_zero:
        return None
    ratio = {n: [a / b for a, b in zip(found[n], found["before"], strict=True)] for n in ("after", "before again")}
    over = {name: [min(of), statistics.median(of), max(of)] for name, of in ratio.items()}
    return {"exposed_ms": {name: statistics.median(of) for name, of in found.items()}, "over_before": over}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, lab(options.ranks) as hosts:
        write_numbered(options.data, Path(folder))
        hosts.shape(options.mbit)
        words = (Path(folder), Path(folder) / "runs", options.turns, options.steps)
        result = on_ranks(measured, options.ranks, *words, lab=hosts)
    print(json.dumps(result))
    save(options.out, [result])


if __name__ == "__main__":
    main()
