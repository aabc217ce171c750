"""Summarizes the records of a run in a few numbers, with advice. Pure."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freescale.bubbles.events import CAUSES, COMPUTE, TRAFFIC
from freescale.bubbles.records import COLUMNS, IntervalRecord, group_name

Row = NDArray[np.float64]

_WORTH_ADVICE = 0.01
_ADVICE = {
    "straggler": "ranks wait for a slower one: turn balancing on (balance.mode, or fs.BalancedLoader); where it is on, "
    "use larger batches, or balance.adapt if one rank is always slow",
    "samples": "samples are waited for: a faster link between hosts, or more compute per step to hide them",
    "ids": "ids are exchanged without compute: larger batches per rank send fewer per sample",
    "urgent rows": "rows are waited for: a faster link, narrower rows, or fewer distinct ids per step",
    "deferred rows": "compute is too short to hide these rows: a faster link, or more compute per step",
    "row gradients": "row gradients are exchanged without compute: a faster link or narrower rows",
    "dense gradients": "longer than the backward pass can hide: a faster link, a smaller model, or micro-batches",
    "other traffic": "small collectives: each costs a round trip, so merge or drop some",
    "data": "batches come late: raise data.workers or data.prefetch, or use a faster disk",
    "host": "Python between operations: larger batches per rank, or fewer log lines and checkpoints",
    "idle": "nothing was recorded there: add profiler.record(cause) to a loop of your own; in `freescale train` "
    "a rank often has no free core, so run fewer ranks or threads per host",
}


class Line(NamedTuple):
    """One cause."""

    cause: str
    ms: float
    """Per step, mean of all ranks."""
    share: float
    """Of the step."""
    worst: str
    """The rank, or group of ranks, with the most of it."""
    worst_ms: float
    hidden_ms: float
    """For traffic: the part hidden by compute, in addition."""
    advice: str


class Summary(NamedTuple):
    """A run, with all its starts."""

    world_size: int
    """Of the last interval."""
    steps: int
    step_ms: float
    straggler_percent: float
    """Mean time that ranks wait for slower ones, over the time of a step."""
    overlap_percent: float
    """Share of the in-flight time of traffic that overlaps with compute."""
    clock_bound_us: float
    lines: list[Line]
    world_sizes: tuple[int, ...] = ()
    """In order: more than one if the run was resumed on another world size."""
    waiting_known: bool = True
    """False if several ranks recorded no collective: straggler and overlap are then 0 without a meaning."""

    @property
    def bubble_percent(self) -> float:
        """Return the share of time in which a rank computes nothing."""
        return 100.0 * (1.0 - sum(line.share for line in self.lines if line.cause in COMPUTE))


def mean_by_group(intervals: Sequence[IntervalRecord]) -> dict[str, Row]:
    """Return milliseconds per step of each group of ranks, over the steps that it took part in, by COLUMNS."""
    sums: dict[str, Row] = {}
    counts: Counter[str] = Counter()
    for world_size in sorted({interval.world_size for interval in intervals}):
        alike = [interval for interval in intervals if interval.world_size == world_size]
        steps = [interval.steps for interval in alike]
        table = np.tensordot(steps, np.array([interval.ms for interval in alike]), axes=1)
        for group, row in enumerate(table):
            name = group_name(group, world_size)
            sums[name] = sums.get(name, 0.0) + row
            counts[name] += sum(steps)
    return {name: sums[name] / counts[name] for name in sorted(sums, key=_first_rank)}


def mean_over_ranks(intervals: Sequence[IntervalRecord]) -> dict[str, float]:
    """Return milliseconds per step, mean of all ranks and steps, by COLUMNS."""
    rows = [np.average(interval.ms, axis=0, weights=interval.ms[:, -1]) for interval in intervals]
    mean = np.average(rows, axis=0, weights=[interval.steps for interval in intervals])
    return dict(zip(COLUMNS, mean.tolist(), strict=True))


def summarize(intervals: Sequence[IntervalRecord]) -> Summary:
    """Summarize a run, of any world sizes."""
    of_groups, mean = mean_by_group(intervals), mean_over_ranks(intervals)
    step = sum(mean[cause] for cause in CAUSES)
    lines = []
    for place, cause in enumerate(CAUSES):
        worst, share = max(of_groups, key=lambda name: of_groups[name][place]), mean[cause] / max(step, 1e-12)
        advice = _ADVICE.get(cause, "") if share >= _WORTH_ADVICE else ""
        hidden = mean[f"hidden {cause}"] if cause in TRAFFIC else 0.0
        lines.append(Line(cause, mean[cause], share, worst, float(of_groups[worst][place]), hidden, advice))
    straggler = 100.0 * mean["straggler"] / max(step, 1e-12)
    overlap = 100.0 * mean["overlapped"] / max(mean["in flight"], 1e-12)
    steps, bound = sum(i.steps for i in intervals), max(i.clock_bound_us for i in intervals)
    sizes = tuple(world_size for world_size, _ in itertools.groupby(interval.world_size for interval in intervals))
    known = mean["in flight"] > 0 or max(sizes) == 1
    return Summary(intervals[-1].world_size, steps, step, straggler, overlap, bound, lines, sizes, known)


def _first_rank(name: str) -> tuple[int, int]:
    """Sort key of a group name: its first rank, then its last."""
    first, _, last = name.partition("-")
    return int(first), int(last or first)
