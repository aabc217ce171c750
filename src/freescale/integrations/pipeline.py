"""Prioritized embeddings in somebody else's training: their model in DistributedModelParallel, their optimizer, loader.

A pipeline runs the schedule that the trainer runs. While a batch is computed, the rows of the next one are fetched, but
for those that this batch changes; what is learnt is what the plain loop learns. Nothing is traced or rewritten: the
pipeline finds the KeyedJaggedTensor of a batch that holds the features of a collection, and a collection that is asked
for anything else says so.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import length_hint
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from freescale.bubbles.step_profiler import StepProfiler
from freescale.config import TransportConfig
from freescale.embedding.fused import FusedCollection, FusedShard
from freescale.embedding.ids import deduplicate
from freescale.embedding.prioritized import EmbeddingContext, EmbeddingMemory, require
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.tables import Table
from freescale.errors import UsageError
from freescale.integrations.torchrec import PrioritizedEmbeddingCollection, Serve
from freescale.log import warning_once
from freescale.overlap.hazards import require_safe
from freescale.overlap.schedule import Operation, overlapped, serial
from freescale.train.schedule_runner import ScheduleRunner
from freescale.train.step import operation_table
from freescale.transport.selection import select_transports
from freescale.transport.world import from_group

B = TypeVar("B")


@dataclass
class Flight(Generic[B]):
    """One batch on its way."""

    batch: B | None
    """As the loader gave it. None when the loader of this rank has ended."""
    embedding: EmbeddingContext = field(default_factory=EmbeddingContext)
    features: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    """Of each collection."""
    places: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """Of each feature of a collection: where its ids stand among the distinct ones of their table."""
    on_device: B | None = None
    losses: Tensor | None = None
    output: Any = None


class Pipeline(Generic[B]):
    """Trains on the batches of a loader and gives the model's output for each, as TorchRec's pipelines do:

    for output in fs.Pipeline(model, optimizer, loader): ...

    In training the model gives (losses, output). Where ranks have unequal numbers of batches, all stop after the last
    step for which every rank has one, and a rank that has batches left logs how many. `features`: which
    KeyedJaggedTensors a batch holds, where they are not fields of it. `bubbles`: records where the time goes.
    `transport`: which way rows take; probed without.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[B],
        *,
        features: Callable[[B], Sequence[KeyedJaggedTensor]] | None = None,
        device: torch.device | None = None,
        bubbles: StepProfiler | None = None,
        timeout: float = 600.0,
        overlap: bool = True,
        transport: TransportConfig | None = None,
    ) -> None:
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._features, self._device = features or _fields_of, device or torch.device("cpu")
        found = [(n, m) for n, m in model.named_modules() if isinstance(m, PrioritizedEmbeddingCollection)]
        if not found:
            remedy = "give DistributedModelParallel sharders=[fs.PrioritizedEmbeddingSharder()]"
            raise UsageError("the model has no prioritized embeddings", remedy=remedy)
        self._collections = dict(found)
        group = next(iter(self._collections.values())).env.process_group
        assert group is not None
        overlaps = overlap and group.size() > 1
        world = from_group(group, self._device, timeout=timeout)
        ways = select_transports(world, transport or TransportConfig(), deferred=overlaps)
        self._tables = ShardedTables(*_own_rows(self._collections), ways.urgent)
        _require_even(self._tables, group)
        self._shard: FusedShard = self._tables.shard  # type: ignore[assignment]
        if bubbles is not None:
            ways.urgent.add_tracer(bubbles.recorder.begin_transfer)
        recorder = None if bubbles is None else bubbles.recorder
        schedule = require_safe(overlapped(agrees=False) if overlaps else serial(sharded=True, agrees=False))
        operations = operation_table(self, self._tables)
        self._runner = ScheduleRunner(schedule, operations, self._tables, ways, recorder, self._device)
        self._rank = group.rank()
        self._divisor = group.size() if get_gradient_division() else 1
        self._computing: Flight[B] | None = None
        for path, collection in found:
            collection.served(self._served(path), settle=self.settle, forget=self.forget)

    def __iter__(self) -> Iterator[Any]:
        """Train on the batches of the loader, until it ends on some rank."""
        batches, steps = iter(self._loader), 0
        flight: Flight[B] = _flight(next(batches, None))
        try:
            while not flight.embedding.canceled:
                following: Flight[B] = _flight(next(batches, None), before=flight.embedding)
                self._runner.run(flight, following)
                if not flight.embedding.canceled:
                    steps += 1
                    yield flight.output
                    keep = following.embedding.canceled or following is self._runner.executor.prefetched
                    flight = following if keep else _flight(following.batch)
            self._log_leftover(flight, steps)
        finally:
            self.forget()

    def settle(self) -> None:
        """Bring the tables to where they stand after the last step. Called by itself before they are read or saved."""
        self._runner.executor.synchronize()

    def forget(self) -> None:
        """Drop rows that were fetched ahead, since somebody else changes the tables."""
        self._runner.executor.discard_prefetched()

    def close(self) -> None:
        """End what runs beside the step."""
        self._runner.executor.close()

    @property
    def held(self) -> EmbeddingMemory:
        """The most bytes that batches under way held on this rank between two steps."""
        return self._runner.peak_bytes

    def _log_leftover(self, flight: Flight[B], steps: int) -> None:
        """Say what this rank did not train on because another one has no batch for the step of `flight`."""
        if flight.batch is not None:
            left = max(1, length_hint(self._loader) - steps)
            ended = ", ".join(map(str, require(flight.embedding.plan).exhausted))
            warning_once(
                f"pipeline: rank {self._rank} has at least {left} batches left that are not trained on, "
                f"since the loaders of these ranks ended after step {steps}: {ended}"
            )

    def prepare(self, flight: Flight[B], _: Operation) -> None:
        """Bring the batch to the device and find the distinct ids of every table."""
        if flight.batch is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            flight.embedding.unique_ids = {
                table.name: deduplicate(nothing, rows=table.rows) for table in self._tables.tables
            }
            return
        move = getattr(flight.batch, "to", None)
        flight.on_device = flight.batch if move is None else move(self._device, non_blocking=True)
        found = list(self._features(flight.on_device))
        wanted = {}
        for path, collection in self._collections.items():
            names = [feature for table in collection.tables for feature in table.feature_names]
            flight.features[path] = _holding(found, names, path)
            of_feature = flight.features[path].to_dict()
            for table in collection.tables:
                ids = [of_feature[feature].values() for feature in table.feature_names]
                one = deduplicate(torch.cat(ids), rows=table.num_embeddings)
                wanted[_name(path, table.name)] = one
                places = one.inverse.split([len(some) for some in ids])
                flight.places |= {(path, f): place for f, place in zip(table.feature_names, places, strict=True)}
        flight.embedding.unique_ids = wanted

    def agree(self, _: Flight[B], __: Operation) -> None:
        """Do nothing: TorchRec averages over ranks, so no schedule of a pipeline exchanges a count."""

    def forward(self, flight: Flight[B], _: Operation) -> None:
        """Run their model; rows come from those that were fetched. Learning rates are those that are set by now."""
        with self._shard.lr_lock:
            self._optimizer.zero_grad()
        flight.embedding.lr = self._shard.learning_rates()
        for values in require(flight.embedding.rows).values():
            values.requires_grad_()
        self._computing = flight
        try:
            flight.losses, flight.output = self._model(flight.on_device)
        finally:
            self._computing = None

    def backward(self, flight: Flight[B], _: Operation) -> None:
        """Gradients of rows and of the dense part. TorchRec means over ranks, so rows do too."""
        require(flight.losses).sum().backward()
        flight.losses = None
        for gradient in flight.embedding.row_gradients.values():
            gradient.div_(self._divisor)

    def update_dense(self, _: Flight[B], __: Operation) -> None:
        """Let their optimizer change the dense part. What it says about tables is their learning rate."""
        with self._shard.lr_lock:
            self._optimizer.step()

    def _served(self, path: str) -> Serve:
        collection = self._collections[path]
        tables = {feature: _name(path, t.name) for t in collection.tables for feature in t.feature_names}

        def serve(features: KeyedJaggedTensor) -> dict[str, JaggedTensor] | None:
            flight = self._computing
            if flight is None:
                (self.forget if collection.training and torch.is_grad_enabled() else self.settle)()
                return None
            _require_announced(features, flight.features[path], list(tables), path)
            rows, of_feature = require(flight.embedding.rows), flight.features[path].to_dict()
            values = {f: functional.embedding(flight.places[path, f], rows[table]) for f, table in tables.items()}
            return {f: JaggedTensor(values=values[f], lengths=of_feature[f].lengths()) for f in tables}

        return serve


def _flight(batch: B | None, before: EmbeddingContext | None = None) -> Flight[B]:
    return Flight(batch, EmbeddingContext(previous=before, exhausted=batch is None))


def _own_rows(collections: Mapping[str, PrioritizedEmbeddingCollection]) -> tuple[list[Table], FusedShard]:
    """All tables of a model, and what keeps this rank's rows of them."""
    named = {path: {t.name: _name(path, t.name) for t in one.tables} for path, one in collections.items()}
    every = [(named[path][table.name], table) for path, one in collections.items() for table in one.tables]
    tables = [Table(name, table.num_embeddings, table.embedding_dim) for name, table in every]
    return tables, FusedShard([FusedCollection(one, named[path]) for path, one in collections.items()])


def _require_even(tables: ShardedTables, group: dist.ProcessGroup) -> None:
    """Refuse a plan that deals rows in other blocks than TorchRec does by itself: their owners are computed."""
    state = tables.shard.state()
    for table in tables.tables:
        expected, found = len(table.owned(group.rank(), group.size())), len(state[table.name])
        if found != expected:
            what = f"rank {group.rank()} has {found} of {table.rows} rows, where equal blocks have {expected}"
            remedy = "plan it row_wise without sizes of your own"
            raise UsageError(what, where=f"table '{table.name}'", remedy=remedy)


def _name(path: str, table: str) -> str:
    """Tables of two collections may have one name."""
    return f"{path}/{table}"


def _fields_of(batch: Any) -> list[KeyedJaggedTensor]:
    """The KeyedJaggedTensors of a batch: itself, its items, or its fields."""
    if isinstance(batch, KeyedJaggedTensor):
        return [batch]
    if isinstance(batch, Mapping):
        values: Iterable[Any] = batch.values()
    elif isinstance(batch, Sequence):
        values = batch
    else:
        values = [getattr(batch, f.name) for f in fields(batch)] if is_dataclass(batch) else vars(batch).values()
    return [value for value in values if isinstance(value, KeyedJaggedTensor)]


def _holding(found: list[KeyedJaggedTensor], names: list[str], path: str) -> KeyedJaggedTensor:
    """The one that holds the features of a collection."""
    holding = [one for one in found if set(names) <= set(one.keys())]
    if len(holding) == 1:
        return holding[0]
    what = f"{len(holding)} of the {len(found)} KeyedJaggedTensors of a batch hold the features {', '.join(names)}"
    remedy = "say which there are: fs.Pipeline(..., features=lambda batch: [batch.of_users, batch.of_items])"
    raise UsageError(what, where=f"collection '{path}'", remedy=remedy)


def _require_announced(
    given_now: KeyedJaggedTensor, announced: KeyedJaggedTensor, names: Sequence[str], path: str
) -> None:
    """Rows were fetched for what the batch holds; a model that asks for something else would get the wrong ones."""
    if given_now is announced or given_now.values() is announced.values():
        return
    now, then = given_now.to_dict(), announced.to_dict()
    pairs = [(now[name], then[name]) for name in names if name in now]
    same = [torch.equal(a.values(), b.values()) and torch.equal(a.lengths(), b.lengths()) for a, b in pairs]
    if not all(same) or len(same) < len(names):
        what = "the model looks up other ids than the batch holds, so their rows were not fetched"
        remedy = "let the loader change ids, or say what is looked up: fs.Pipeline(..., features=...)"
        raise UsageError(what, where=f"collection '{path}'", remedy=remedy)
