"""What-if scenarios: a run on other clusters, at other sizes, with and without each technique."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from freescale.bubbles.summary import Summary, summarize
from freescale.config import BalanceConfig
from freescale.overlap.schedule import overlapped, serial
from freescale.simulate.cluster import Cluster
from freescale.simulate.engine import Engine
from freescale.simulate.lookups import DataSample
from freescale.simulate.operations import DeviceModel, OperationCosts
from freescale.simulate.workload import (
    SAMPLE_BYTES,
    Ints,
    ModelCost,
    SampledStep,
    StepLoad,
    extend_steps,
    plan_step,
    sample_steps,
)

_PLANNED_STEPS, _CLUSTER_DRAWS, _STEPS_PER_DRAW = 5, 16, 8


class Techniques(NamedTuple):
    """The techniques that are on."""

    balance: bool = True
    priority: bool = True
    sm_free: bool = True

    @property
    def name(self) -> str:
        """A human-readable name."""
        on = [name.replace("_", "-") for name, used in self._asdict().items() if used]
        return "everything" if len(on) == 3 else ", ".join(on) or "nothing"


_ABLATION = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1))
ABLATION = tuple(Techniques(*map(bool, used)) for used in _ABLATION)
"""From nothing to everything. Without priority no rows overlap with compute, so SM-free transports change nothing."""


class Band(NamedTuple):
    """The 10% and 90% quantiles over the clusters that the ranges of the figures allow."""

    low: float
    high: float


class SimulationResult(NamedTuple):
    """The prediction for one world size and set of techniques."""

    world_size: int
    techniques: Techniques
    summary: Summary
    samples_per_second: float
    step_ms: Band
    bubble_percent: Band
    collisions: float
    """Share of a rank's rows that the previous step needs too."""
    moved: float
    """Share of the sample bytes that move between ranks."""


@dataclass(frozen=True)
class Scenario:
    """The inputs of a simulation."""

    model: ModelCost
    lengths: Ints
    counts: Ints
    """Number of samples of each length."""
    batch: int
    """Samples per rank."""
    cluster: Cluster
    device: Callable[[Cluster], DeviceModel]
    """Returns the speed of a rank on a drawn cluster."""
    rules: BalanceConfig = field(default_factory=BalanceConfig)
    """Rules of the balancer."""
    two_level: bool = False
    """Whether hosts request each row once, and each pair of them exchanges one message."""
    sample: DataSample | None = None
    """Candidates and features of the samples; none by default."""
    steps: int = 50
    seed: int = 0

    def sample_steps(self, world_size: int) -> list[SampledStep]:
        """Sample the steps that are planned."""
        rng, steps = np.random.default_rng(self.seed), _PLANNED_STEPS
        options: dict[str, Any] = {"world_size": world_size, "batch": self.batch, "steps": steps, "rng": rng}
        return list(sample_steps(self.lengths, self.counts, sample=self.sample, **options))

    def plan_steps(self, steps: Sequence[SampledStep], world_size: int, *, balanced: bool) -> list[StepLoad]:
        """Plan these steps."""
        hosts, rules = np.arange(world_size) // self.local, self.rules if balanced else None
        options: dict[str, Any] = {
            "world_size": world_size,
            "rules": rules,
            "hosts": hosts,
            "two_level": self.two_level,
        }
        return [plan_step(step, self.model, seed=self.seed + n, **options) for n, step in enumerate(steps)]

    @property
    def local(self) -> int:
        """The number of ranks of a host."""
        return max(1, round(self.cluster.ranks_per_host))

    def draw_clusters(self) -> list[Cluster]:
        """Draw clusters from the ranges of the figures: the same for all sizes and techniques."""
        return [self.cluster.draw(np.random.default_rng([self.seed, draw])) for draw in range(_CLUSTER_DRAWS)]


def simulate(scenario: Scenario, world_size: int, techniques: Sequence[Techniques]) -> Iterator[SimulationResult]:
    """Yield one result for each set of techniques, over the same samples."""
    steps = scenario.sample_steps(world_size)
    loads = {
        balanced: scenario.plan_steps(steps, world_size, balanced=balanced)
        for balanced in {used.balance for used in techniques}
    }
    yield from (_simulate(scenario, world_size, used, loads[used.balance]) for used in techniques)


def _simulate(
    scenario: Scenario, world_size: int, techniques: Techniques, loads: Sequence[StepLoad]
) -> SimulationResult:
    rng = np.random.default_rng(scenario.seed + 1)
    all_steps = extend_steps(loads, scenario.steps, rng, scenario.local)
    summary = simulate_steps(scenario, scenario.cluster, world_size, techniques, all_steps, rng)
    few_steps = extend_steps(loads, min(scenario.steps, _STEPS_PER_DRAW), rng, scenario.local)
    draws = [simulate_steps(scenario, c, world_size, techniques, few_steps, rng) for c in scenario.draw_clusters()]

    def band(figure: Callable[[Summary], float]) -> Band:
        values = [figure(result) for result in (summary, *draws)]
        return Band(*np.quantile(values, [0.1, 0.9]).tolist())

    samples, events, moved = (
        sum(np.sum(getattr(load, name)) for load in loads) for name in ("samples", "events", "moved")
    )
    rows, shared = (sum(np.sum(getattr(load.requests, name)) for load in loads) for name in ("rows", "shared"))
    rate = samples / len(loads) / (summary.step_ms / 1e3)
    sample_bytes = SAMPLE_BYTES * samples + scenario.model.token_bytes * events
    bands = band(lambda result: result.step_ms), band(lambda result: result.bubble_percent)
    collisions, moved_share = float(shared / max(1.0, rows)), float(moved / sample_bytes)
    return SimulationResult(world_size, techniques, summary, float(rate), *bands, collisions, moved_share)


def simulate_steps(
    scenario: Scenario,
    cluster: Cluster,
    world_size: int,
    techniques: Techniques,
    loads: Sequence[StepLoad],
    rng: Generator,
) -> Summary:
    """Simulate steps on one cluster."""
    model, overlaps = scenario.model, techniques.priority and scenario.model.sharded and world_size > 1
    known: dict[str, Any] = {"micro_batches": model.micro_batches, "replicates": model.replicated_rows > 0}
    schedule = overlapped(**known) if overlaps else serial(sharded=model.sharded, **known)
    device, sm_free = scenario.device(cluster), techniques.sm_free and cluster.asynchronous
    costs = OperationCosts(cluster, device, model, world_size=world_size, sm_free=sm_free, rng=rng)
    return summarize(Engine(schedule, costs, loads, balanced=techniques.balance and world_size > 1).run())
