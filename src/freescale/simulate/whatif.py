"""A run on other clusters, at other sizes, with and without each technique."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from freescale.bubbles.summary import Summary, summarize
from freescale.config import BalanceConfig
from freescale.overlap.schedule import overlapped, serial
from freescale.simulate.cluster import Cluster
from freescale.simulate.engine import Engine
from freescale.simulate.operations import Machine, Operations
from freescale.simulate.workload import EVENT_BYTES, SAMPLE_BYTES, Drawn, Ints, Load, Model, draw, plan, prolonged

_PLANNED, _DRAWS, _DRAWN_STEPS = 5, 16, 8


class Techniques(NamedTuple):
    """What is on."""

    balance: bool = True
    priority: bool = True
    sm_free: bool = True

    @property
    def name(self) -> str:
        """For people."""
        on = [name.replace("_", "-") for name, used in self._asdict().items() if used]
        return "everything" if len(on) == 3 else ", ".join(on) or "nothing"


_TRIED = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1))
ABLATION = tuple(Techniques(*map(bool, used)) for used in _TRIED)
"""From nothing to everything. Without priority no rows travel behind compute, so SM-free ways change nothing."""


class Band(NamedTuple):
    """Where most of the clusters lie that the figures allow: 10% are below, 10% above."""

    low: float
    high: float


class Outcome(NamedTuple):
    """What some ranks would do."""

    world_size: int
    techniques: Techniques
    summary: Summary
    samples_per_second: float
    step_ms: Band
    bubble_percent: Band
    collisions: float
    """Share of a rank's rows that the step before needs too."""
    moved: float
    """Share of the bytes of all samples that move."""


@dataclass(frozen=True)
class Question:
    """What is to be simulated."""

    model: Model
    lengths: Ints
    counts: Ints
    """How often each length occurs."""
    batch: int
    """Samples per rank."""
    cluster: Cluster
    machine: Callable[[Cluster], Machine]
    """How quick a rank is on a cluster that is drawn."""
    rules: BalanceConfig = field(default_factory=BalanceConfig)
    """Of balance."""
    steps: int = 50
    seed: int = 0

    def drawn(self, world_size: int) -> list[Drawn]:
        """Samples of the steps that are really planned."""
        rng = np.random.default_rng(self.seed)
        return list(draw(self.lengths, self.counts, world_size=world_size, batch=self.batch, steps=_PLANNED, rng=rng))

    def loads(self, drawn: Sequence[Drawn], world_size: int, *, balanced: bool) -> list[Load]:
        """Those steps, planned."""
        hosts = np.arange(world_size) // max(1, round(self.cluster.ranks_per_host))
        rules = self.rules if balanced else None
        return [plan(one, self.model, world_size=world_size, rules=rules, hosts=hosts) for one in drawn]

    def clusters(self) -> list[Cluster]:
        """Some that the cluster may be: the same for all sizes and techniques."""
        return [self.cluster.drawn(np.random.default_rng([self.seed, draw])) for draw in range(_DRAWS)]


def answer(question: Question, world_size: int, techniques: Sequence[Techniques]) -> Iterator[Outcome]:
    """One outcome for each set of techniques, over the same samples."""
    drawn = question.drawn(world_size)
    loads = {
        balanced: question.loads(drawn, world_size, balanced=balanced) for balanced in {t.balance for t in techniques}
    }
    yield from (_outcome(question, world_size, one, loads[one.balance]) for one in techniques)


def _outcome(question: Question, world_size: int, techniques: Techniques, loads: Sequence[Load]) -> Outcome:
    rng = np.random.default_rng(question.seed + 1)
    summary = run(question, question.cluster, world_size, techniques, prolonged(loads, question.steps, rng), rng)
    few = prolonged(loads, min(question.steps, _DRAWN_STEPS), rng)
    others = [run(question, one, world_size, techniques, few, rng) for one in question.clusters()]

    def band(figure: Callable[[Summary], float]) -> Band:
        found = [figure(one) for one in (summary, *others)]
        return Band(*np.quantile(found, [0.1, 0.9]).tolist())

    samples, events, rows, shared, moved = (
        sum(np.sum(getattr(load, name)) for load in loads) for name in ("samples", "events", "rows", "shared", "moved")
    )
    rate, held = samples / len(loads) / (summary.step_ms / 1e3), SAMPLE_BYTES * samples + EVENT_BYTES * events
    bands = band(lambda one: one.step_ms), band(lambda one: one.bubble_percent)
    return Outcome(world_size, techniques, summary, float(rate), *bands, float(shared / rows), float(moved / held))


def run(
    question: Question, cluster: Cluster, world_size: int, techniques: Techniques, loads: Sequence[Load], rng: Generator
) -> Summary:
    """Some steps on one cluster."""
    model, overlaps = question.model, techniques.priority and question.model.sharded and world_size > 1
    parts = model.micro_batches
    schedule = overlapped(micro_batches=parts) if overlaps else serial(sharded=model.sharded, micro_batches=parts)
    machine, sm_free = question.machine(cluster), techniques.sm_free and cluster.asynchronous
    operations = Operations(cluster, machine, model, world_size=world_size, sm_free=sm_free, rng=rng)
    return summarize(Engine(schedule, operations, loads, balanced=techniques.balance and world_size > 1).run())
