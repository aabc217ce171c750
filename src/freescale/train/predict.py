"""The best items for every user, after the last events, held-out ones included, to Parquet: one file per rank."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from freescale.data.loader import Loader
from freescale.data.vocabulary import FILE as VOCABULARY
from freescale.errors import UsageError
from freescale.progress import track
from freescale.train.retrieve import SAMPLES
from freescale.train.saved import Saved


def predict(saved: Saved, folder: Path, *, count: int) -> int:
    """Write `count` items and their scores for each user of this rank, and give how many users these were."""
    world, data = saved.world, replace(saved.config.data, split="none", global_batch=SAMPLES * saved.world.ranks)
    if folder.exists() and any(folder.glob("*.parquet")):
        what = "there are predictions in this folder already"
        raise UsageError(what, where=str(folder), remedy="choose another folder")
    world.transport.total(0, name="look at the folder")  # nobody writes before all have looked
    folder.mkdir(parents=True, exist_ok=True)
    loader = Loader(data, seed=saved.config.seed, rank=world.rank, ranks=world.ranks)
    keys = _keys(Path(data.path))
    users = 0
    with pq.ParquetWriter(folder / f"part-{world.rank:05d}.parquet", _schema(keys)) as writer:
        for table in _tables(saved, loader, keys, count):
            writer.write_table(table)
            users += table.num_rows
    return users


def _tables(saved: Saved, loader: Loader, keys: pa.Array | None, count: int) -> Iterator[pa.Table]:
    corpus = saved.corpus()
    for batch in track(loader, "ranking users", unit="batches"):
        best, scores = corpus.top(batch, count)
        columns: dict[str, pa.Array] = {
            "user_id": pa.array(batch.scalars["user_id"].numpy()),
            "item_id": _lists(_flat(best), best.shape[1]),
            "score": _lists(_flat(scores.float()), best.shape[1]),
        }
        if keys is not None:
            columns["item"] = _lists(keys.take(_flat(best)), best.shape[1])
        yield pa.table(columns, schema=_schema(keys))


def _schema(keys: pa.Array | None) -> pa.Schema:
    fields = [("user_id", pa.int64()), ("item_id", pa.list_(pa.int64())), ("score", pa.list_(pa.float32()))]
    return pa.schema(fields if keys is None else [*fields, ("item", pa.list_(keys.type))])


def _flat(values: Tensor) -> pa.Array:
    return pa.array(values.flatten().cpu().numpy())


def _lists(flat: pa.Array, length: int) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(flat, length).cast(pa.list_(flat.type))


def _keys(data: Path) -> pa.Array | None:
    """The names that items had in the log, where the import kept them."""
    path = data / VOCABULARY
    return pq.read_table(path, columns=["key"])["key"].combine_chunks() if path.exists() else None
