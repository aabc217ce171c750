"""The assignment problem, its solutions, and placements that repartition all samples from one global order. Pure.

Repartitioning moves nearly everything. It serves as a baseline, and LPT also places steps of few large samples, where
moving the excess alone misses its target.
"""

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AssignmentProblem:
    """Samples with their source ranks, and the ranks that may compute them."""

    costs: Floats
    """Whole numbers up to 2^30: their sums are exact, so every machine computes the same placement bitwise."""
    source_rank: Ints
    """The rank that holds each sample."""
    world_size: int
    tokens: Ints
    """Size of each sample, which a move transfers."""
    speeds: Floats
    """Cost per time of each rank."""
    hosts: Ints
    """Host of each rank."""
    max_tokens: int | None = None
    """The most tokens that a rank can hold."""
    equal_counts: bool = False
    """Whether all ranks must hold the same number of samples, give or take one."""

    @property
    def mean_time(self) -> float:
        """Time of a step if work were divisible."""
        return float(self.costs.sum() / math.fsum(self.speeds))

    def lower_bound_time(self) -> float:
        """Return a time that no placement beats: a sample is on one rank, with equal counts beside others."""
        if not len(self.costs):
            return 0.0
        companions = 0.0
        if self.equal_counts:
            count = len(self.costs) // self.world_size - 1
            companions = float(np.sort(self.costs)[: max(0, count)].sum())
        return max(self.mean_time, (float(self.costs.max()) + companions) / float(self.speeds.max()))

    def times(self, rank: Ints) -> Floats:
        """Return how long each rank computes under a placement."""
        return np.bincount(rank, weights=self.costs, minlength=self.world_size) / self.speeds

    def tokens_per_rank(self, rank: Ints) -> Floats:
        """Return the tokens of each rank under a placement."""
        return np.bincount(rank, weights=self.tokens, minlength=self.world_size).astype(np.float64)


class Placement(NamedTuple):
    """The rank that computes each sample, and how good that is."""

    rank: Ints
    max_over_mean: float
    """Time of the slowest rank over the time of a perfectly even split."""
    max_over_mean_before: float
    """The same before balancing."""
    lower_bound: float
    """A value of `max_over_mean` that no placement beats."""
    moved_samples: float
    """Share of the samples that change ranks."""
    moved_tokens: float
    """Share of the tokens that change ranks."""


def evaluate_placement(problem: AssignmentProblem, rank: Ints) -> Placement:
    """Compute the quality of a placement."""
    mean_time, moved = max(problem.mean_time, 1e-300), rank != problem.source_rank
    longest = [problem.times(where).max(initial=0.0) for where in (rank, problem.source_rank)]
    reached, max_over_mean_before, best = (
        time / mean_time if len(rank) else 1.0 for time in (*longest, problem.lower_bound_time())
    )
    samples = float(moved.mean()) if len(rank) else 0.0
    tokens = float(problem.tokens[moved].sum() / max(1, problem.tokens.sum()))
    return Placement(rank, reached, max_over_mean_before, best, samples, tokens)


def zigzag(problem: AssignmentProblem) -> Ints:
    """Assign as the paper does: largest first, to the ranks in order, then in reverse order. Counts are equal."""
    position = np.arange(len(problem.costs))
    round_, column = position // problem.world_size, position % problem.world_size
    rank = np.empty(len(position), dtype=np.int64)
    rank[_largest_first(problem)] = np.where(round_ % 2 == 0, column, problem.world_size - 1 - column)
    return rank


def lpt(problem: AssignmentProblem) -> Ints:
    """Assign by longest processing time: largest first, each to the rank that becomes free first."""
    each, one_more = divmod(len(problem.costs), problem.world_size)
    rank, counts = np.empty(len(problem.costs), dtype=np.int64), [0] * problem.world_size
    free, limited = [(0.0, r) for r in range(problem.world_size)], problem.equal_counts
    for sample in _largest_first(problem).tolist():
        while limited and counts[free[0][1]] == each and not one_more:
            heapq.heappop(free)
        done, r = heapq.heappop(free)
        rank[sample] = r
        counts[r] += 1
        if not limited or counts[r] <= each:
            heapq.heappush(free, (done + problem.costs[sample] / problem.speeds[r], r))
        else:
            one_more -= 1
    return rank


def _largest_first(problem: AssignmentProblem) -> Ints:
    return np.argsort(-problem.costs, kind="stable")
