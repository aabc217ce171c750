"""Small runs for tests: a config, a world made of test ranks, and what a run leaves behind as plain arrays."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from freescale.config import DataConfig, ModelConfig, RunConfig, TablesConfig, TaskConfig, TrainConfig, TransportConfig
from freescale.data.batch import Batch, Events
from freescale.data.loader import Loader
from freescale.embedding.exchange import AllToAllPlan
from freescale.models.protocol import Model
from freescale.train.build import build
from freescale.train.step import LearningRates
from freescale.train.trainer import Trainer
from freescale.transport import world as worlds
from freescale.transport.c10d import C10d
from tests.support.ranks import World

Arrays = dict[str, NDArray[Any]]


def small(path: Path | str, **changes: Any) -> RunConfig:
    """A run of seconds. Changes are by section: `train={"precision": "fp32"}`."""
    config = RunConfig(
        seed=3,
        data=DataConfig(path=str(path), global_batch=12, shards=8, workers=0, max_history=30),
        model=ModelConfig(dim=8, layers=2, heads=2),
        task=TaskConfig(negatives=5),
        tables=TablesConfig(lr=0.1, overlap="on"),
        transport=TransportConfig(urgent="c10d", deferred="c10d"),
        train=TrainConfig(precision="fp64", lr=0.01, epochs=2, log_every=5),
    )
    for section, values in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return config


def joined(world: World, timeout: float = 60.0) -> worlds.World:
    """What `transport.world.join` gives, for a rank of the tests."""
    group = dist.group.WORLD
    assert group is not None
    transport = C10d(group, world.store, timeout=timeout)
    return worlds.World(world.rank, world.ranks, transport.device, group, transport)


def chosen(batch: Batch, index: list[int]) -> Batch:
    """Some samples of a batch, in the given order."""
    at = torch.tensor(index, dtype=torch.int64)

    def events(of: Events | None) -> Events | None:
        if of is None:
            return None
        lengths = of.lengths[at]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        tokens = [torch.arange(int(of.offsets[i]), int(of.offsets[i + 1])) for i in index]
        taken = torch.cat([torch.empty(0, dtype=torch.int64), *tokens])
        return Events(offsets, {name: values[taken] for name, values in of.features.items()})

    history = events(batch.history)
    assert history is not None
    return replace(
        batch,
        sample_id=batch.sample_id[at],
        scalars={name: values[at] for name, values in batch.scalars.items()},
        history=history,
        candidates=events(batch.candidates),
        targets=events(batch.targets),
        sets={name: taken for name, of in batch.sets.items() if (taken := events(of)) is not None},
    )


def _share(batch: Batch, place: str, world: World) -> Batch:
    return chosen(batch, [i for i in range(len(batch)) if PLACES[place](i, len(batch), world.ranks) == world.rank])


def placed(
    world: World, config: RunConfig, folder: str, place: str, steps: int, model: Model | None = None
) -> tuple[list[float], Arrays]:
    """Train on global batches whose samples are placed by a rule; gives this rank's losses and what it holds."""
    trainer = build(config, joined(world), Path(folder), model=model)
    losses, rates = [], LearningRates(dense=config.train.lr, tables=config.tables.lr)
    epochs = itertools.repeat(list(Loader.from_run(config)))
    shares = [_share(one, place, world) for one in itertools.islice(itertools.chain.from_iterable(epochs), steps)]
    for batch, following in itertools.zip_longest(shares, shares[1:]):
        losses.append(trainer.components.step.run(batch, rates, following=following).loss)
    trainer.components.step.synchronize()
    return losses, held(trainer)


def gradients(world: World, config: RunConfig, folder: str, place: str) -> tuple[float, Arrays]:
    """This rank's loss and the gradients of its first step: of the dense part, and of the own rows."""
    trainer = build(config, joined(world), Path(folder))
    found: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        found.update(
            {
                f"dense.{n}": p.grad.clone()
                for n, p in trainer.components.module.named_parameters()
                if p.grad is not None
            }
        )

    trainer.components.optimizer.register_step_pre_hook(keep)
    tables = trainer.components.tables
    assert tables is not None
    update = tables.update

    def keep_rows(route: AllToAllPlan, arrived: dict[str, torch.Tensor], **more: Any) -> None:
        for name, rows in route.local_rows.items():
            found[name] = torch.zeros_like(tables.shard.state()[name]).index_add(0, rows, arrived[name])
        update(route, arrived, **more)

    tables.update = keep_rows  # type: ignore[method-assign]
    batch = next(iter(Loader.from_run(config)))
    state = trainer.components.step.run(_share(batch, place, world), LearningRates(dense=0.1, tables=0.1))
    trainer.components.step.synchronize()
    return state.loss, {name: value.numpy() for name, value in found.items()}


PLACES: dict[str, Callable[[int, int, int], int]] = {
    "equal": lambda i, _count, ranks: i % ranks,
    "unequal": lambda i, count, ranks: 0 if i < 0.8 * count else i % ranks,
    "last rank empty": lambda i, _count, ranks: i % max(1, ranks - 1),
    "all on rank 1": lambda _i, _count, ranks: min(1, ranks - 1),
}


def held(trainer: Trainer) -> Arrays:
    """Dense weights, the own rows of tables and of their optimizer, own slots, and the numbers of the own rows."""
    parts, numbers = trainer.components, {}
    dense = {f"dense.{name}": value for name, value in parts.module.state_dict().items()}
    tables = {} if parts.tables is None else parts.tables.shard.state()
    dynamic = None if parts.tables is None else parts.tables.dynamic
    for name, state in ({} if dynamic is None else dynamic.state()).items():
        tables[f"waiting.{name}" if ".candidate_" in name else name] = state.local
    for table in [] if parts.tables is None else parts.tables.tables:
        numbers[f"rows.{table.name}"] = table.order.rows_at(
            np.array(table.owned(parts.world.rank, parts.world.world_size), dtype=np.int64)
        )
    return {name: value.detach().cpu().numpy().copy() for name, value in (dense | tables).items()} | numbers


def whole(of_ranks: list[Arrays]) -> Arrays:
    """Put the rows of all ranks together, ascending by number; the dense part must be the same everywhere."""
    for name, value in of_ranks[0].items():
        if name.startswith("dense."):
            assert all(np.array_equal(value, other[name]) for other in of_ranks), name
    found = {name: value for name, value in of_ranks[0].items() if name.startswith("dense.")}
    for name in [name for name in of_ranks[0] if not name.startswith(("dense.", "rows."))]:
        found[name], numbers = np.concatenate([rank[name] for rank in of_ranks]), f"rows.{name.split('.')[0]}"
        if numbers in of_ranks[0]:
            number = np.concatenate([rank[numbers] for rank in of_ranks])
            found[name] = found[name][np.argsort(number)][(number < 0).sum() :]
    return found


def apart(a: Arrays, b: Arrays) -> float:
    """The largest relative difference, in norm, over all arrays."""
    assert a.keys() == b.keys()
    return max(float(np.linalg.norm(a[n] - b[n]) / max(np.linalg.norm(a[n]), 1e-300)) for n in a)


def same(a: Arrays, b: Arrays) -> bool:
    """Whether all arrays are bitwise equal."""
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)
