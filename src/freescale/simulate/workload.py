"""What every rank has to do in a step: samples as they are drawn, and as `balance.place` deals them. Pure.

Some steps are really planned; the others are those again, with the ranks in another order.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.ma  # the first np.unique would import it, and planning would be timed with that

from freescale.balance.cost import Cost
from freescale.balance.estimate import places
from freescale.balance.placement import Floats, Ints
from freescale.balance.planner import Planner
from freescale.config import BalanceConfig, RunConfig
from freescale.data.dataset import DatasetStats
from freescale.overlap.schedule import bucket_bytes
from freescale.simulate.popularity import Popularity, Rows

SAMPLE_BYTES = 24  # of a sample: its id, and what is told of its length
EVENT_BYTES = 16  # of an event: its item and its time


@dataclass(frozen=True)
class Model:
    """What training costs, whatever it runs on."""

    cost: Cost
    """Work of a sample."""
    products: float
    """Products of a forward pass per unit of that work."""
    dim: int
    """Of a row."""
    dense_bytes: float
    """Gradients that all ranks add up."""
    last_bytes: float
    """Of those, the ones that are there last, when nothing is left to compute."""
    popularity: Rows
    looked_up: int
    """Rows per event, before each is asked for once."""
    micro_batches: int = 1
    sharded: bool = True

    @staticmethod
    def of(config: RunConfig, profile: DatasetStats) -> "Model":
        """From the config of a run and what its data is like."""
        counted, drawn = Cost.of_model(config.model), config.task.negatives if config.task.kind == "retrieval" else 0
        cost = Cost(*config.balance.cost) if config.balance.cost else counted
        length = np.array([min(profile.mean_length, config.data.max_history)])
        sharded = config.tables.placement == "sharded"
        # A matrix has a product per token for every weight; beside it, positions and tables that every rank holds.
        rows = config.data.max_history + (0 if sharded else len(profile.items.counts))
        held = 4.0 * rows * config.model.dim
        dense = 4.0 * counted.token + held
        return Model(
            cost=cost,
            products=float(counted.of(length)[0] / cost.of(length)[0]),
            dim=config.model.dim,
            dense_bytes=dense,
            last_bytes=min(dense, max(held, bucket_bytes(dense))),
            popularity=Popularity.counted(profile.items.counts, drawn=drawn),
            looked_up=1 + drawn,
            micro_batches=config.train.micro_batches,
            sharded=sharded,
        )


class Load(NamedTuple):
    """One step: of every rank, what it has to do."""

    work: Floats
    """By the cost model."""
    events: Floats
    rows: Floats
    """Distinct ones that it needs."""
    shared: Floats
    """Of those, the ones that the step before needs too."""
    moved: Floats
    """Bytes of samples that it sends away."""
    samples: int
    """Of all ranks."""
    planning: float
    """Seconds that it took here to plan where they go."""

    def mixed(self, rng: np.random.Generator) -> "Load":
        """The same step with the ranks in another order."""
        order, of_ranks = rng.permutation(len(self.work)), ("work", "events", "rows", "shared", "moved")
        return self._replace(**{name: getattr(self, name)[order] for name in of_ranks})


class Drawn(NamedTuple):
    """Samples of a step, on the ranks that read them."""

    lengths: Ints
    homes: Ints


def draw(
    lengths: Ints, counts: Ints, *, world_size: int, batch: int, steps: int, rng: np.random.Generator
) -> Iterator[Drawn]:
    """Samples of some steps at random: `lengths`, each as often as `counts` says."""
    share, homes = np.cumsum(counts) / counts.sum(), np.repeat(np.arange(world_size), batch)
    for _ in range(steps):
        yield Drawn(lengths[places(share, world_size * batch, rng)], homes)


def plan(
    drawn: Drawn, model: Model, *, world_size: int, rules: BalanceConfig | None, hosts: Ints | None = None
) -> Load:
    """Who computes what, as the trainer would plan it by some rules; without, all stay where they are."""
    lengths, homes = drawn
    began = time.thread_time()  # whatever else this machine does meanwhile
    rank = homes
    if rules is not None:
        rank = Planner(model.cost, rules, world_size=world_size, hosts=hosts)({"history": lengths}, homes).rank
    planning, costs = time.thread_time() - began, model.cost.of(lengths)

    def of_ranks(values: Floats | Ints, where: Ints) -> Floats:
        return np.bincount(where, weights=values, minlength=world_size).astype(np.float64)

    events, work = of_ranks(lengths, rank), of_ranks(costs, rank)
    rows, shared = model.popularity.rows(events), model.popularity.shared(events, float(events.sum()))
    moved = of_ranks((SAMPLE_BYTES + EVENT_BYTES * lengths) * (rank != homes), homes)
    return Load(work, events, rows, shared, moved, len(lengths), planning)


def prolonged(loads: Sequence[Load], steps: int, rng: np.random.Generator) -> list[Load]:
    """As many steps as are asked for, each planned one equally often."""
    return [loads[step] if step < len(loads) else loads[step % len(loads)].mixed(rng) for step in range(steps)]
