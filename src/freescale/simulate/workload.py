"""The work of every rank in a step: sampled batches, placed by the trainer's planner, and the rows they need. Pure.

A few steps are planned; the others repeat them with permuted ranks.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.ma  # the first np.unique would import it during the timed planning

from freescale.balance.cost import Cost, draw_indices
from freescale.balance.placement import Floats, Ints
from freescale.balance.planner import Planner
from freescale.balance.rank_groups import RankGroups, give_between_groups, tolerance_between, tolerance_inside
from freescale.config import BalanceConfig, RunConfig
from freescale.data.dataset import DatasetStats
from freescale.overlap.schedule import bucket_bytes
from freescale.simulate.lookups import DataSample, Popularity, RowModel, RowOwners

SAMPLE_BYTES = 24  # of a sample: its id and its lengths
EVENT_BYTES = 16  # of an event: its item and its time
_ID_BYTES = 8


@dataclass(frozen=True)
class TableCost:
    """What training looks up in one table."""

    dim: int
    """Width of a row."""
    popularity: RowModel
    looked_up: float
    """Rows per event or candidate before deduplication."""
    per_token: float = 1.0
    """Ids per event or candidate, from which `popularity` follows: without what is drawn at random."""
    owners: RowOwners | None = None
    """None: all owners serve equally many rows."""
    replicated: int = 0
    """The rows that are on every rank; the others are those of `popularity` and `owners`."""

    def replicate(self, rows: int) -> "TableCost":
        """Return the cost with the most popular rows on every rank."""
        assert isinstance(self.popularity, Popularity), "the popularity of every row is known"
        owners = None if self.owners is None else self.owners.without(rows)
        least = int(min(rows, self.popularity.items))
        return replace(self, popularity=self.popularity.without(rows), owners=owners, replicated=least)


@dataclass(frozen=True)
class ModelCost:
    """The cost of training a model, independent of the device."""

    cost: Cost
    """Work of a sample."""
    products: float
    """Multiply-adds of a forward pass per unit of work."""
    tables: tuple[TableCost, ...]
    dense_bytes: float
    """Dense gradients that are all-reduced."""
    last_bytes: float
    """Dense gradients of the last bucket, which nothing overlaps."""
    micro_batches: int = 1
    sharded: bool = True
    anchored: bool = False
    """Whether candidates are events of the history, which see only earlier events."""

    @staticmethod
    def from_config(config: RunConfig, stats: DatasetStats, sample: DataSample) -> "ModelCost":
        """Derive the cost from the config of a run, and the statistics and a sample of its data."""
        counted, drawn = Cost.of_model(config.model), config.task.negatives if config.task.kind == "retrieval" else 0
        cost = counted.with_constants(*config.balance.cost) if config.balance.cost else counted
        length = np.array([min(stats.mean_length, config.data.max_history)])
        sharded, owners = config.tables.placement == "sharded", config.tables.owners
        # A matrix has one product per token and weight. Positions and replicated tables come on top.
        rows = config.data.max_history + (0 if sharded else len(stats.items.counts))
        replicated = 4.0 * rows * config.model.dim
        dense = 4.0 * counted.token + replicated
        items = TableCost(
            dim=config.model.dim,
            popularity=Popularity.from_counts(stats.items.counts, drawn=drawn),
            looked_up=1 + drawn,
            owners=RowOwners.from_counts(stats.items, owners, drawn=drawn),
        )
        features = [
            TableCost(
                dim=table.dim,
                popularity=Popularity.from_counts(table.ids.counts),
                looked_up=table.per_token,
                per_token=table.per_token,
                owners=RowOwners.from_counts(table.ids, owners),
            )
            for table in sample.tables
        ]
        return ModelCost(
            cost=cost,
            products=float(counted.of(length)[0] / cost.of(length)[0]),
            tables=(items, *features),
            dense_bytes=dense,
            last_bytes=min(dense, max(replicated, bucket_bytes(dense))),
            micro_batches=config.train.micro_batches,
            sharded=sharded,
            anchored=config.task.anchors != "none",
        )

    def replicate(self, rows: int) -> "ModelCost":
        """Return the cost with the most popular rows of every table on every rank."""
        return replace(self, tables=tuple(table.replicate(rows) for table in self.tables))

    @property
    def replicated_rows(self) -> int:
        """The rows of all tables that are on every rank."""
        return sum(table.replicated for table in self.tables)

    @property
    def replicated_bytes(self) -> float:
        """Gradients of these rows that are all-reduced."""
        return 4.0 * sum(table.replicated * table.dim for table in self.tables)

    @property
    def widths(self) -> int:
        """The number of table groups: the rows of tables of one width are one transfer."""
        return len({table.dim for table in self.tables})

    @property
    def looked_up(self) -> float:
        """Rows per event or candidate before deduplication."""
        return sum(table.looked_up for table in self.tables)

    @property
    def token_bytes(self) -> float:
        """Bytes of an event or candidate that moves between ranks: time, item and features."""
        return EVENT_BYTES + _ID_BYTES * sum(table.per_token for table in self.tables[1:])


class RowRequests(NamedTuple):
    """The rows that every rank requests, of all tables."""

    rows: Floats
    """Distinct rows."""
    shared: Floats
    """Rows that the previous step needs too."""
    served: Floats
    """Rows that the rank serves as an owner, over the mean of all ranks."""
    width: float
    """Floats of a row, in the mean."""

    @property
    def collisions(self) -> float:
        """Share of the rows that the previous step needs too."""
        return float(self.shared.sum() / max(1.0, float(self.rows.sum())))

    @property
    def served_rows(self) -> Floats:
        """Rows that each rank serves as an owner."""
        return self.served * self.rows.mean()

    def permute(self, order: Ints) -> "RowRequests":
        """Return the requests with permuted ranks."""
        return RowRequests(self.rows[order], self.shared[order], self.served[order], self.width)


class StepLoad(NamedTuple):
    """The work of every rank in one step."""

    work: Floats
    """By the cost model."""
    events: Floats
    """Events and candidates."""
    requests: RowRequests
    moved: Floats
    """Bytes of samples that the rank sends to others."""
    samples: int
    """Global batch size."""
    planning: float
    """Measured seconds of planning."""
    merged: RowRequests | None = None
    """In a two-level exchange: the rows that a rank requests for its host, which requests each row once."""
    groups: int = 1
    """Groups of ranks inside of which samples are placed."""

    def permute_ranks(self, rng: np.random.Generator, local: int = 1) -> "StepLoad":
        """Return the same step with permuted hosts, of `local` ranks each, and permuted ranks inside of them."""
        ranks = len(self.work)
        if self.merged is None or ranks % local:
            local = 1
        order = rng.permuted(np.arange(ranks).reshape(-1, local), axis=1)[rng.permutation(ranks // local)].ravel()
        merged = None if self.merged is None else self.merged.permute(order)
        whole = {name: getattr(self, name)[order] for name in ("work", "events", "moved")}
        return self._replace(requests=self.requests.permute(order), merged=merged, **whole)


class SampledStep(NamedTuple):
    """The samples of a step and the ranks that read them."""

    lengths: Ints
    source_rank: Ints
    candidates: Ints | None = None
    """Of each sample; none by default."""


def sample_steps(
    lengths: Ints,
    counts: Ints,
    *,
    world_size: int,
    batch: int,
    steps: int,
    rng: np.random.Generator,
    sample: DataSample | None = None,
) -> Iterator[SampledStep]:
    """Yield steps of random samples: `lengths`, weighted by `counts`, with the candidates of a sample of the data."""
    share, source_rank = np.cumsum(counts) / counts.sum(), np.repeat(np.arange(world_size), batch)
    for _ in range(steps):
        drawn = lengths[draw_indices(share, world_size * batch, rng)]
        candidates = None
        if sample is not None and sample.anchors:
            candidates = np.rint(drawn * sample.anchors).astype(np.int64)
        elif sample is not None and sample.candidates.values.any():
            offered = np.cumsum(sample.candidates.counts) / sample.candidates.counts.sum()
            candidates = sample.candidates.values[draw_indices(offered, len(drawn), rng)]
        yield SampledStep(drawn, source_rank, candidates)


class PlacedSamples(NamedTuple):
    """The rank that computes each sample, and what placing them took."""

    rank: Ints
    sent: Ints
    """How often each sample is sent: twice if it changes groups and moves on."""
    seconds: float
    """Of planning, on the slowest rank."""
    groups: int


def place_samples(
    lengths: Mapping[str, Ints], source_rank: Ints, cost: Cost, rules: BalanceConfig, hosts: Ints, *, anchored: bool
) -> PlacedSamples:
    """Place the samples of a step as the trainer would: all at once, or in groups of ranks."""
    planner = Planner(cost, rules, world_size=len(hosts), hosts=hosts, anchored=anchored)
    bound = rules.group_ranks
    groups = RankGroups.of_hosts(hosts, bound if bound and not rules.adapt else len(hosts))
    began = time.thread_time()  # not affected by other load on this machine
    if len(groups.sizes) == 1:
        rank = planner(lengths, source_rank).rank
        return PlacedSamples(rank, (rank != source_rank).astype(np.int64), time.thread_time() - began, 1)
    costs, between = planner.sizes(lengths)[0], tolerance_between(rules.tolerance)
    held = give_between_groups(costs, source_rank, groups, np.inf if rules.counts == "equal" else between)
    mean = float(costs.sum()) / len(hosts)
    rank, slowest = held.copy(), 0.0
    by_group = np.argsort(groups.group[held], kind="stable")
    ends = np.searchsorted(groups.group[held][by_group], np.arange(len(groups.sizes) + 1))
    for number in range(len(groups.sizes)):
        own, members = by_group[ends[number] : ends[number + 1]], groups.members(number)
        tolerance = tolerance_inside(rules.tolerance, mean, float(costs[own].sum()) / len(members))
        within = replace(rules, tolerance=min(1.0, tolerance))
        plan = Planner(cost, within, world_size=len(members), hosts=hosts[members], anchored=anchored)
        part, place = {name: values[own] for name, values in lengths.items()}, np.searchsorted(members, held[own])
        began = time.thread_time()
        rank[own] = members[plan(part, place).rank]
        slowest = max(slowest, time.thread_time() - began)
    return PlacedSamples(rank, (held != source_rank) + (rank != held).astype(np.int64), slowest, len(groups.sizes))


def plan_step(
    step: SampledStep,
    model: ModelCost,
    *,
    world_size: int,
    rules: BalanceConfig | None,
    hosts: Ints | None = None,
    two_level: bool = False,
    seed: int = 0,
) -> StepLoad:
    """Place the samples as the trainer would; without rules, samples stay on their source rank.

    `two_level`: the ranks of a host request each row once.
    """
    source_rank, host = step.source_rank, np.zeros(world_size, dtype=np.int64) if hosts is None else hosts
    lengths = {"history": step.lengths} | ({} if step.candidates is None else {"candidates": step.candidates})
    sizes = Planner(model.cost, BalanceConfig(), world_size=world_size, anchored=model.anchored).sizes
    costs, tokens = sizes(lengths)
    placed = PlacedSamples(source_rank, np.zeros_like(source_rank), 0.0, 1)
    if rules is not None:
        placed = place_samples(lengths, source_rank, model.cost, rules, host, anchored=model.anchored)

    def sum_by_rank(values: Floats | Ints, ranks: Ints) -> Floats:
        return np.bincount(ranks, weights=values, minlength=world_size).astype(np.float64)

    events, work = sum_by_rank(tokens, placed.rank), sum_by_rank(costs, placed.rank)
    sample_bytes: Floats = SAMPLE_BYTES + model.token_bytes * tokens.astype(np.float64)
    moved = sum_by_rank(sample_bytes * placed.sent, source_rank)
    merged = None
    if two_level:
        _, host, sizes = np.unique(host, return_inverse=True, return_counts=True)
        merged = _request_rows(model, np.bincount(host, weights=events).astype(np.float64), world_size, seed=seed)
        of_rank = 1.0 / sizes[host]
        merged = merged._replace(rows=merged.rows[host] * of_rank, shared=merged.shared[host] * of_rank)
    requests = _request_rows(model, events, world_size, seed=seed)
    return StepLoad(work, events, requests, moved, len(step.lengths), placed.seconds, merged, placed.groups)


def _request_rows(model: ModelCost, events: Floats, owners: int, *, seed: int) -> RowRequests:
    """Return the rows that those with so many events request, of all tables, and what each owner serves."""
    rows, shared, floats = np.zeros((3, len(events)))
    served, rng, total = np.zeros(owners), np.random.default_rng(seed), float(events.sum())
    for table in model.tables:
        ids = table.per_token * events
        of_table = table.popularity.rows(ids)
        rows, floats = rows + of_table, floats + table.dim * of_table
        shared = shared + table.popularity.shared(ids, table.per_token * total)
        even = np.ones(owners) if table.owners is None else table.owners.served(ids, owners, rng)
        served += even * of_table.sum()
    return RowRequests(
        rows, shared, served / max(float(served.mean()), 1e-300), float(floats.sum() / max(1.0, float(rows.sum())))
    )


def extend_steps(loads: Sequence[StepLoad], steps: int, rng: np.random.Generator, local: int = 1) -> list[StepLoad]:
    """Return this many steps; those beyond the planned ones repeat them with permuted ranks."""
    return [
        loads[step] if step < len(loads) else loads[step % len(loads)].permute_ranks(rng, local)
        for step in range(steps)
    ]
