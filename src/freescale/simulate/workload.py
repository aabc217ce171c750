"""The work of every rank in a step: sampled batches, placed by the trainer's planner, and the rows they need. Pure.

A few steps are planned; the others repeat them with permuted ranks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.ma  # the first np.unique would import it during the timed planning

from freescale.balance.cost import Cost, draw_indices
from freescale.balance.placement import Floats, Ints
from freescale.balance.planner import Planner
from freescale.config import BalanceConfig, RunConfig
from freescale.data.dataset import DatasetStats
from freescale.embedding.row_order import Owners, RowOrder, bit_reversal
from freescale.overlap.schedule import bucket_bytes

SAMPLE_BYTES = 24  # of a sample: its id and its lengths
EVENT_BYTES = 16  # of an event: its item and its time
_POINTS = 96


class RowModel(Protocol):
    """Predicts the rows that events need."""

    def rows(self, events: Floats) -> Floats:
        """Return the distinct rows of this many events of a rank."""

    def shared(self, events: Floats, before: float) -> Floats:
        """Return how many of those rows the `before` events of the previous step need too."""


class Popularity:
    """A `RowModel` of independent events: groups of equally popular items, and the share of events of each item.

    `drawn`: rows that are looked up at random for every event (negatives).
    """

    def __init__(self, items: Floats, share: Floats, *, drawn: int = 0) -> None:
        self._items, self._share = items, share
        self._at_random = drawn / max(1.0, float(items.sum()))

    @staticmethod
    def from_counts(counts: Ints, *, drawn: int = 0) -> "Popularity":
        """Build from the number of occurrences of each item of a log."""
        occurrences, items = np.unique(counts, return_counts=True)
        return Popularity(items.astype(np.float64), occurrences / max(1, counts.sum()), drawn=drawn)

    def rows(self, events: Floats) -> Floats:
        """Return the expected number of distinct rows of these events."""
        return self._interpolate(events, lambda n: float(self._items @ self._touched(n)))

    def shared(self, events: Floats, before: float) -> Floats:
        """Return how many of those rows the `before` events of the previous step are expected to need too."""
        touched_before = self._items * self._touched(before)
        return self._interpolate(events, lambda n: float(touched_before @ self._touched(n)))

    def _touched(self, events: float) -> Floats:
        """Return the probability that some of these events need an item, for each group."""
        return -np.expm1(events * (np.log1p(-np.minimum(self._share, 1 - 1e-12)) - self._at_random))

    def _interpolate(self, events: Floats, function: Callable[[float], float]) -> Floats:
        """Evaluate at a few points and interpolate linearly on a logarithmic scale."""
        points = np.geomspace(1.0, max(2.0, float(events.max(initial=1.0))), _POINTS)
        values = np.array([function(point) for point in points])
        return np.interp(np.log(np.maximum(events, 1.0)), np.log(points), values) * (events > 0)


@dataclass(frozen=True)
class RowOwners:
    """Predicts how many rows each owner serves, from the items of a log."""

    position: Floats
    """Position of each item in the order of rows, as a share of all positions."""
    share: Floats
    """Share of the events of each item."""
    drawn: float = 0.0
    """Rows of each item that are looked up at random, per event."""

    @staticmethod
    def from_stats(stats: DatasetStats, owners: Owners, *, drawn: int = 0) -> "RowOwners":
        """Build from the items of a log and the rule that assigns their rows to owners."""
        ids, counts = stats.items.values, stats.items.counts
        order = RowOrder.of(int(ids.max(initial=0)) + 1, owners)
        position = order.position(ids, bit_reversal(order.shards))
        return RowOwners(position / order.positions, counts / max(1, counts.sum()), drawn / order.rows)

    def served(self, events: Floats, rng: np.random.Generator) -> Floats:
        """Draw the rows that each rank serves over the mean of all, if ranks have so many events.

        Ranks request items independently, so the sum of an owner is nearly normal.
        """
        world_size, owner = len(events), (self.position * len(events)).astype(np.int64)
        absent = np.exp(float(events.mean()) * (np.log1p(-np.minimum(self.share, 1 - 1e-12)) - self.drawn))
        mean = world_size * np.bincount(owner, 1 - absent, minlength=world_size)
        deviation = np.sqrt(world_size * np.bincount(owner, absent * (1 - absent), minlength=world_size))
        rows = np.maximum(0.0, rng.normal(mean, deviation))
        return rows / max(float(rows.mean()), 1e-300)


@dataclass(frozen=True)
class ModelCost:
    """The cost of training a model, independent of the device."""

    cost: Cost
    """Work of a sample."""
    products: float
    """Multiply-adds of a forward pass per unit of work."""
    dim: int
    """Width of a row."""
    dense_bytes: float
    """Dense gradients that are all-reduced."""
    last_bytes: float
    """Dense gradients of the last bucket, which nothing overlaps."""
    popularity: RowModel
    looked_up: int
    """Rows per event before deduplication."""
    micro_batches: int = 1
    sharded: bool = True
    owners: RowOwners | None = None
    """None: all owners serve equally many rows."""

    @staticmethod
    def from_config(config: RunConfig, stats: DatasetStats) -> "ModelCost":
        """Derive the cost from the config of a run and the statistics of its data."""
        counted, drawn = Cost.of_model(config.model), config.task.negatives if config.task.kind == "retrieval" else 0
        cost = counted.with_constants(*config.balance.cost) if config.balance.cost else counted
        length = np.array([min(stats.mean_length, config.data.max_history)])
        sharded = config.tables.placement == "sharded"
        # A matrix has one product per token and weight. Positions and replicated tables come on top.
        rows = config.data.max_history + (0 if sharded else len(stats.items.counts))
        replicated = 4.0 * rows * config.model.dim
        dense = 4.0 * counted.token + replicated
        return ModelCost(
            cost=cost,
            products=float(counted.of(length)[0] / cost.of(length)[0]),
            dim=config.model.dim,
            dense_bytes=dense,
            last_bytes=min(dense, max(replicated, bucket_bytes(dense))),
            popularity=Popularity.from_counts(stats.items.counts, drawn=drawn),
            looked_up=1 + drawn,
            micro_batches=config.train.micro_batches,
            sharded=sharded,
            owners=RowOwners.from_stats(stats, config.tables.owners, drawn=drawn),
        )


class StepLoad(NamedTuple):
    """The work of every rank in one step."""

    work: Floats
    """By the cost model."""
    events: Floats
    rows: Floats
    """Distinct rows."""
    shared: Floats
    """Rows that the previous step needs too."""
    served: Floats
    """Rows that the rank serves as an owner, over the mean of all ranks."""
    moved: Floats
    """Bytes of samples that the rank sends to others."""
    samples: int
    """Global batch size."""
    planning: float
    """Measured seconds of planning."""

    def permute_ranks(self, rng: np.random.Generator) -> "StepLoad":
        """Return the same step with permuted ranks."""
        order, names = rng.permutation(len(self.work)), ("work", "events", "rows", "shared", "served", "moved")
        return self._replace(**{name: getattr(self, name)[order] for name in names})

    @property
    def collisions(self) -> float:
        """Share of the rows that the previous step needs too."""
        return float(self.shared.sum() / max(1.0, float(self.rows.sum())))

    @property
    def served_rows(self) -> Floats:
        """Rows that each rank serves as an owner."""
        return self.served * self.rows.mean()


class SampledStep(NamedTuple):
    """The samples of a step and the ranks that read them."""

    lengths: Ints
    source_rank: Ints


def sample_steps(
    lengths: Ints, counts: Ints, *, world_size: int, batch: int, steps: int, rng: np.random.Generator
) -> Iterator[SampledStep]:
    """Yield steps of random samples: `lengths`, weighted by `counts`."""
    share, source_rank = np.cumsum(counts) / counts.sum(), np.repeat(np.arange(world_size), batch)
    for _ in range(steps):
        yield SampledStep(lengths[draw_indices(share, world_size * batch, rng)], source_rank)


def plan_step(
    step: SampledStep,
    model: ModelCost,
    *,
    world_size: int,
    rules: BalanceConfig | None,
    hosts: Ints | None = None,
    seed: int = 0,
) -> StepLoad:
    """Place the samples as the trainer would; without rules, samples stay on their source rank."""
    lengths, source_rank = step
    began = time.thread_time()  # not affected by other load on this machine
    rank = source_rank
    if rules is not None:
        rank = Planner(model.cost, rules, world_size=world_size, hosts=hosts)({"history": lengths}, source_rank).rank
    planning, costs = time.thread_time() - began, model.cost.of(lengths)

    def sum_by_rank(values: Floats | Ints, ranks: Ints) -> Floats:
        return np.bincount(ranks, weights=values, minlength=world_size).astype(np.float64)

    events, work = sum_by_rank(lengths, rank), sum_by_rank(costs, rank)
    rows, shared = model.popularity.rows(events), model.popularity.shared(events, float(events.sum()))
    moved = sum_by_rank((SAMPLE_BYTES + EVENT_BYTES * lengths) * (rank != source_rank), source_rank)
    served = np.ones(world_size) if model.owners is None else model.owners.served(events, np.random.default_rng(seed))
    return StepLoad(work, events, rows, shared, served, moved, len(lengths), planning)


def extend_steps(loads: Sequence[StepLoad], steps: int, rng: np.random.Generator) -> list[StepLoad]:
    """Return this many steps; those beyond the planned ones repeat them with permuted ranks."""
    return [loads[step] if step < len(loads) else loads[step % len(loads)].permute_ranks(rng) for step in range(steps)]
