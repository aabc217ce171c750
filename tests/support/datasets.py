"""Small data sets, and batches as plain lists."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from freescale.config import DataConfig
from freescale.data import writer
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.data.manifest import Manifest


def lists(lengths: Sequence[int], values: Any, kind: pa.DataType | None = None) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))


def histories(lengths: Sequence[int], *, items: int = 1000, seed: int = 0, candidates: bool = False) -> pa.Table:
    """Histories with values that identify their position: user = row, time = 1000 * row + position."""
    rng = np.random.default_rng(seed)
    total = int(sum(lengths))
    row = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(n) for n in lengths]) if total else np.empty(0, int)
    columns = {
        "user_id": pa.array(np.arange(len(lengths), dtype=np.int64)),
        "item_id": lists(lengths, rng.integers(0, items, total)),
        "timestamp": lists(lengths, 1000 * row + position, pa.int64()),
        "rating": lists(lengths, rng.random(total).astype(np.float32)),
        "age": pa.array(np.arange(len(lengths), dtype=np.int64) % 90),
    }
    if candidates:
        offered = [i % 3 + 1 for i in range(len(lengths))]
        columns["candidate_id"] = lists(offered, rng.integers(0, items, sum(offered)))
        columns["label_click"] = lists(offered, rng.integers(0, 2, sum(offered)))
    return pa.table(columns)


def write_dataset(path: Path, table: pa.Table, *, rows_per_group: int, items: int = 1000, **options: Any) -> Manifest:
    shutil.rmtree(path, ignore_errors=True)
    with writer.atomic_folder(path) as folder:
        return writer.write_dataset(folder, [table], rows_per_group=rows_per_group, items=items, **options)


def loader(
    path: Path | str, *, seed: int = 7, rank: int = 0, world_size: int = 1, part: Any = "train", **config: Any
) -> Loader:
    options: dict[str, Any] = {
        "global_batch": 16,
        "shards": 64,
        "workers": 0,
        "split": "none",
        "max_history": 10**6,
        **config,
    }
    return Loader(DataConfig(path=str(path), **options), seed=seed, rank=rank, world_size=world_size, part=part)


def ids(batch: Batch) -> list[int]:
    return batch.sample_id.tolist()


def steps_over_ranks(path: Path, ranks: int, **config: Any) -> list[list[int]]:
    """Sample ids of every step of an epoch, over all ranks."""
    every = [[ids(batch) for batch in loader(path, rank=rank, world_size=ranks, **config)] for rank in range(ranks)]
    assert len({len(steps) for steps in every}) == 1, "all ranks take equally many steps"
    return [sorted(sum(parts, [])) for parts in zip(*every, strict=True)]
