"""Where the time of a run went, in the few numbers that a person needs. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from freescale.bubbles.events import CAUSES, COMPUTE, TRAFFIC
from freescale.bubbles.records import COLUMNS, Interval, Table, group_name

_WORTH_ADVICE = 0.01
_ADVICE = {
    "straggler": "ranks take unequally long: balance.mode deals samples by cost, and larger batches even them out",
    "samples": "samples are waited for: a faster link between hosts, or more compute per step to hide them",
    "ids": "ids travel while nobody computes: larger batches per rank send fewer per sample",
    "urgent rows": "rows are waited for: a faster link, narrower rows, or fewer distinct ids per step",
    "deferred rows": "compute is too short to hide these rows: a faster link, or more compute per step",
    "row gradients": "gradients of rows travel while nobody computes: a faster link or narrower rows",
    "dense gradients": "longer than the backward pass can hide: a faster link, a smaller model, or micro-batches",
    "other traffic": "small collectives: each costs a round trip, so join or drop some",
    "data": "batches come late: raise data.workers or data.prefetch, or use a faster disk",
    "host": "Python between operations: larger batches per rank, or fewer log lines and checkpoints",
    "idle": "nothing is known of this time: mark what happens there",
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
    """Of traffic: what compute hides, over and above."""
    advice: str


class Summary(NamedTuple):
    """A run."""

    ranks: int
    steps: int
    step_ms: float
    straggler_percent: float
    """Mean time that ranks stand idle for slower ones, over the time of a step."""
    overlap_percent: float
    """How much of the time that traffic is under way lies behind compute."""
    clock_bound_us: float
    lines: list[Line]

    @property
    def bubble_percent(self) -> float:
        """Time in which a rank computes nothing."""
        return 100.0 * (1.0 - sum(line.share for line in self.lines if line.cause in COMPUTE))


def averaged(intervals: Sequence[Interval]) -> Table:
    """Milliseconds per step of each group of ranks over all intervals: [groups, COLUMNS]."""
    return np.average([interval.ms for interval in intervals], axis=0, weights=[i.steps for i in intervals])


def summarize(intervals: Sequence[Interval]) -> Summary:
    """Add up a run."""
    ranks, of_groups = intervals[-1].ranks, averaged(intervals)
    members = of_groups[:, -1]
    means = dict(zip(COLUMNS, np.average(of_groups, axis=0, weights=members).tolist(), strict=True))
    step = sum(means[cause] for cause in CAUSES)
    hidden = {kind: means[f"hidden {kind}"] for kind in TRAFFIC}
    lines = []
    for place, cause in enumerate(CAUSES):
        worst, share = int(of_groups[:, place].argmax()), means[cause] / max(step, 1e-12)
        advice = _ADVICE.get(cause, "") if share >= _WORTH_ADVICE else ""
        where = group_name(worst, ranks), float(of_groups[worst, place])
        lines.append(Line(cause, means[cause], share, *where, hidden.get(cause, 0.0), advice))
    straggler = 100.0 * means["straggler"] / max(step, 1e-12)
    overlap = 100.0 * means["overlapped"] / max(means["in flight"], 1e-12)
    steps, bound = sum(i.steps for i in intervals), max(i.clock_bound_us for i in intervals)
    return Summary(ranks, steps, step, straggler, overlap, bound, lines)
