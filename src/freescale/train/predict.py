"""The best items for every user, after the last events, held-out ones included, to Parquet: one file per rank."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from freescale.data.histories import USERS_FILE
from freescale.data.loader import Loader
from freescale.data.vocabulary import VOCABULARY_FILE as VOCABULARY
from freescale.errors import UsageError
from freescale.progress import track
from freescale.train.retrieve import SAMPLES
from freescale.train.saved import Saved


class Predicted(NamedTuple):
    """What was written."""

    users: int
    short: int
    """Users for whom fewer items could be recommended than were asked for."""


class _Keys(NamedTuple):
    """The keys that users and items have in the log; None where their numbers are the keys."""

    users: pa.Array | None
    items: pa.Array | None

    @staticmethod
    def of(data: Path) -> "_Keys":
        return _Keys(_key_column(data / USERS_FILE), _key_column(data / VOCABULARY))

    def schema(self) -> pa.Schema:
        user = pa.int64() if self.users is None else self.users.type
        item = pa.int64() if self.items is None else self.items.type
        lists = {"item": item, "item_id": pa.int64(), "score": pa.float32()}
        listed = [(name, pa.list_(kind)) for name, kind in lists.items()]
        return pa.schema([("user", user), ("user_id", pa.int64()), *listed])


def predict(saved: Saved, folder: Path, *, count: int) -> Predicted:
    """Write up to `count` items and their scores for each user of this rank."""
    world, data = saved.world, replace(saved.config.data, split="none", global_batch=SAMPLES * saved.world.world_size)
    if folder.exists() and any(folder.glob("*.parquet")):
        what = "there are predictions in this folder already"
        raise UsageError(what, where=str(folder), remedy="choose another folder")
    world.transport.sum(0, name="look at the folder")  # nobody writes before all have looked
    folder.mkdir(parents=True, exist_ok=True)
    loader = Loader(data, seed=saved.config.seed, rank=world.rank, world_size=world.world_size)
    keys = _Keys.of(Path(data.path))
    users = short = 0
    with pq.ParquetWriter(folder / f"part-{world.rank:05d}.parquet", keys.schema()) as writer:
        for table in _tables(saved, loader, keys, count):
            writer.write_table(table)
            users += table.num_rows
            short += int((table["item_id"].chunk(0).value_lengths().to_numpy() < count).sum())
    return Predicted(users, short)


def _tables(saved: Saved, loader: Loader, keys: _Keys, count: int) -> Iterator[pa.Table]:
    corpus = saved.corpus()
    for batch in track(loader, "ranking users", unit="batches"):
        best, scores = corpus.top(batch, count)
        best, scores = best.cpu(), scores.float().cpu()
        recommended = scores > -torch.inf  # excluded items have no score
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), recommended.sum(1).cumsum(0)])
        items = pa.array(best[recommended].numpy())
        user_id = pa.array(batch.scalars["user_id"].numpy())
        columns = {
            "user": user_id if keys.users is None else keys.users.take(user_id),
            "user_id": user_id,
            "item": _lists(offsets, items if keys.items is None else keys.items.take(items)),
            "item_id": _lists(offsets, items),
            "score": _lists(offsets, pa.array(scores[recommended].numpy())),
        }
        yield pa.table(columns, schema=keys.schema())


def _lists(offsets: Tensor, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets.numpy(), pa.int32()), values)


def _key_column(path: Path) -> pa.Array | None:
    return pq.read_table(path, columns=["key"])["key"].combine_chunks() if path.exists() else None
