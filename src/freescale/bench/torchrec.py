"""The loops of TorchRec, around the same model, tables and samples that the trainer is given.

The plain loop fetches rows when they are needed; SparseDist sends the ids of the next batch behind compute. Both are
TorchRec's own code: its transfers are only watched, so that their books can be kept like ours.
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

from freescale.bubbles.recorder import record_comm_hook as watched_hook
from freescale.bubbles.step_profiler import StepProfiler
from freescale.config import RunConfig
from freescale.data.loader import Loader, prefetch
from freescale.embedding.fused import FusedCollection, embedding_collection, shard_row_wise
from freescale.embedding.ids import deduplicate
from freescale.embedding.sharded import fill
from freescale.embedding.tables import Table
from freescale.models.protocol import Model, Rows
from freescale.train.build import optimizer_of
from freescale.transport.world import World

_AHEAD = 2


@dataclass
class Prepared(Pipelineable):
    """A rank's part of a step, on its device."""

    inputs: Any
    ids: KeyedJaggedTensor
    places: dict[str, Tensor]
    """Of every id, where its row lies among those that TorchRec brings for each: the first one, for models compare."""
    scale: float
    """Of the sum of losses, so that the mean of all ranks' gradients is that of the mean loss."""

    def to(self, *_: Any, **__: Any) -> "Prepared":
        """Itself: asked for by TorchRec's pipeline, as are the next two."""
        return self

    def record_stream(self, stream: Any) -> None:
        """Nothing: what it holds is not freed while it is used."""

    def pin_memory(self) -> "Prepared":
        """Itself."""
        return self


class Head(nn.Module):
    """What follows the rows. A module of its own, so that TorchRec's tracing stops before it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Prepared, found: dict[str, JaggedTensor]) -> tuple[Tensor, Tensor]:
        """The loss, twice: TorchRec's pipeline trains on the first and gives out the second."""
        rows = {name: Rows(found[name].values(), places) for name, places in batch.places.items()}
        loss = self.model(batch.inputs, rows) * batch.scale
        return loss, loss.detach()


class OverTorchRec(nn.Module):
    """A model behind TorchRec's embeddings."""

    def __init__(self, model: Model, rows: EmbeddingCollection) -> None:
        super().__init__()
        self.rows, self.head = rows, Head(model)

    def forward(self, batch: Prepared) -> tuple[Tensor, Tensor]:
        """Rows, then all that follows."""
        return self.head(batch, self.rows(batch.ids))


def train(config: RunConfig, world: World, folder: Path, model: Model, *, pipelined: bool) -> list[float]:
    """Train for `train.max_steps`, and give the mean loss of every step. Its bubbles are kept in the folder."""
    steps = config.train.max_steps
    counts = _counts(config, world, model)
    parallel = _sharded(config, world, model)
    bubbles = StepProfiler(folder, steps=steps, every=steps, device=world.device, timeout=config.train.timeout)
    dense: Any = parallel._dmp_wrapped_module
    dense.register_comm_hook(None, watched_hook(allreduce_hook, bubbles.recorder))
    optimizer = optimizer_of(config, [p for n, p in parallel.named_parameters() if "rows." not in n])
    batches = bubbles.iterate("data", prefetch(_prepared(config, world, model, counts), _AHEAD))
    loop = _pipelined if pipelined else _plain
    losses = []
    with watched(bubbles):
        bubbles.restart_step()
        for loss in loop(parallel, optimizer, batches, bubbles, world.device):
            bubbles.end_step()
            losses.append(loss)
    bubbles.close()
    own = torch.stack(losses).double() / world.world_size
    return world.transport.all_reduce(own, name="losses").wait().tolist()


def _plain(
    parallel: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Prepared], bubbles: StepProfiler, _: Any
) -> Iterator[Tensor]:
    for batch in batches:
        with bubbles.record("forward"):
            optimizer.zero_grad()
            loss, out = parallel(batch)
        with bubbles.record("backward"):
            loss.backward()
        with bubbles.record("optimizer"):
            optimizer.step()
        yield out


def _pipelined(
    parallel: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Prepared],
    bubbles: StepProfiler,
    device: torch.device,
) -> Iterator[Tensor]:
    """Its books know forward and backward only together."""
    pipeline = TrainPipelineSparseDist(parallel, optimizer, device)
    while True:
        try:
            with bubbles.record("forward"):
                out = pipeline.progress(batches)
        except StopIteration:
            return
        yield out


def _batches(config: RunConfig, world: World) -> Iterator[Any]:
    """Of this rank; epoch after epoch, as the trainer has them."""
    loader = Loader(config.data, seed=config.seed, rank=world.rank, world_size=world.world_size)
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), config.train.max_steps)


def _counts(config: RunConfig, world: World, model: Model) -> list[int]:
    """Terms of the loss of every step, on all ranks together."""
    own = torch.tensor([model.prepare(batch).count for batch in _batches(config, world)])
    return world.transport.all_reduce(own, name="counts").wait().tolist()


def _prepared(config: RunConfig, world: World, model: Model, counts: Sequence[int]) -> Iterator[Prepared]:
    for batch, count in zip(_batches(config, world), counts, strict=True):
        inputs = model.prepare(batch.to(world.device))
        ids = {name: inputs.ids[name].flatten() for name in model.tables}
        lengths = torch.tensor([len(of_table) for of_table in ids.values()], device=world.device)
        features = KeyedJaggedTensor(keys=list(ids), values=torch.cat(list(ids.values())), lengths=lengths)
        places = {name: _first_places(inputs.ids[name], rows) for name, (rows, _) in model.tables.items()}
        yield Prepared(inputs, features, places, world.world_size / max(1, count))


def _first_places(ids: Tensor, rows: int) -> Tensor:
    """Of every id, where it stands for the first time."""
    unique, index = deduplicate(ids.flatten(), rows=rows)
    first = index.new_full((len(unique),), len(index))
    first.scatter_reduce_(0, index, torch.arange(len(index), device=ids.device), "amin")
    return first[index].view(ids.shape)


def _sharded(config: RunConfig, world: World, model: Model) -> DistributedModelParallel:
    """Planned and filled as the trainer's tables are."""
    tables = [Table(name, rows, dim) for name, (rows, dim) in model.tables.items()]
    whole = OverTorchRec(model, embedding_collection(tables))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # TorchRec's own call of DDP
        parallel = shard_row_wise(whole, tables, config.tables, world.group, world.device)
    (rows,) = [module for module in parallel.modules() if isinstance(module, ShardedEmbeddingCollection)]
    fill(tables, FusedCollection(rows, {table.name: table.name for table in tables}).weights, config, world)
    return parallel


@contextlib.contextmanager
def watched(bubbles: StepProfiler) -> Iterator[None]:
    """Meanwhile TorchRec's transfers of ids, rows and gradients are recorded."""
    theirs = dist.all_to_all_single

    def watching(*words: Any, **named: Any) -> Any:
        given: Tensor = named["input"] if "input" in named else words[1]
        in_backward = torch._C._current_graph_task_id() != -1
        kind = "ids" if not given.is_floating_point() else "row gradients" if in_backward else "urgent rows"
        flight = bubbles.recorder.begin_collective(f"{kind} of torchrec", kind)
        return Watched(theirs(*words, **named), flight)

    dist.all_to_all_single = watching  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_to_all_single = theirs


class Watched(dist.Work):
    """A transfer of TorchRec's, whose wait is recorded."""

    def __init__(self, work: Any, flight: Any) -> None:
        super().__init__()
        self._work, self._flight = work, flight

    def wait(self, timeout: timedelta = timedelta(seconds=120)) -> bool:
        """As the transfer does."""
        self._flight.on_wait()
        found = self._work.wait(timeout)
        self._flight.on_complete()
        return found
