"""Trains with TorchRec's loops, on the same model, tables and samples as the trainer.

The plain loop fetches rows when they are needed. SparseDist overlaps the ids of the next batch with compute. Both are
TorchRec's own code; its collectives are recorded, so that its bubbles can be attributed like FreeScale's.
"""

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from freescale.bubbles.recorder import record_comm_hook
from freescale.bubbles.step_profiler import StepProfiler
from freescale.config import RunConfig
from freescale.data.loader import Loader, prefetch
from freescale.embedding.fused import FusedCollection, embedding_collection, shard_row_wise
from freescale.embedding.ids import deduplicate
from freescale.embedding.sharded import fill
from freescale.embedding.tables import RowPositions
from freescale.models.protocol import Model, Rows
from freescale.train.sharded_model import build_optimizer, model_tables
from freescale.transport.world import World

_PREFETCH = 2


@dataclass
class PreparedBatch(Pipelineable):
    """The local batch of a step, on its device."""

    inputs: Any
    ids: KeyedJaggedTensor
    first_index: dict[str, Tensor]
    """For every id, the index of the first equal id: models compare rows by index."""
    scale: float
    """Factor of the sum of losses that makes the mean gradient of all ranks that of the mean loss."""

    def to(self, *_: Any, **__: Any) -> "PreparedBatch":
        """Return itself. TorchRec's pipeline calls this and the next two methods."""
        return self

    def record_stream(self, stream: Any) -> None:
        """Do nothing: the tensors outlive their use."""

    def pin_memory(self) -> "PreparedBatch":
        """Return itself."""
        return self


class LossHead(nn.Module):
    """The model after its rows. A separate module, so that TorchRec's tracing stops before it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PreparedBatch, jagged: dict[str, JaggedTensor]) -> tuple[Tensor, Tensor]:
        """Return the loss twice: TorchRec's pipeline trains on the first and returns the second."""
        rows = {name: Rows(jagged[name].values(), first_index) for name, first_index in batch.first_index.items()}
        loss = self.model(batch.inputs, rows) * batch.scale
        return loss, loss.detach()


class TorchRecModel(nn.Module):
    """A model on top of TorchRec's embeddings."""

    def __init__(self, model: Model, rows: EmbeddingCollection) -> None:
        super().__init__()
        self.rows, self.head = rows, LossHead(model)

    def forward(self, batch: PreparedBatch) -> tuple[Tensor, Tensor]:
        """Look up the rows and compute the loss."""
        return self.head(batch, self.rows(batch.ids))


def train(config: RunConfig, world: World, folder: Path, model: Model, *, pipelined: bool) -> list[float]:
    """Train for `train.max_steps` and return the mean loss of every step. Writes its bubbles to the folder."""
    steps = config.train.max_steps
    counts = _loss_counts(config, world, model)
    parallel = _shard_model(config, world, model)
    profiler = StepProfiler(folder, steps=steps, every=steps, device=world.device, timeout=config.train.timeout)
    dense: Any = parallel._dmp_wrapped_module
    dense.register_comm_hook(world.group, record_comm_hook(allreduce_hook, profiler.recorder))
    optimizer = build_optimizer(config, [p for n, p in parallel.named_parameters() if "rows." not in n])
    batches = profiler.iterate("data", prefetch(_prepare_batches(config, world, model, counts), _PREFETCH))
    loop = _train_pipelined if pipelined else _train_plain
    losses = []
    with record_transfers(profiler):
        profiler.restart_step()
        for loss in loop(parallel, optimizer, batches, profiler, world.device):
            profiler.end_step()
            losses.append(loss)
    profiler.close()
    local = torch.stack(losses).double() / world.world_size
    return world.transport.reduce_values(local, name="losses").tolist()


def _train_plain(
    parallel: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[PreparedBatch],
    profiler: StepProfiler,
    _: Any,
) -> Iterator[Tensor]:
    for batch in batches:
        with profiler.record("forward"):
            optimizer.zero_grad()
            loss, out = parallel(batch)
        with profiler.record("backward"):
            loss.backward()
        with profiler.record("optimizer"):
            optimizer.step()
        yield out


def _train_pipelined(
    parallel: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[PreparedBatch],
    profiler: StepProfiler,
    device: torch.device,
) -> Iterator[Tensor]:
    """TorchRec's pipeline does not separate forward and backward."""
    pipeline = TrainPipelineSparseDist(parallel, optimizer, device)
    while True:
        try:
            with profiler.record("forward"):
                out = pipeline.progress(batches)
        except StopIteration:
            return
        yield out


def _batches(config: RunConfig, world: World) -> Iterator[Any]:
    """Yield the batches of this rank, epoch after epoch, as the trainer reads them."""
    loader = Loader.from_run(config, rank=world.rank, world_size=world.world_size)
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), config.train.max_steps)


def _loss_counts(config: RunConfig, world: World, model: Model) -> list[int]:
    """Return the number of loss terms of every step, summed over all ranks."""
    local = torch.tensor([model.prepare(batch).count for batch in _batches(config, world)])
    return world.transport.reduce_values(local, name="counts").tolist()


def _prepare_batches(config: RunConfig, world: World, model: Model, counts: Sequence[int]) -> Iterator[PreparedBatch]:
    """Yield batches with ids in the order of rows in which the trainer's owners are equally busy."""
    tables = model_tables(config, model)
    positions = {table.name: RowPositions(table.order) for table in tables}
    for batch, count in zip(_batches(config, world), counts, strict=True):
        inputs = model.prepare(batch.to(world.device))
        ids = {table.name: positions[table.name](inputs.ids[table.name].flatten()) for table in tables}
        lengths = torch.tensor([len(table_ids) for table_ids in ids.values()], device=world.device)
        features = KeyedJaggedTensor(keys=list(ids), values=torch.cat(list(ids.values())), lengths=lengths)
        first_index = {name: _first_occurrence(inputs.ids[name], rows) for name, (rows, _) in model.tables.items()}
        yield PreparedBatch(inputs, features, first_index, world.world_size / max(1, count))


def _first_occurrence(ids: Tensor, rows: int) -> Tensor:
    """Return for every id the index of its first occurrence."""
    unique, index = deduplicate(ids.flatten(), rows=rows)
    first = index.new_full((len(unique),), len(index))
    first.scatter_reduce_(0, index, torch.arange(len(index), device=ids.device), "amin")
    return first[index].view(ids.shape)


def _shard_model(config: RunConfig, world: World, model: Model) -> DistributedModelParallel:
    """Shard the model, with tables planned and initialized as the trainer's."""
    tables = model_tables(config, model)
    model_with_rows = TorchRecModel(model, embedding_collection(tables, world.world_size))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # TorchRec's own call of DDP
        parallel = shard_row_wise(model_with_rows, tables, config.tables, world.group, world.device)
    (rows,) = [module for module in parallel.modules() if isinstance(module, ShardedEmbeddingCollection)]
    fill(tables, FusedCollection(rows, {table.name: table.name for table in tables}).weights, config, world)
    return parallel


@contextlib.contextmanager
def record_transfers(profiler: StepProfiler) -> Iterator[None]:
    """Record TorchRec's all-to-alls of ids, rows and gradients inside the context."""
    original = dist.all_to_all_single

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        sent: Tensor = kwargs["input"] if "input" in kwargs else args[1]
        in_backward = torch._C._current_graph_task_id() != -1
        kind = "ids" if not sent.is_floating_point() else "row gradients" if in_backward else "urgent rows"
        record = profiler.recorder.begin_collective(f"{kind} of torchrec", kind)
        return RecordedWork(original(*args, **kwargs), record)

    dist.all_to_all_single = all_to_all_single  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_to_all_single = original


class RecordedWork(dist.Work):
    """A collective of TorchRec whose wait is recorded."""

    def __init__(self, work: Any, record: Any) -> None:
        super().__init__()
        self._work, self._record = work, record

    def wait(self, timeout: timedelta = timedelta(seconds=120)) -> bool:
        """Wait for the collective."""
        self._record.on_wait()
        result = self._work.wait(timeout)
        self._record.on_complete()
        return result
