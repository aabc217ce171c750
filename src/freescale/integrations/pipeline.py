"""Trains other people's TorchRec models with prioritized embedding communication (PEC).

The pipeline runs the schedule of the trainer: while a batch is computed, it fetches the rows of the next batch, except
those that the current batch changes. The training result is that of the plain loop. Nothing is traced or rewritten: the
pipeline finds the KeyedJaggedTensor of a batch with the features of a collection, and refuses lookups of other ids.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from operator import length_hint
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.train_pipeline import TrainPipeline
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from freescale.bubbles.step_profiler import StepProfiler
from freescale.config import TransportConfig
from freescale.embedding.fused import FusedCollection, FusedShard, fused_kernel
from freescale.embedding.ids import deduplicate
from freescale.embedding.prioritized import EmbeddingContext, EmbeddingMemory, require
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.tables import Table
from freescale.errors import UsageError
from freescale.integrations.batches import move_to_device
from freescale.log import warning_once
from freescale.overlap.hazards import require_safe
from freescale.overlap.schedule import Operation, overlapped, serial
from freescale.train.schedule_runner import ScheduleRunner
from freescale.train.step import operation_table
from freescale.transport.selection import select_transports
from freescale.transport.world import from_group

B = TypeVar("B")
Serve = Callable[[KeyedJaggedTensor], dict[str, JaggedTensor] | None]
"""Returns the prefetched rows of these features; None if there are none."""


class PrioritizedEmbeddingCollection(ShardedEmbeddingCollection):
    """TorchRec's sharded collection, whose rows a pipeline may provide."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        fused_kernel(self)  # raises where the result would not be exact
        self._serve: Serve | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def tables(self) -> list[EmbeddingConfig]:
        """The configs of its tables."""
        return self._embedding_configs

    @property
    def env(self) -> ShardingEnv:
        """The ranks over which it is sharded."""
        return self._env

    def serve_from(
        self, serve: Serve, *, synchronize: Callable[[], None], discard_prefetched: Callable[[], None]
    ) -> None:
        """Take rows from `serve` instead of any earlier one.

        `synchronize` runs before the state dict is read, `discard_prefetched` before a state dict is loaded.
        """
        for hook in self._hooks:
            hook.remove()
        self._serve = serve
        self._hooks = [self.register_state_dict_pre_hook(lambda *_: synchronize())]
        self._hooks.append(self.register_load_state_dict_pre_hook(lambda *_: discard_prefetched()))

    def forward(self, features: KeyedJaggedTensor) -> Any:  # type: ignore[override]
        """Return the rows of every id, by feature."""
        rows = None if self._serve is None else self._serve(features)
        return super().forward(features) if rows is None else rows


@dataclass
class BatchState(Generic[B]):
    """What one operation of a step leaves for the next ones, for one batch."""

    batch: B | None
    """As the data loader yields it. None once the loader of this rank has ended."""
    embedding: EmbeddingContext = field(default_factory=EmbeddingContext)
    features: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    """By collection."""
    inverse: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """By collection and feature: positions of its ids among the unique ids of their table."""
    on_device: B | None = None
    losses: Tensor | None = None
    output: Any = None


class PrioritizedPipeline(TrainPipeline[Any, Any], Generic[B]):
    """Trains with prioritized embedding communication (PEC), through TorchRec's TrainPipeline interface:

    pipeline = fs.PrioritizedPipeline(model, optimizer)
    output = pipeline.progress(dataloader_iter)

    The model returns (losses, output) in training. Batches are moved to `device`, which defaults to the model's. Where
    ranks have unequal numbers of batches, all stop after the last step for which every rank has a batch, and a rank
    with batches left logs how many. `features` returns the KeyedJaggedTensors of a batch where they are not its
    fields. `profiler` records where the time goes; `progress` ends its steps, so do not call `end_step`. `transport`
    selects the transports; by default they are probed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | None = None,
        *,
        features: Callable[[B], Sequence[KeyedJaggedTensor]] | None = None,
        profiler: StepProfiler | None = None,
        timeout: float = 600.0,
        overlap: bool = True,
        transport: TransportConfig | None = None,
    ) -> None:
        super().__init__()
        self._model, self._optimizer, self._profiler = model, optimizer, profiler
        self._features, self._device = features or _jagged_fields, device or _device_of(model)
        collections = [(n, m) for n, m in model.named_modules() if isinstance(m, PrioritizedEmbeddingCollection)]
        if not collections:
            remedy = "give DistributedModelParallel sharders=[fs.PrioritizedEmbeddingSharder()]"
            raise UsageError("the model has no prioritized embeddings", remedy=remedy)
        self._collections = dict(collections)
        group = collections[0][1].env.process_group
        assert group is not None
        overlaps = overlap and group.size() > 1
        world = from_group(group, self._device, timeout=timeout)
        transports = select_transports(world, transport or TransportConfig(), deferred=overlaps)
        self._tables = ShardedTables(*_local_shards(self._collections), transports.urgent)
        _require_equal_blocks(self._tables, group)
        self._shard: FusedShard = self._tables.shard  # type: ignore[assignment]
        if profiler is not None:
            transports.urgent.add_tracer(profiler.recorder.begin_transfer)
        recorder = None if profiler is None else profiler.recorder
        schedule = require_safe(overlapped(agrees=False) if overlaps else serial(sharded=True, agrees=False))
        operations = operation_table(self, self._tables)
        self._runner = ScheduleRunner(schedule, operations, self._tables, transports, recorder, self._device)
        self._rank = group.rank()
        self._divisor = group.size() if get_gradient_division() else 1
        self._computing: BatchState[B] | None = None
        self.reset()
        for path, collection in collections:
            serve = self._serve_rows(path)
            collection.serve_from(serve, synchronize=self.synchronize, discard_prefetched=self.discard_prefetched)

    def progress(self, dataloader_iter: Iterator[B]) -> Any:
        """Run one training step and return the model's output. Raise StopIteration once a rank has no batch.

        A batch is read ahead. With a new iterator, training continues with that batch, as in TorchRec's pipelines.
        """
        if dataloader_iter is self._ended:
            raise StopIteration
        if not self._model.training:
            remedy = "call model.train(); evaluate by calling the model itself"
            raise UsageError("the pipeline trains, but the model is in eval mode", remedy=remedy)
        if dataloader_iter is not self._iterator:
            self._switch_to(dataloader_iter)
        state = self._next_state(dataloader_iter)
        if not state.embedding.canceled:
            batch = self._draw(dataloader_iter)
            context = EmbeddingContext(previous=state.embedding, exhausted=batch is None)
            self._following = BatchState(batch, context)
            self._runner.run(state, self._following)
        if state.embedding.canceled:
            self._log_leftover(state)
            self.reset()
            self._ended = dataloader_iter
            raise StopIteration
        self._steps += 1
        if self._profiler is not None:
            self._profiler.end_step()
        return state.output

    def reset(self) -> None:
        """Drop the batch that was read ahead, as TorchRec's pipelines do."""
        self.discard_prefetched()
        self._following: BatchState[B] | None = None
        self._iterator: Iterator[B] | None = None
        self._ended: Iterator[B] | None = None
        self._steps = self._drawn = 0

    def synchronize(self) -> None:
        """Apply all gradients of the last step to the tables. Called automatically before tables are read or saved."""
        self._runner.executor.synchronize()

    def discard_prefetched(self) -> None:
        """Drop prefetched rows, because the tables are about to change outside of the pipeline."""
        self._runner.executor.discard_prefetched()

    def close(self) -> None:
        """End the thread of the deferred lane."""
        self._runner.executor.close()

    @property
    def peak_memory(self) -> EmbeddingMemory:
        """The most bytes that unfinished batches held on this rank between two steps."""
        return self._runner.peak_bytes

    def _switch_to(self, dataloader_iter: Iterator[B]) -> None:
        """Read from another iterator. A batch that was read ahead is kept if every rank has one."""
        self.synchronize()
        following = self._following
        if following is not None and following.embedding.canceled:
            self._log_leftover(following)
        if following is not None and (following.embedding.canceled or following.batch is None):
            self.reset()
        self._iterator, self._ended, self._drawn = dataloader_iter, None, 0

    def _next_state(self, dataloader_iter: Iterator[B]) -> BatchState[B]:
        """Return the batch that was read ahead, with its rows if those are still valid; else the first batch."""
        following = self._following
        if following is None:
            batch = self._draw(dataloader_iter)
        elif following.embedding.canceled or following is self._runner.executor.prefetched:
            return following
        else:
            batch = following.batch
        return BatchState(batch, EmbeddingContext(exhausted=batch is None))

    def _draw(self, dataloader_iter: Iterator[B]) -> B | None:
        with nullcontext() if self._profiler is None else self._profiler.record("data"):
            batch = next(dataloader_iter, None)
        self._drawn += batch is not None
        return batch

    def _log_leftover(self, state: BatchState[B]) -> None:
        """Log the batches that this rank does not train on because another rank has no batch for this step."""
        if state.batch is not None:
            read = {id(s): s for s in (state, self._following) if s is not None and s.batch is not None}
            # The iterators of DataLoader have the length of the loader, others that of what is left.
            iterator = self._iterator
            remaining = len(iterator) - self._drawn if isinstance(iterator, Sized) else length_hint(iterator)
            exhausted = ", ".join(map(str, require(state.embedding.plan).exhausted))
            warning_once(
                f"pipeline: rank {self._rank} has at least {len(read) + max(0, remaining)} batches left that are not "
                f"trained on, since the loaders of these ranks ended after step {self._steps}: {exhausted}"
            )

    def prepare(self, state: BatchState[B], _: Operation) -> None:
        """Move the batch to the device and find the unique ids of every table."""
        if state.batch is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            state.embedding.unique_ids = {
                table.name: deduplicate(nothing, rows=table.rows) for table in self._tables.tables
            }
            return
        state.on_device = move_to_device(state.batch, self._device)
        jagged = list(self._features(state.on_device))
        unique_ids = {}
        for path, collection in self._collections.items():
            names = [feature for table in collection.tables for feature in table.feature_names]
            state.features[path] = _find_features(jagged, names, path)
            by_feature = state.features[path].to_dict()
            for table in collection.tables:
                ids = [by_feature[feature].values() for feature in table.feature_names]
                unique = deduplicate(torch.cat(ids), rows=table.num_embeddings)
                unique_ids[_table_name(path, table.name)] = unique
                inverse = unique.inverse.split([len(values) for values in ids])
                state.inverse |= {(path, name): part for name, part in zip(table.feature_names, inverse, strict=True)}
        state.embedding.unique_ids = unique_ids

    def agree(self, _: BatchState[B], __: Operation) -> None:
        """Do nothing: TorchRec averages over ranks, so no schedule of a pipeline exchanges a count."""

    def forward(self, state: BatchState[B], _: Operation) -> None:
        """Run the model on the prefetched rows. The learning rates of the tables are read here, as in TorchRec."""
        with self._shard.lr_lock:
            self._optimizer.zero_grad()
        state.embedding.lr = self._shard.learning_rates()
        for values in require(state.embedding.rows).values():
            values.requires_grad_()
        self._computing = state
        try:
            state.losses, state.output = self._model(state.on_device)
        finally:
            self._computing = None

    def backward(self, state: BatchState[B], _: Operation) -> None:
        """Compute the gradients. TorchRec averages over ranks, so row gradients are divided too."""
        require(state.losses).sum().backward()
        state.losses = None
        for gradient in state.embedding.row_gradients.values():
            gradient.div_(self._divisor)

    def update_dense(self, _: BatchState[B], __: Operation) -> None:
        """Step the user's optimizer: it updates the dense part and the learning rates of the tables."""
        with self._shard.lr_lock:
            self._optimizer.step()

    def _serve_rows(self, path: str) -> Serve:
        collection = self._collections[path]
        tables = {feature: _table_name(path, t.name) for t in collection.tables for feature in t.feature_names}

        def serve(features: KeyedJaggedTensor) -> dict[str, JaggedTensor] | None:
            state = self._computing
            if state is None:
                (self.discard_prefetched if collection.training and torch.is_grad_enabled() else self.synchronize)()
                return None
            _require_prefetched(features, state.features[path], list(tables), path)
            rows, by_feature = require(state.embedding.rows), state.features[path].to_dict()
            values = {f: functional.embedding(state.inverse[path, f], rows[table]) for f, table in tables.items()}
            return {f: JaggedTensor(values=values[f], lengths=by_feature[f].lengths()) for f in tables}

        return serve


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of DistributedModelParallel, else that of the first parameter or buffer."""
    device = getattr(model, "device", None)
    if isinstance(device, torch.device):
        return device
    return next((value.device for value in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def _local_shards(collections: Mapping[str, PrioritizedEmbeddingCollection]) -> tuple[list[Table], FusedShard]:
    """Return all tables of a model, and this rank's shard of them."""
    names = {path: {t.name: _table_name(path, t.name) for t in c.tables} for path, c in collections.items()}
    configs = [(names[path][table.name], table) for path, c in collections.items() for table in c.tables]
    tables = [Table(name, table.num_embeddings, table.embedding_dim) for name, table in configs]
    return tables, FusedShard([FusedCollection(c, names[path]) for path, c in collections.items()])


def _require_equal_blocks(tables: ShardedTables, group: dist.ProcessGroup) -> None:
    """Refuse a sharding plan with unequal blocks: the owner of a row is computed from equal ones."""
    state = tables.shard.state()
    for table in tables.tables:
        expected, actual = len(table.owned(group.rank(), group.size())), len(state[table.name])
        if actual != expected:
            what = f"rank {group.rank()} has {actual} of {table.rows} rows, where equal blocks have {expected}"
            remedy = "shard it row_wise without custom block sizes"
            raise UsageError(what, where=f"table '{table.name}'", remedy=remedy)


def _table_name(path: str, table: str) -> str:
    """Return a name that is unique over the collections of a model."""
    return f"{path}/{table}"


def _jagged_fields(batch: Any) -> list[KeyedJaggedTensor]:
    """Return the KeyedJaggedTensors of a batch: itself, its items, or its fields."""
    if isinstance(batch, KeyedJaggedTensor):
        return [batch]
    if isinstance(batch, Mapping):
        values: Iterable[Any] = batch.values()
    elif isinstance(batch, Sequence):
        values = batch
    else:
        values = [getattr(batch, f.name) for f in fields(batch)] if is_dataclass(batch) else vars(batch).values()
    return [value for value in values if isinstance(value, KeyedJaggedTensor)]


def _find_features(jagged: list[KeyedJaggedTensor], names: list[str], path: str) -> KeyedJaggedTensor:
    """Return the KeyedJaggedTensor with the features of a collection."""
    matching = [tensor for tensor in jagged if set(names) <= set(tensor.keys())]
    if len(matching) == 1:
        return matching[0]
    what = f"{len(matching)} of the {len(jagged)} KeyedJaggedTensors of a batch hold the features {', '.join(names)}"
    remedy = "name them: fs.PrioritizedPipeline(..., features=lambda batch: [batch.users, batch.items])"
    raise UsageError(what, where=f"collection '{path}'", remedy=remedy)


def _require_prefetched(
    features: KeyedJaggedTensor, prefetched: KeyedJaggedTensor, names: Sequence[str], path: str
) -> None:
    """Refuse a lookup of other ids than those of the batch: their rows were not fetched."""
    if features is prefetched or features.values() is prefetched.values():
        return
    now, then = features.to_dict(), prefetched.to_dict()
    pairs = [(now[name], then[name]) for name in names if name in now]
    same = [torch.equal(a.values(), b.values()) and torch.equal(a.lengths(), b.lengths()) for a, b in pairs]
    if not all(same) or len(same) < len(names):
        what = "the model looks up other ids than the batch holds, so their rows were not fetched"
        remedy = "change ids in the data loader, or return what is looked up: fs.PrioritizedPipeline(..., features=...)"
        raise UsageError(what, where=f"collection '{path}'", remedy=remedy)
