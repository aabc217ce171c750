"""Where samples go, and how good that is. Pure: numpy and nothing else."""

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
