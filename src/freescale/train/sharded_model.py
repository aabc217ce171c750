"""A model with its tables over all ranks: the module that DDP replicates, and the embedding tables that are sharded.

The most popular rows of sharded tables may be on every rank: `replicate_rows`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from freescale.bubbles.recorder import Recorder, record_comm_hook
from freescale.config import RunConfig
from freescale.data.feature_schema import Feature, measure_numbers
from freescale.data.loader import Loader
from freescale.data.vocabulary import VOCABULARY_FILE, feature_vocabulary_file
from freescale.embedding.ids import UniqueIds, deduplicate_tables
from freescale.embedding.replicated_rows import ReplicatedRows, Replication, Requesters, choose_replicated
from freescale.embedding.sharded import ShardedTables, describe_replicated_tables, describe_sharded_tables, shard_tables
from freescale.embedding.tables import ReplicatedTables, Table, by_dim
from freescale.embedding.zero_collision_layout import BucketLayout
from freescale.errors import DataError, reason
from freescale.models.protocol import Model, Rows
from freescale.models.ranking import Ranking
from freescale.models.retrieval import Retrieval
from freescale.overlap.schedule import bucket_bytes
from freescale.storage import StorageFolder
from freescale.transport.base import Transport
from freescale.transport.c10d import C10d
from freescale.transport.host_layout import HostLayout
from freescale.transport.world import World

Ints = NDArray[np.int64]
_AUTO = "tables.replicated_rows = auto"
_MODELS: dict[str, Callable[..., Model]] = {"retrieval": Retrieval, "ranking": Ranking}


class SequenceModule(nn.Module):
    """The sequence model and its tables. Maps inputs and embedding rows to the sum of the losses.

    Replicated tables are part of the module. Sharded tables are not: DDP must not replicate them.
    """

    def __init__(
        self, model: Model, *, replicated: ReplicatedTables | None = None, sharded: ShardedTables | None = None
    ) -> None:
        super().__init__()
        # In the order of use: DDP sends gradients in reverse order, and those of tables are complete last.
        self.replicated, self.model, self.sharded = replicated, model, sharded
        self.dynamic_tables = {t.name for t in sharded.tables if t.layout is not None} if sharded is not None else set()

    def unique_ids(self, ids: Sequence[Mapping[str, Tensor]]) -> list[dict[str, UniqueIds]]:
        """Return for each part of a batch the distinct ids of the whole batch, and its own positions among them."""
        result: list[dict[str, UniqueIds]] = [{} for _ in ids]
        tables = self.model.tables
        flat = [[part[name].flatten() for part in ids] for name in tables]
        of_tables = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in flat]
        sizes = [None if name in self.dynamic_tables else rows for name, (rows, _) in tables.items()]
        found = deduplicate_tables(of_tables, rows=sizes)
        for name, (unique, index) in zip(tables, found, strict=True):
            table_ids = [part[name] for part in ids]
            positions = index.split([part.numel() for part in table_ids])
            for part, position, shaped in zip(result, positions, table_ids, strict=True):
                part[name] = UniqueIds(unique, position.view(shaped.shape))
        return result

    def rows(self, ids: Mapping[str, UniqueIds], fetched: Mapping[str, Tensor] | None) -> dict[str, Rows]:
        """Return the rows of all tables: those fetched from their owners, or those of the replicated tables."""
        if fetched is None:
            assert self.replicated is not None
            fetched = self.replicated({name: unique.unique for name, unique in ids.items()})
        return {name: Rows(fetched[name], unique.inverse) for name, unique in ids.items()}

    def read_rows(self, ids: Mapping[str, Tensor]) -> dict[str, Rows]:
        """Return the rows of ids without preparing an update. With sharded tables this is a collective.

        Tables that are not named have no ids.
        """
        none = next(iter(ids.values())).new_zeros(0)
        (unique,) = self.unique_ids([dict.fromkeys(self.model.tables, none) | dict(ids)])
        return self.rows(unique, None if self.sharded is None else self.sharded.read(unique))

    @property
    def item_slots(self) -> int | None:
        """The number of slots of dynamic items; None if items have a vocabulary."""
        tables = [] if self.sharded is None else self.sharded.tables
        layout = next((table.layout for table in tables if table.name == "item"), None)
        return None if layout is None else layout.buckets * layout.slots

    def identify_items(self, requests: Tensor) -> Tensor:
        """Return the slots of dynamic items, and the items in slots (see `ShardedTables.identify`). Collective."""
        assert self.sharded is not None
        return self.sharded.identify("item", requests)

    def named_weights(self) -> dict[str, Tensor]:
        """Return all weights under the model's own names, replicated tables as `tables.NAME`."""
        weights = {name.removeprefix("model."): value for name, value in self.state_dict().items()}
        return {name.replace("replicated.weights.", "tables."): value for name, value in weights.items()}

    def forward(self, inputs: Any, ids: Mapping[str, UniqueIds], fetched: Mapping[str, Tensor] | None) -> Tensor:
        """Return the sum of the losses of the inputs."""
        return self.model(inputs, self.rows(ids, fetched))


@dataclass(frozen=True)
class ShardedModel:
    """A model and its tables, over all ranks."""

    module: SequenceModule
    tables: ShardedTables | None
    """None where tables are replicated."""
    plan: list[str]
    """Which table is placed where and what it costs, as human-readable lines."""


def build_sharded_model(
    config: RunConfig,
    world: World,
    model: Model,
    transport: Transport | None = None,
    *,
    buckets: Mapping[str, int] | None = None,
    layout: HostLayout | None = None,
) -> ShardedModel:
    """Attach embedding tables to the model and move both to this rank's device.

    `transport`: moves embedding rows; the world's transport by default. `buckets`: see `model_tables`.
    `layout`: the hosts of the ranks, by which row gradients are added.
    """
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = config.train.tf32
    tables = model_tables(config, model, buckets)
    if config.tables.placement == "replicated":
        replicated = ReplicatedTables(tables, seed=config.seed, deviation=config.tables.init)
        module = SequenceModule(model, replicated=replicated).to(world.device, dtype)
        return ShardedModel(module, None, describe_replicated_tables(tables, dtype))
    sharded = shard_tables(tables, config, world, transport or world.transport, dtype, layout=layout)
    module = SequenceModule(model, sharded=sharded).to(world.device, dtype)
    return ShardedModel(module, sharded, describe_sharded_tables(sharded, world.world_size))


def model_tables(config: RunConfig, model: Model, buckets: Mapping[str, int] | None = None) -> list[Table]:
    """Return the tables that a model needs. Those of one width are neighbours, to be read and sent together.

    `buckets`: of dynamic tables that were created in an earlier start.
    """
    found, buckets = [], buckets or {}
    for name, (rows, dim) in model.tables.items():
        layout = BucketLayout.of(rows, buckets=buckets.get(name)) if name in config.dynamic_tables else None
        sampled = name == "item" and config.samples_slots
        found.append(Table(name, layout.rows if layout else rows, dim, config.tables.owners, layout, sampled))
    return [table for group in by_dim(found) for table in group]


def replicate_rows(
    config: RunConfig, world: World, tables: ShardedTables | None, layout: HostLayout | None, *, events: float
) -> list[str]:
    """Give every rank a copy of the rows that the config replicates; return them as human-readable lines. Collective.

    `events`: of an average batch on one rank. `layout`: the hosts; None if no rows move.
    """
    rows = config.tables.replicated_rows
    if tables is None or rows == 0:
        return []
    counts, lines = {table.name: int(rows) for table in tables.tables} if rows != "auto" else {}, list[str]()
    if rows == "auto":
        requesters, why_not = _requesters(config, layout, events)
        if requesters is None:
            return [f"{_AUTO}: no rows are replicated, since {why_not}"]
        used = {table.name for table in tables.tables}
        for name, of_rows in [(name, of_rows) for name, of_rows in table_counts(config).items() if name in used]:
            samples = name == "item" and config.task.kind == "retrieval"
            drawn = config.task.negatives / max(1, len(of_rows)) if samples else 0.0
            chosen = choose_replicated(of_rows / max(1, int(of_rows.sum())), requesters, drawn=drawn)
            counts[name] = chosen.rows
            lines.append(_describe(name, chosen))
        lines = lines or [f"{_AUTO}: no rows are replicated, since the data has no vocabulary with counts"]
    if not any(counts.values()):
        return lines
    tables.replicated = ReplicatedRows(tables, counts, config.tables, world.transport)
    return [*lines, *tables.replicated.describe()]


def _requesters(config: RunConfig, layout: HostLayout | None, events: float) -> tuple[Requesters | None, str]:
    """Return who requests rows of other hosts, or why replication would not save bytes between hosts."""
    if layout is None or len(layout.ranks) == 1:
        return None, "all ranks are on one host"
    if config.tables.exchange != "flat":
        return None, f'with tables.exchange = "{config.tables.exchange}" a host may request each row once'
    ranks, hosts = len(layout.host_of), len(layout.ranks)
    return Requesters(hosts, ranks / hosts, events, ranks), ""


def _describe(table: str, chosen: Replication) -> str:
    sent = f"{chosen.sent - chosen.saved:,.0f} instead of {chosen.sent:,.0f} rows and row gradients per step"
    return f"{_AUTO}: {chosen.rows:,} rows of table {table}; a host is expected to send the bytes of {sent}"


def table_counts(config: RunConfig) -> dict[str, Ints]:
    """Return how often each row of a table occurs in the log, for tables whose vocabulary counts that."""
    files = [("item", VOCABULARY_FILE, 0)]
    files += [
        (feature.table or name, feature_vocabulary_file(feature.column or name), feature.rows)
        for name, feature in config.features.items()
        if feature.kind in ("id", "set")
    ]
    store, found = StorageFolder(config.data.path), dict[str, Ints]()
    for table, file, rows in files:
        counts = _read_counts(store, file)
        if counts is not None:
            counts, earlier = counts[: rows or None], found.get(table, np.zeros(0, dtype=np.int64))
            found[table] = np.zeros(max(len(counts), len(earlier)), dtype=np.int64)
            for part in (counts, earlier):
                found[table][: len(part)] += part
    return found


def _read_counts(store: StorageFolder, file: str) -> Ints | None:
    raw = store.read(file)
    if raw is None:
        return None
    try:
        vocabulary = pq.read_table(pa.BufferReader(raw))
    except pa.ArrowException as error:
        remedy = "import the log again, or set tables.replicated_rows to a number"
        raise DataError(
            f"the vocabulary {file} cannot be read: {reason(error)}", where=store.address, remedy=remedy
        ) from error
    return vocabulary["count"].to_numpy() if "count" in vocabulary.schema.names else None


def build_model(config: RunConfig, *, items: int, features: Mapping[str, Feature] | None = None) -> Model:
    """Build the model that the config names. `config.seed` determines its weights.

    `items`: rows of the item table. `features`: those of the config, as the loader has resolved them.
    """
    torch.manual_seed(config.seed)
    return _MODELS[config.task.kind](config, items=items, features=features)


def build_model_for(config: RunConfig, loader: Loader) -> Model:
    """Build the model of a config for the data of a loader, with the statistics of its numbers."""
    model = build_model(config, items=loader.vocabulary.rows, features=loader.features)
    if statistics := measure_numbers(loader.dataset, loader.features):
        model.features.set_statistics(statistics)  # type: ignore[attr-defined]
    return model


def build_optimizer(config: RunConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Build the dense optimizer. A fused one can skip an update by itself: see `nonfinite.GradientCheck`."""
    train, parameters = config.train, list(parameters)
    if train.optimizer == "sgd":
        on_device = any(weight.device.type != "cpu" for weight in parameters)
        return torch.optim.SGD(parameters, lr=train.lr, weight_decay=train.weight_decay, fused=on_device or None)
    betas = (train.beta1, train.beta2)
    return torch.optim.AdamW(parameters, lr=train.lr, betas=betas, weight_decay=train.weight_decay, fused=True)


def data_parallel(module: SequenceModule, world: World, recorder: Recorder | None = None) -> DistributedDataParallel:
    """Wrap a module in DDP. Gradients are summed, since each rank divides by the global count already.

    `find_unused_parameters` keeps DDP from rebuilding its buckets after the first step. Rebuilt buckets change the
    order of additions, and a resumed run would differ in rounding from an uninterrupted one.
    """
    dense = sum(weight.nbytes for weight in module.parameters())
    parallel = DistributedDataParallel(
        module,
        process_group=world.group,
        find_unused_parameters=True,
        forward_sync_buffers=False,  # the statistics of features do not change
        gradient_as_bucket_view=True,  # else every gradient is copied to its bucket and back
        bucket_cap_mb=bucket_bytes(dense) / (1 << 20),  # type: ignore[arg-type]  # DDP accepts fractions
    )
    hook = _sum_gradients if recorder is None else record_comm_hook(_sum_gradients, recorder)
    parallel.register_comm_hook(world.transport, hook)
    return parallel


def backward(loss: Tensor, after_local: Callable[[], AbstractContextManager[None]]) -> None:
    """Run the last backward pass of a batch. Calls `after_local` when all gradients of this rank are computed.

    At that point DDP has yet to wait for its all-reduces: what `after_local` starts overlaps with that wait, and the
    context that it returns surrounds the wait.
    """
    # Autograd calls queued callbacks at the end of the graph in queue order; DDP queues its own one later.
    queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
    with ExitStack() as waiting:
        hook = loss.register_hook(lambda _: queue(lambda: waiting.enter_context(after_local())))
        loss.backward()
        hook.remove()  # else the loss would keep itself alive through the batch that `after_local` refers to


def _sum_gradients(transport: C10d, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return transport.all_reduce_gradients(bucket)
