"""How evenly the owners of rows are loaded: rows that the busiest owner serves in a step, over the mean of all.

    python benchmarks/owners.py data/ml1m data/gowalla ... [--ranks 32] [--users 64] [--steps 16] [--out FILE.json]

Every rank requests the distinct ids of its users. `block`: contiguous blocks of items sorted by key. `popularity
block`: contiguous blocks of the ids of the data set, which are sorted by popularity. `zigzag`: the trainer's order of
rows. No model is trained. The data sets are folders that `freescale data import` wrote.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import record
from freescale.data.dataset import Dataset
from freescale.data.vocabulary import VOCABULARY_FILE
from freescale.embedding.row_order import RowOrder, bit_reversal

RULES = ("block", "popularity block", "zigzag")


def read_histories(folder: Path) -> list[np.ndarray]:
    """All histories of a data set."""
    dataset = Dataset(str(folder))
    histories = []
    for group in range(dataset.layout.groups):
        column = dataset.read_group(group).columns["item_id"]
        histories += np.split(column.values, np.cumsum(column.lengths)[:-1])
    return histories


def positions(folder: Path) -> dict[str, np.ndarray]:
    """The position of each item under each rule, as a share of all positions."""
    keys = pl.read_parquet(folder / VOCABULARY_FILE)["key"]
    items, order = len(keys), RowOrder.of(len(keys), "zigzag")
    by_key = (keys.rank("ordinal").to_numpy().astype(np.float64) - 1) / items
    dealt = order.position(np.arange(items), bit_reversal(order.shards)) / order.positions
    return dict(zip(RULES, (by_key, np.arange(items) / items, dealt), strict=True))


def busiest_over_mean(histories: list[np.ndarray], position: np.ndarray, ranks: int, users: int, steps: int) -> float:
    """Mean over random steps."""
    rng, owner, ratios = np.random.default_rng(0), (position * ranks).astype(np.int64), []
    for _ in range(steps):
        chosen = rng.permutation(len(histories))[: ranks * users]
        served = np.zeros(ranks)
        for of_rank in np.array_split(chosen, ranks):
            ids = np.unique(np.concatenate([histories[user] for user in of_rank]))
            served += np.bincount(owner[ids], minlength=ranks)
        ratios.append(served.max() / served.mean())
    return float(np.mean(ratios))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32])
    parser.add_argument("--users", type=int, default=64, help="users per rank and step")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for folder in options.data:
        histories, rules = read_histories(folder), positions(folder)
        for ranks in options.ranks:
            shape = {"data": folder.name, "ranks": ranks, "users_per_rank": options.users}
            measured = {
                name: busiest_over_mean(histories, position, ranks, options.users, options.steps)
                for name, position in rules.items()
            }
            rows.append(shape | measured)
    means = [
        {"data": "mean", "ranks": ranks}
        | {name: float(np.mean([row[name] for row in rows if row["ranks"] == ranks])) for name in RULES}
        for ranks in options.ranks
    ]
    for row in [*rows, *means]:
        print(json.dumps(row))
    record.save(options.out, [*rows, *means])


if __name__ == "__main__":
    main()
