"""A trained model, loaded from the newest checkpoint of its run: for evaluation, predictions and export."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from freescale import config as configs
from freescale.checkpoint import checkpoints, export
from freescale.checkpoint.run_folder import require_complete
from freescale.data.histories import USERS_FILE
from freescale.data.loader import Loader
from freescale.data.vocabulary import VOCABULARY_FILE as VOCABULARY
from freescale.data.vocabulary import check_recorded_identity
from freescale.errors import UsageError
from freescale.progress import track
from freescale.storage import StorageFolder
from freescale.train.evaluation import SAMPLES_PER_RANK, Corpus
from freescale.train.sharded_model import ShardedModel, build_model, build_sharded_model
from freescale.transport.world import World


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run's newest checkpoint, over the ranks of this world."""

    config: configs.RunConfig
    world: World
    sharded: ShardedModel
    items: int
    """Size of the vocabulary, without the rows that unknown items share."""
    step: int

    def corpus(self) -> Corpus:
        """Return the corpus that the model ranks."""
        if self.config.task.kind != "retrieval":
            what = f"this run was trained for {self.config.task.kind}, which does not rank the corpus"
            raise UsageError(what, remedy='use a run with task.kind = "retrieval"')
        exclude_seen = self.config.task.seen == "exclude"
        return Corpus(self.sharded.module, self.items, self.world.device, exclude_seen=exclude_seen)


def load_config(run: Path, data: str | None = None) -> configs.RunConfig:
    """Load the config of a run. `data`: another data set than the run's."""
    config = configs.load_run(run)
    if data is None:
        return config
    return replace(config, data=replace(config.data, path=data, test_path=data if config.data.test_path else ""))


def load_trained_model(run: Path, config: configs.RunConfig, world: World) -> TrainedModel:
    """Load the newest complete checkpoint of a run, whatever world size wrote it."""
    newest = require_complete(run)
    loader = Loader.from_run(config, rank=world.rank, world_size=world.world_size)
    facts = checkpoints.read_facts(newest)
    check_recorded_identity(facts.get("data"), loader.identity, where=config.data.path)
    model = build_model(config, items=loader.vocabulary.rows, features=loader.features)
    sharded = build_sharded_model(config, world, model, buckets=facts.get("buckets"))
    tensors = checkpoints.model_tensors(sharded.module, sharded.tables, rank=world.rank, world_size=world.world_size)
    checkpoints.load(newest, tensors, sharded.tables)
    return TrainedModel(config, world, sharded, loader.vocabulary.items, facts["step"])


def export_model(trained: TrainedModel, folder: Path) -> list[str]:
    """Write model, tables, config and vocabulary (see `checkpoint.export`), and read everything back.

    Returns the names of the files on rank 0.
    """
    world, tables = trained.world, trained.sharded.tables
    if (folder / export.LIST).exists():
        raise UsageError("there is an export in this folder already", where=str(folder), remedy="choose another folder")
    world.transport.sum(0, name="look at the folder")  # no rank writes before all have looked
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    if world.is_rank_zero:
        weights = trained.sharded.module.named_weights()
        written["model.safetensors"] = export.write_tensors(folder / "model.safetensors", weights)
    if tables is not None:
        name = f"tables-{world.rank:05d}-of-{world.world_size:05d}.safetensors"
        blocks = tables.read_blocks(world.rank, world.world_size)
        rows = {f"tables.{table}": values for table, (_, values) in blocks.items()}
        first = {f"tables.{table}": row for table, (row, _) in blocks.items()}
        written[name] = export.write_tensors(folder / name, rows, first)
    lists = [folder / f"written-{rank:05d}.json" for rank in range(world.world_size)]
    lists[world.rank].write_text(json.dumps(written))
    world.transport.sum(0, name="write the export")
    if not world.is_rank_zero:
        return []
    configs.save(trained.config, folder / "config.toml")
    files = {"config.toml": export.describe(folder / "config.toml")}
    for path in lists:
        files |= json.loads(path.read_text())
        path.unlink()
    if (vocabulary := StorageFolder(trained.config.data.path).read(VOCABULARY)) is not None:
        (folder / VOCABULARY).write_bytes(vocabulary)
        files[VOCABULARY] = export.describe(folder / VOCABULARY)
    export.write_list(folder, files)
    return sorted(files)


class PredictionCounts(NamedTuple):
    """What `write_predictions` wrote."""

    users: int
    short: int
    """Users for whom fewer items could be recommended than requested."""


class LogKeys(NamedTuple):
    """The keys of users and items in the log; None where their numbers are the keys."""

    users: pa.Array | None
    items: pa.Array | None
    item_ids: pa.Array | None
    """Raw ids of the items, ascending; None where the id of an item is its place."""

    @staticmethod
    def read(address: str) -> "LogKeys":
        """Read the keys of a data set."""
        store = StorageFolder(address)
        users, items = _table(store, USERS_FILE), _table(store, VOCABULARY)
        return LogKeys(_column(users, "key"), _column(items, "key"), _column(items, "id"))

    def of_items(self, ids: pa.Array) -> pa.Array:
        """Return the keys of items; null for raw ids that this data set does not have."""
        if self.items is None:
            return ids
        return self.items.take(ids if self.item_ids is None else pc.index_in(ids, self.item_ids))  # type: ignore[attr-defined]

    def schema(self) -> pa.Schema:
        """Return the columns of predictions."""
        user = pa.int64() if self.users is None else self.users.type
        item = pa.int64() if self.items is None else self.items.type
        lists = {"item": item, "item_id": pa.int64(), "score": pa.float32()}
        columns = [(name, pa.list_(kind)) for name, kind in lists.items()]
        return pa.schema([("user", user), ("user_id", pa.int64()), *columns])


def write_predictions(trained: TrainedModel, folder: Path, *, count: int) -> PredictionCounts:
    """Write up to `count` items and their scores for each user of this rank to Parquet, one file per rank.

    Histories include held-out events.
    """
    world = trained.world
    data = replace(trained.config.data, split="none", global_batch=SAMPLES_PER_RANK * world.world_size)
    if folder.exists() and any(folder.glob("*.parquet")):
        what = "there are predictions in this folder already"
        raise UsageError(what, where=str(folder), remedy="choose another folder")
    world.transport.sum(0, name="look at the folder")  # no rank writes before all have looked
    folder.mkdir(parents=True, exist_ok=True)
    loader = Loader.from_run(trained.config, rank=world.rank, world_size=world.world_size, data=data)
    keys = LogKeys.read(data.path)
    users = short = 0
    with pq.ParquetWriter(folder / f"part-{world.rank:05d}.parquet", keys.schema()) as writer:
        for table in _prediction_tables(trained, loader, keys, count):
            writer.write_table(table)
            users += table.num_rows
            short += int((table["item_id"].chunk(0).value_lengths().to_numpy() < count).sum())
    return PredictionCounts(users, short)


def _prediction_tables(trained: TrainedModel, loader: Loader, keys: LogKeys, count: int) -> Iterator[pa.Table]:
    corpus = trained.corpus()
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
            "item": _list_array(offsets, keys.of_items(items)),
            "item_id": _list_array(offsets, items),
            "score": _list_array(offsets, pa.array(scores[recommended].numpy())),
        }
        yield pa.table(columns, schema=keys.schema())


def _list_array(offsets: Tensor, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets.numpy(), pa.int32()), values)


def _table(store: StorageFolder, name: str) -> pa.Table | None:
    """Return a Parquet file; None if there is none."""
    raw = store.read(name)
    return None if raw is None else pq.read_table(pa.BufferReader(raw))


def _column(table: pa.Table | None, name: str) -> pa.Array | None:
    """Return a column; None if there is none."""
    return None if table is None or name not in table.schema.names else table[name].combine_chunks()
