"""The assignment problem, its solutions, and placements that repartition all samples from one global order. Pure.

Repartitioning moves nearly everything. It serves as a baseline, and LPT also as the last resort for steps of few large
samples; its bins are then matched to the ranks that already hold most of them.
"""

import heapq
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")
_YIELD_EVERY = 64


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

    @cached_property
    def ascending(self) -> Ints:
        """The samples in order of cost, cheapest first. Two radix sorts of 16 bits are faster than one of a float."""
        whole = self.costs.astype(np.uint32)
        by_low_bits = np.argsort((whole & 0xFFFF).astype(np.uint16), kind="stable")
        return by_low_bits[np.argsort((whole[by_low_bits] >> 16).astype(np.uint16), kind="stable")]

    @cached_property
    def lower_bound_time(self) -> float:
        """A time that no placement beats: the mean, or what some rank holds by the pigeonhole principle.

        Of the k * world_size + 1 largest samples one rank holds k + 1, and these cost at least what the k + 1 smallest
        of them cost. With equal counts that rank also holds others, which cost at least what the cheapest cost. At best
        it is the fastest rank.
        """
        if not len(self.costs):
            return 0.0
        cheapest = np.concatenate([[0.0], np.cumsum(self.costs[self.ascending])])
        k = np.arange((len(self.costs) - 1) // self.world_size + 1)
        end = len(self.costs) - k * self.world_size + k
        held = cheapest[end] - cheapest[end - k - 1]
        if self.equal_counts:
            held += cheapest[np.maximum(len(self.costs) // self.world_size - k - 1, 0)]
        return max(self.mean_time, float(held.max()) / float(self.speeds.max()))

    def times(self, rank: Ints) -> Floats:
        """Return how long each rank computes under a placement."""
        return np.bincount(rank, weights=self.costs, minlength=self.world_size) / self.speeds

    def moved_tokens(self, rank: Ints) -> int:
        """Return the tokens of the samples that change ranks under a placement."""
        return int((self.tokens * (rank != self.source_rank)).sum())

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
        time / mean_time if len(rank) else 1.0 for time in (*longest, problem.lower_bound_time)
    )
    samples = np.count_nonzero(moved) / max(1, len(rank))
    tokens = problem.moved_tokens(rank) / max(1, int(problem.tokens.sum()))
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
    costs, speeds = problem.costs.tolist(), problem.speeds.tolist()
    for sample in yield_gil(_largest_first(problem).tolist()):
        while limited and counts[free[0][1]] == each and not one_more:
            heapq.heappop(free)
        done, r = heapq.heappop(free)
        rank[sample] = r
        counts[r] += 1
        if not limited or counts[r] <= each:
            heapq.heappush(free, (done + costs[sample] / speeds[r], r))
        else:
            one_more -= 1
    return rank


def match_source_ranks(problem: AssignmentProblem, bins: Ints) -> Ints:
    """Rename the ranks of a partition so that few tokens move: largest overlap first, between ranks of equal speed."""
    world_size = problem.world_size
    pairs, inverse = np.unique(bins * world_size + problem.source_rank, return_inverse=True)
    overlap = np.bincount(inverse, weights=problem.tokens, minlength=len(pairs))
    bin_, source = np.divmod(pairs, world_size)
    usable = problem.speeds[bin_] == problem.speeds[source]
    order = np.flatnonzero(usable)[np.argsort(-overlap[usable], kind="stable")]
    rank_of = np.full(world_size, -1)
    taken = np.zeros(world_size, dtype=bool)
    for b, r in yield_gil(list(zip(bin_[order].tolist(), source[order].tolist(), strict=True))):
        if rank_of[b] < 0 and not taken[r]:
            rank_of[b], taken[r] = r, True
    for speed in np.unique(problem.speeds):
        same = problem.speeds == speed
        rank_of[same & (rank_of < 0)] = np.flatnonzero(same & ~taken)
    return rank_of[bins]


def yield_gil(values: Sequence[T]) -> Iterator[T]:
    """Yield values and release the GIL regularly: planning runs in a thread beside the training step."""
    for position, value in enumerate(values):
        if position % _YIELD_EVERY == 0:
            time.sleep(0)
        yield value


def _largest_first(problem: AssignmentProblem) -> Ints:
    return np.argsort(-problem.costs, kind="stable")
