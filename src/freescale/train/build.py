"""From a config to a trainer, and from a trainer to a run in its folder. The only module that wires all packages.

runs/NAME/config.toml         the whole config
runs/NAME/config.step-N.toml  the config up to step N, where a resume changed it
runs/NAME/metrics.jsonl       see `train.metrics_logger`
runs/NAME/checkpoints/        see `checkpoint.checkpoints`
runs/latest                   a link to the newest run
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from freescale import config as configs
from freescale.balance.cost import Cost, is_worthwhile
from freescale.balance.group_exchange import open_grouped_exchange
from freescale.balance.group_planner import GroupPlanner
from freescale.balance.planner import Planner
from freescale.balance.rank_groups import RankGroups
from freescale.balance.sample_exchange import BalancedBatches, Batches, SampleExchange
from freescale.bubbles.recorder import Recorder
from freescale.bubbles.step_profiler import StepProfiler
from freescale.checkpoint import checkpoints
from freescale.checkpoint.checkpoints import model_tensors, own_tensors
from freescale.checkpoint.run_folder import require_start
from freescale.checkpoint.tensor_files import snapshot_bytes
from freescale.config import RunConfig
from freescale.data.loader import Loader
from freescale.data.vocabulary import RAW_IDS
from freescale.embedding.prioritized import EmbeddingMemory
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.tables import Table
from freescale.errors import INTERRUPTED, NOTHING_NEW, DataError, UsageError
from freescale.log import info_once, warning_once
from freescale.models.protocol import Model
from freescale.overlap.autotune import Autotuner, Setting
from freescale.overlap.hazards import require_safe
from freescale.overlap.schedule import Schedule, overlapped, serial
from freescale.progress import progress
from freescale.train import continuous
from freescale.train.checkpoint_manager import TrainerComponents
from freescale.train.evaluation import build_evaluation, build_validation
from freescale.train.metric_sinks import MonitoringOptions
from freescale.train.metrics_logger import MetricsLogger
from freescale.train.sharded_model import (
    ShardedModel,
    build_model_for,
    build_optimizer,
    build_sharded_model,
    data_parallel,
    replicate_rows,
)
from freescale.train.step import Step
from freescale.train.step_autotuner import StepAutotuner
from freescale.train.trainer import Trainer
from freescale.transport.selection import TWO_LEVEL, TransportSelection, select_transports, transport_for_samples
from freescale.transport.world import World, destroy_world, host_of_each_rank, restart_count
from freescale.visibility import Visibility

_SAMPLED_GROUPS = 16  # row groups whose lengths decide balance.mode = "auto"
_MIN_STEPS_PER_INTERVAL = 16  # of bubbles: shorter intervals cost more than they are worth


def train(
    config: RunConfig,
    world: World,
    folder: Path,
    *,
    resume: bool,
    autoresume: bool = False,
    accept_changes: bool = False,
    monitoring: MonitoringOptions | None = None,
    quiet: bool = False,
    until: str = "",
    on_checkpoint: Callable[[Path], None] | None = None,
) -> int:
    """Train a config in a folder; returns the exit code of the command.

    `autoresume`: resume if there is a checkpoint, else start. `on_checkpoint`: called on all ranks with the path of
    each checkpoint once it is complete, in the same order.
    `until`: train on the partitions up to this one that are not trained yet, and evaluate each of them before.
    """
    newest = checkpoints.newest(folder / "checkpoints", world.transport)
    restarted = restart_count() > 0
    if until:
        config = continuous.select_partitions(config, until, world.transport)
        if newest is not None and continuous.is_trained(config, newest):
            if world.is_rank_zero:
                info_once(f"there is no new partition up to {config.data.until}")
            destroy_world()
            return NOTHING_NEW
    elif not restarted:
        require_start(folder, newest, resume=resume, autoresume=autoresume)
    with progress("building the model"):
        trainer = build(config, world, folder, monitoring=monitoring, quiet=quiet, continuously=bool(until))
    trainer.checkpoints.on_complete = on_checkpoint
    if newest is not None:
        trainer.checkpoints.resume(partial(_review, trainer.components, accept_changes=accept_changes))
    elif restarted:
        trainer.checkpoints.continue_from_here("there is no checkpoint yet: training begins again")
    if world.is_rank_zero:
        _save_config(config, folder / "config.toml", step=trainer.progress.done)
        _link_latest(folder)
    finished = trainer.fit()
    trainer.close(finished=finished)
    destroy_world()
    return 0 if finished else INTERRUPTED


def build(
    config: RunConfig,
    world: World,
    folder: Path,
    *,
    model: Model | None = None,
    monitoring: MonitoringOptions | None = None,
    quiet: bool = False,
    continuously: bool = False,
) -> Trainer:
    """Build a trainer. `model`: a custom model instead of the config's; it is trained, not evaluated.

    `quiet`: print nothing; the files are written all the same. `continuously`: evaluate each partition before it is
    trained.
    """
    quarantine = str(folder / f"quarantine-{world.rank}.jsonl") if config.data.on_bad == "skip" else None
    loader = Loader.from_run(config, rank=world.rank, world_size=world.world_size, quarantine_file=quarantine)
    _require_columns(config, loader)
    transports = _select_transports(config, world, loader)
    model_or_default = model or build_model_for(config, loader)
    buckets = checkpoints.created_buckets(folder / "checkpoints", config.dynamic_tables, world.transport)
    moved = {"transport": transports.urgent, "layout": transports.layout}
    sharded = build_sharded_model(config, world, model_or_default, buckets=buckets, **moved)
    steps = config.train.epochs * len(loader)
    steps = min(steps, config.train.max_steps or steps)
    every = max(config.train.log_every, _MIN_STEPS_PER_INTERVAL)
    profiler = StepProfiler(folder, steps=steps, every=every, device=world.device, timeout=config.train.timeout)
    world.transport.add_tracer(profiler.recorder.begin_transfer)
    for transport in transports.urgent_choices.values():
        transport.add_tracer(profiler.recorder.begin_transfer)
    parallel = data_parallel(sharded.module, world, profiler.recorder)
    optimizer = build_optimizer(config, sharded.module.parameters())
    events = events_per_rank(config, world, loader)
    replicated = replicate_rows(config, world, sharded.tables, transports.layout, events=events)
    schedules = _build_schedules(config, sharded.tables)
    schedule = schedules[transports.deferred is not None]
    cost = _build_cost(config, model)
    step = Step(parallel, sharded.tables, optimizer, schedule, world, profiler.recorder, transports, config.train, cost)
    tuner = Autotuner(_settings(config, transports))
    batches, planner = _balance(config, world, loader, cost, profiler.recorder, transports.name)
    components = TrainerComponents(
        config=config,
        world=world,
        loader=batches,
        planner=planner,
        steps=steps,
        module=sharded.module,
        tables=sharded.tables,
        optimizer=optimizer,
        step=step,
        autotuner=StepAutotuner(step, tuner, schedules, transports, world),
        profiler=profiler,
        cost=cost,
        data=loader.identity,
        evaluate=None if model else build_evaluation(config, world, sharded.module),
        partitions=loader.partitions if continuously else {},
        validate=build_validation(config, world, sharded.module) if continuously else None,
    )
    opened = monitoring if monitoring is not None and world.is_rank_zero else MonitoringOptions()
    sinks = opened.open(folder, config, steps=steps)
    metrics = MetricsLogger(folder, is_rank_zero=world.is_rank_zero, steps=steps, sinks=sinks, quiet=quiet)
    overlap = [] if transports.deferred is None else _describe_overlap(config, world, loader, sharded)
    for line in [*sharded.plan, *replicated, *transports.reasons, *overlap, *_describe_snapshot(world, sharded)]:
        metrics.print_line(line)
    return Trainer(components, folder, metrics)


def _select_transports(config: RunConfig, world: World, loader: Loader) -> TransportSelection:
    """Select what moves embedding rows. Replicated tables move none."""
    if config.tables.placement == "replicated":
        return TransportSelection.of_one(world.transport)
    size, overlap = int(events_per_rank(config, world, loader) * config.model.dim * 4), config.tables.overlap
    compared = overlap == "auto"
    return select_transports(
        world,
        config.transport,
        deferred=overlap != "off",
        sent_bytes=size,
        compared=compared,
        exchange=config.tables.exchange,
    )


def events_per_rank(config: RunConfig, world: World, loader: Loader) -> float:
    """Return the events of an average batch on one rank."""
    manifest = loader.dataset.manifest
    length = min(config.data.max_history, manifest.events / max(1, manifest.rows)) if manifest else 1
    return config.data.global_batch / world.world_size * length


def _describe_overlap(config: RunConfig, world: World, loader: Loader, sharded: ShardedModel) -> list[str]:
    """Return what overlapped transfers will hold, as human-readable lines."""
    tables = sharded.tables.tables if sharded.tables is not None else ()
    expected = expected_overlap_memory(config, tables, events=events_per_rank(config, world, loader))
    ids, rows, gradients = (f"{size / 1e6:,.2f} MB" for size in expected)
    held = f"{rows} of rows, {gradients} of row gradients, {ids} of ids"
    return [f"overlapped transfers will hold about {held} per rank, for batches of average length"]


def _describe_snapshot(world: World, sharded: ShardedModel) -> list[str]:
    """Return what a checkpoint will hold on a device until it is copied to the host, as human-readable lines."""
    rank = {"rank": world.rank, "world_size": world.world_size}
    size = snapshot_bytes(own_tensors(model_tensors(sharded.module, sharded.tables, **rank), **rank))
    held = f"{size / 1e6:,.2f} MB of rows and weights, beside the state of the dense optimizer"
    return [f"checkpoints will hold {held}, until they are copied to the host"] if size else []


def expected_overlap_memory(config: RunConfig, tables: Iterable[Table], *, events: float) -> EmbeddingMemory:
    """Return the bytes that overlap holds on a rank beside the tables: ids and rows of the next batch, and gradients.

    A rank holds what it receives, and what it sends to others, which is as much on average; of ids it also holds the
    numbers of their rows. Ids count as uniform over a table: popular ones repeat, so that less is held.
    """
    itemsize = 8 if config.train.precision == "fp64" else 4
    ids = values = 0.0
    for table in tables:
        sampled = config.task.negatives if config.task.kind == "retrieval" and table.name == "item" else 0
        distinct = table.rows * -math.expm1(-events * (1 + sampled) / max(1, table.rows))
        ids, values = ids + 3 * distinct * 8, values + 2 * distinct * table.dim * itemsize
    batches = 2  # the last one, whose gradients are in transfer, and the next one, whose rows are
    return EmbeddingMemory(int(batches * ids), int(values), int(values))


def _settings(config: RunConfig, transports: TransportSelection) -> list[Setting]:
    """Return the settings of a step that training compares. The first one is that of the first step."""
    settings: list[Setting] = []
    for exchange in transports.urgent_choices:
        names = [name for name in transports.deferred_choices if (name == TWO_LEVEL) == (exchange == TWO_LEVEL)]
        overlapping = [Setting(overlap=True, deferred=name, exchange=exchange) for name in names]
        always = config.tables.overlap == "on" and overlapping
        settings += overlapping if always else [*overlapping, Setting(overlap=False, exchange=exchange)]
    return settings


def _build_schedules(config: RunConfig, tables: ShardedTables | None) -> dict[bool, Schedule]:
    """Return the schedules of a step without and with overlap, checked for hazards."""
    replicates = tables is not None and tables.replicated is not None
    parts, sharded = config.train.micro_batches, config.tables.placement == "sharded"
    assigns = bool(config.dynamic_tables)
    options: dict[str, Any] = {"assigns": assigns, "samples": config.samples_slots, "replicates": replicates}
    return {
        False: require_safe(serial(sharded=sharded, micro_batches=parts, **options)),
        True: require_safe(overlapped(micro_batches=parts, **options)),
    }


def _build_cost(config: RunConfig, model: Model | None) -> Cost:
    """Return the measured cost model, else one from the config. A custom model costs one unit per token."""
    if config.balance.cost:
        return Cost(*config.balance.cost, visibility=Visibility.of_model(config.model))
    return Cost.of_model(config.model) if model is None else Cost(token=1.0)


def _is_balanced(config: RunConfig, world: World, loader: Loader, cost: Cost) -> bool:
    """Return whether samples are balanced. `auto` depends on the data and the config alone, never on a clock."""
    if config.balance.mode != "auto":
        return config.balance.mode == "on"
    groups = np.unique(np.linspace(0, loader.dataset.first_groups - 1, _SAMPLED_GROUPS).astype(np.int64)).tolist()
    lengths = np.concatenate([loader.dataset.read_group(group).columns["item_id"].lengths for group in groups])
    costs = cost.of(np.minimum(lengths, config.data.max_history))
    batch = max(1, config.data.global_batch // world.world_size)
    worthwhile = is_worthwhile(costs, world_size=world.world_size, batch=batch)
    if world.is_rank_zero:
        info_once(f"balance.mode = auto: samples {'are' if worthwhile else 'are not'} balanced, by their lengths")
    return worthwhile


def _balance(
    config: RunConfig, world: World, loader: Loader, cost: Cost, recorder: Recorder, transport_name: str
) -> tuple[Batches, Planner | None]:
    """Return the balanced batches and their planner; the loader itself if there is nothing to balance."""
    if world.world_size == 1 or not _is_balanced(config, world, loader, cost):
        return loader, None
    if config.balance.adapt and world.is_rank_zero:
        warning_once("balance.adapt: placement follows measured times, so runs with the same seed differ in rounding")
    exchange, planner = _build_sample_exchange(config, world, cost, transport_name)
    exchange.add_tracer(lambda name, size: recorder.begin_collective(name, "samples", independent=True, size=size))
    return BalancedBatches(loader, exchange), planner


def _build_sample_exchange(
    config: RunConfig, world: World, cost: Cost, transport_name: str
) -> tuple[SampleExchange, Planner]:
    """Return the exchange of samples between all ranks, or in groups of them, and its planner. Collective."""
    rules, anchored, timeout = config.balance, config.task.anchors != "none", config.train.timeout
    is_large = 0 < rules.group_ranks < world.world_size
    if is_large and rules.adapt and world.is_rank_zero:
        warning_once("balance.adapt compares the speeds of all ranks, so samples are not placed in groups of ranks")
    if not is_large or rules.adapt:
        transport, hosts = transport_for_samples(transport_name, timeout=timeout)
        planner = Planner(
            cost,
            rules,
            world_size=world.world_size,
            hosts=hosts,
            is_rank_zero=world.is_rank_zero,
            anchored=anchored,
        )
        return SampleExchange(transport, planner), planner
    hosts = np.array(host_of_each_rank(world.transport).host_of)
    groups = RankGroups.of_hosts(hosts, rules.group_ranks)
    if world.is_rank_zero:
        between = (
            "never move" if rules.counts == "equal" else "move where groups differ by more than the tolerance allows"
        )
        sizes = f"{len(groups.sizes)} groups of {groups.sizes.min()} to {groups.sizes.max()} ranks"
        info_once(f"balance.group_ranks: samples are placed inside {sizes}; between groups they {between}")
    group_planner = GroupPlanner(cost, rules, groups=groups, rank=world.rank, hosts=hosts, anchored=anchored)
    shared_memory = transport_name == "shared_memory"
    return open_grouped_exchange(
        world.transport, group_planner, shared_memory=shared_memory, timeout=timeout
    ), group_planner


def _require_columns(config: RunConfig, loader: Loader) -> None:
    """Refuse data that the task cannot use, before anything is built."""
    if not loader.vocabulary.items:
        what = "this data set has no item count, so the size of the item table is unknown"
        remedy = f"count the items: freescale data import histories {config.data.path} NEW_FOLDER"
        if loader.identity.vocabulary == RAW_IDS:
            what = "this data set holds raw ids of items, which need a dynamic table"
            remedy = '[features.item] with ids = "dynamic" and rows, the items that have a row at a time'
        raise DataError(what, where=config.data.path, remedy=remedy)


def _review(components: TrainerComponents, checkpoint: Path, facts: Mapping[str, Any], *, accept_changes: bool) -> None:
    """Log what differs from the config of a checkpoint; refuse what would change the training result."""
    changes = configs.differences(configs.parse(facts["config"], where=str(checkpoint)), components.config)
    if components.world.is_rank_zero and changes:
        warning_once(f"resuming with a changed config: {', '.join(map(str, changes))}")
    changed = [str(change) for change in changes if change.changes_result]
    if "data" in facts and not components.data.continues(facts["data"]):
        changed.append(f"the contents of {components.config.data.path}")
    if changed and not accept_changes:
        what = f"resuming would change the training result: {', '.join(changed)}"
        remedy = "leave these out to continue the same training, or add --accept-changes to continue with them"
        raise UsageError(what, where=str(checkpoint), remedy=remedy)


def _save_config(config: RunConfig, path: Path, *, step: int) -> None:
    """Write the config. A config that it replaces is kept under the step up to which it was used."""
    if path.exists() and configs.differences(configs.load(path), config):
        path.replace(path.with_name(f"config.step-{step:08d}.toml"))
    configs.save(config, path)


def _link_latest(folder: Path) -> None:
    """Let `latest` point to a run, atomically: several runs may end at the same time."""
    run = folder.resolve()  # --out may be `latest` itself
    link = run.with_name(f".latest-{os.getpid()}")
    with contextlib.suppress(OSError):  # some file systems have no links
        link.symlink_to(run.name)
        try:
            link.replace(run.with_name("latest"))
        finally:
            link.unlink(missing_ok=True)
