"""From a config to a trainer: the only place that knows all the rooms."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from freescale.balance.cost import Cost
from freescale.balance.planner import Planner
from freescale.balance.prefetch import BalancedBatches, Batches
from freescale.balance.sample_exchange import Exchange
from freescale.bubbles.recorder import Recorder
from freescale.bubbles.step_profiler import StepProfiler
from freescale.config import RunConfig
from freescale.data.loader import Loader
from freescale.embedding.sharded import ShardedTables, describe_replicated_tables, describe_sharded_tables, shard_tables
from freescale.embedding.tables import ReplicatedTables, Table
from freescale.errors import DataError
from freescale.log import warning_once
from freescale.models.protocol import Model
from freescale.models.ranking import Ranking
from freescale.models.retrieval import Retrieval
from freescale.overlap.hazards import require_safe
from freescale.overlap.schedule import Schedule, overlapped, serial
from freescale.train.evaluate import evaluation_of, require_labels
from freescale.train.journal import Journal
from freescale.train.network import Network, data_parallel
from freescale.train.saving import Parts
from freescale.train.step import Step
from freescale.train.trainer import Trainer
from freescale.transport.base import Transport
from freescale.transport.selection import TransportSelection, select_transports, transport_for_samples
from freescale.transport.world import World

_STEPS_PER_INTERVAL = 16  # of bubbles, at least: shorter ones would cost more than they tell
_MODELS: dict[str, Callable[..., Model]] = {"retrieval": Retrieval, "ranking": Ranking}


@dataclass(frozen=True)
class Assembly:
    """A model and its tables, over all ranks."""

    network: Network
    tables: ShardedTables | None
    plan: list[str]
    """What lives where and what it costs, for people."""


def assemble(config: RunConfig, world: World, model: Model, transport: Transport | None = None) -> Assembly:
    """Give a model its tables and bring both to this rank's device. `transport`: for rows, if not the world's."""
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    tables = [Table(name, rows, dim) for name, (rows, dim) in model.tables.items()]
    if config.tables.placement == "replicated":
        replicated = ReplicatedTables(tables, seed=config.seed, deviation=config.tables.init)
        network = Network(model, replicated).to(world.device, dtype)
        return Assembly(network, None, describe_replicated_tables(tables, dtype))
    sharded = shard_tables(tables, config, world, transport or world.transport, dtype)
    return Assembly(
        Network(model, None).to(world.device, dtype), sharded, describe_sharded_tables(sharded, world.world_size)
    )


def model_of(config: RunConfig, *, items: int) -> Model:
    """The model that the config names, with the weights that its seed gives."""
    torch.manual_seed(config.seed)
    return _MODELS[config.task.kind](config, items=items)


def build(
    config: RunConfig,
    world: World,
    folder: Path,
    *,
    model: Model | None = None,
    tensorboard: bool = False,
    quiet: bool = False,
) -> Trainer:
    """Wire a run. `model`: one's own, instead of the one that the config names; it is trained, not evaluated.

    `quiet`: it tells nothing while it goes; its files tell all.
    """
    quarantine = str(folder / f"quarantine-{world.rank}.jsonl") if config.data.on_bad == "skip" else None
    loader = Loader(
        config.data, seed=config.seed, rank=world.rank, world_size=world.world_size, quarantine_file=quarantine
    )
    _require_columns(config, loader)
    ways = _ways(config, world, loader)
    assembly = assemble(config, world, model or model_of(config, items=loader.vocabulary.rows), ways.urgent)
    steps = config.train.epochs * len(loader)
    steps = min(steps, config.train.max_steps or steps)
    every = max(config.train.log_every, _STEPS_PER_INTERVAL)
    bubbles = StepProfiler(folder, steps=steps, every=every, device=world.device, timeout=config.train.timeout)
    world.transport.add_tracer(bubbles.recorder.begin_transfer)
    ways.urgent.add_tracer(bubbles.recorder.begin_transfer)
    parallel = data_parallel(assembly.network, world, bubbles.recorder)
    optimizer = optimizer_of(config, assembly.network.parameters())
    schedule = _schedule(config, overlaps=ways.deferred is not None)
    step = Step(parallel, assembly.tables, optimizer, schedule, world, bubbles.recorder, ways, config.train)
    cost = _cost(config, model)
    batches, planner = _balanced(config, world, loader, cost, bubbles.recorder, ways.name)
    parts = Parts(
        config=config,
        world=world,
        loader=batches,
        planner=planner,
        steps=steps,
        network=assembly.network,
        tables=assembly.tables,
        optimizer=optimizer,
        step=step,
        bubbles=bubbles,
        cost=cost,
        data=loader.identity,
        evaluate=None if model else evaluation_of(config, world, assembly.network, assembly.tables),
    )
    journal = Journal(folder, is_rank_zero=world.is_rank_zero, steps=steps, tensorboard=tensorboard, quiet=quiet)
    for line in [*assembly.plan, *ways.reasons]:
        journal.say(line)
    return Trainer(parts, folder, journal)


def _ways(config: RunConfig, world: World, loader: Loader) -> TransportSelection:
    """What moves rows between ranks, if any have to move."""
    if config.tables.placement == "replicated":
        return TransportSelection(world.transport, None, [])
    manifest = loader.dataset.manifest
    length = min(config.data.max_history, manifest.events / max(1, manifest.rows)) if manifest else 1
    tokens = config.data.global_batch / world.world_size * length
    overlaps = config.tables.overlap == "on"
    return select_transports(world, config.transport, deferred=overlaps, sent_bytes=int(tokens * config.model.dim * 4))


def _schedule(config: RunConfig, *, overlaps: bool) -> Schedule:
    """In which order a step is done, proven safe."""
    parts, sharded = config.train.micro_batches, config.tables.placement == "sharded"
    return require_safe(overlapped(micro_batches=parts) if overlaps else serial(sharded=sharded, micro_batches=parts))


def _cost(config: RunConfig, model: Model | None) -> Cost:
    """As measured, else as counted. One's own model is taken to cost what its tokens do."""
    if config.balance.cost:
        return Cost(*config.balance.cost)
    return Cost.of_model(config.model) if model is None else Cost(token=1.0)


def _balanced(
    config: RunConfig, world: World, loader: Loader, cost: Cost, recorder: Recorder, way: str
) -> tuple[Batches, Planner | None]:
    """Batches, and what plans them where there is somebody to balance with."""
    if config.balance.mode == "off" or world.world_size == 1:
        return loader, None
    if config.balance.adapt and world.is_rank_zero:
        warning_once("balance.adapt: placement follows measured times, so runs with the same seed differ in rounding")
    transport, hosts = transport_for_samples(way, timeout=config.train.timeout)
    planner = Planner(cost, config.balance, world_size=world.world_size, hosts=hosts, is_rank_zero=world.is_rank_zero)
    transport.add_tracer(lambda name, size: recorder.begin_collective(name, "samples", independent=True, size=size))
    return BalancedBatches(loader, Exchange(transport, planner)), planner


def optimizer_of(config: RunConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Of the dense part."""
    train = config.train
    if train.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=train.lr, weight_decay=train.weight_decay)
    betas = (train.beta1, train.beta2)
    return torch.optim.AdamW(parameters, lr=train.lr, betas=betas, weight_decay=train.weight_decay, fused=True)


def _require_columns(config: RunConfig, loader: Loader) -> None:
    """Refuse data that the task cannot use, before anything is built."""
    if not loader.vocabulary.items:
        what = "nobody counted the items of this data set, so the size of the table is unknown"
        remedy = f"count them: freescale data import histories {config.data.path} NEW_FOLDER"
        raise DataError(what, where=config.data.path, remedy=remedy)
    require_labels(config, loader, "the data")
