"""Where samples go, and how good that is. Pure: numpy and nothing else."""

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """Samples that have a home, and ranks that compute them."""

    costs: Floats
    """Whole numbers below 2^30: sums of them are exact, so that every machine plans the same to the last bit."""
    homes: Ints
    """The rank that each sample is on."""
    world_size: int
    tokens: Ints
    """What moving a sample moves."""
    speeds: Floats
    """Of each rank: cost per time."""
    hosts: Ints
    """Of each rank."""
    max_tokens: int | None = None
    """Most that a rank can hold."""
    equal_counts: bool = False
    """Whether all ranks must hold the same number of samples, give or take one."""

    @property
    def even(self) -> float:
        """Time of a step if work could be cut at will."""
        return float(self.costs.sum() / math.fsum(self.speeds))

    def least(self) -> float:
        """Time that no placement can beat: one sample is on one rank, which may have to hold others beside it."""
        if not len(self.costs):
            return 0.0
        beside = 0.0
        if self.equal_counts:
            company = len(self.costs) // self.world_size - 1
            beside = float(np.sort(self.costs)[: max(0, company)].sum())
        return max(self.even, (float(self.costs.max()) + beside) / float(self.speeds.max()))

    def times(self, rank: Ints) -> Floats:
        """How long each rank computes, if samples are placed so."""
        return np.bincount(rank, weights=self.costs, minlength=self.world_size) / self.speeds

    def held(self, rank: Ints) -> Floats:
        """Tokens of each rank, if samples are placed so."""
        return np.bincount(rank, weights=self.tokens, minlength=self.world_size).astype(np.float64)


class Placement(NamedTuple):
    """Which rank computes each sample."""

    rank: Ints
    max_over_mean: float
    """Time of a step over what it would be if work could be cut at will."""
    at_home: float
    """The same if every sample stays where it is."""
    lower_bound: float
    """The same for the best placement that could be hoped for."""
    moved_samples: float
    """Share of the samples that leave their home."""
    moved_tokens: float
    """Share of the tokens that do."""


def judged(problem: Problem, rank: Ints) -> Placement:
    """Say how good a placement is."""
    even, moved = max(problem.even, 1e-300), rank != problem.homes
    longest = [problem.times(where).max(initial=0.0) for where in (rank, problem.homes)]
    reached, at_home, best = (time / even if len(rank) else 1.0 for time in (*longest, problem.least()))
    samples = float(moved.mean()) if len(rank) else 0.0
    tokens = float(problem.tokens[moved].sum() / max(1, problem.tokens.sum()))
    return Placement(rank, reached, at_home, best, samples, tokens)


def zigzag(problem: Problem) -> Ints:
    """The paper's: largest first, to the ranks in order, then in reverse order, and so on. Counts are equal."""
    place = np.arange(len(problem.costs))
    turn, seat = place // problem.world_size, place % problem.world_size
    rank = np.empty(len(place), dtype=np.int64)
    rank[_largest_first(problem)] = np.where(turn % 2 == 0, seat, problem.world_size - 1 - seat)
    return rank


def lpt(problem: Problem) -> Ints:
    """Largest first, each to the rank that would have it done earliest and may still take one."""
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


def _largest_first(problem: Problem) -> Ints:
    return np.argsort(-problem.costs, kind="stable")
