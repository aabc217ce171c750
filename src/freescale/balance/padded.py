"""Places samples for models that pad: a rank computes its number of samples times its longest one. Pure.

Equal sums of tokens do not help here, since one long sample makes all samples of its rank expensive. Samples of similar
length belong together: the samples are sorted by length and cut into one group per rank, few long ones or many short
ones, so that the largest product of count and longest sample is as small as possible. No other partition has a smaller
one: sorted groups of the same counts have no longer longest samples.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from freescale.balance.placement import AssignmentProblem, Floats, Ints, match_source_ranks, yield_gil

_PRECISION = 1e-9
_ROUNDING = 1e-12  # a time that is a count times a cost over a speed must allow that count


@dataclass(frozen=True)
class PaddedProblem(AssignmentProblem):
    """Samples to place on ranks that pad. Costs grow with tokens. `hosts` is not used: nearly all samples move."""

    def times(self, rank: Ints) -> Floats:
        """Return how long each rank computes under a placement: its count times its most expensive sample."""
        return self._padded(self.costs, rank) / self.speeds

    def tokens_per_rank(self, rank: Ints) -> Floats:
        """Return the tokens of each rank under a placement, with padding."""
        return self._padded(self.tokens.astype(np.float64), rank)

    @cached_property
    def lower_bound_time(self) -> float:
        """A time that no placement beats: that of the best partition if all ranks were as fast as the fastest.

        With equal speeds it is reached.
        """
        if not len(self.costs) or self.partition_if_all_were_fast is None:
            return 0.0
        return max(self.mean_time, self.partition_if_all_were_fast.time)

    @cached_property
    def longest_first(self) -> Ints:
        """The samples in descending order of length."""
        return np.lexsort((self.tokens, self.costs))[::-1]

    @cached_property
    def partition_if_all_were_fast(self) -> "Partition | None":
        """The best partition if all ranks were as fast as the fastest."""
        return best_partition(self, np.full(self.world_size, self.speeds.max()))

    def _padded(self, values: Floats, rank: Ints) -> Floats:
        largest = np.zeros(self.world_size)
        np.maximum.at(largest, rank, values)
        return np.bincount(rank, minlength=self.world_size) * largest


class Partition(NamedTuple):
    """The samples, sorted by length, cut into one group per rank."""

    time: float
    """Of the slowest rank."""
    counts: list[int]
    """Samples of each group, that of the longest samples first."""


def place_padded(problem: PaddedProblem, tolerance: float) -> list[Ints]:
    """Return the placements that are worth a move: none if the source placement is within tolerance of the best.

    If there are at least as many samples as ranks, every rank of a returned placement has one.
    """
    source = problem.source_rank
    fits = problem.max_tokens is None or problem.tokens_per_rank(source).max() <= problem.max_tokens
    if fits and problem.times(source).max() <= problem.lower_bound_time * (1.0 + tolerance):
        return []
    if np.ptp(problem.speeds) == 0:
        partition = problem.partition_if_all_were_fast
        return [] if partition is None else [_place(problem, partition, np.arange(problem.world_size))]
    # Fast ranks take the most if they get short samples; but a slow rank may be too slow for a single long sample.
    slow_first = np.argsort(problem.speeds, kind="stable")
    orders = [(best_partition(problem, problem.speeds[ranks]), ranks) for ranks in (slow_first, slow_first[::-1])]
    return [_place(problem, partition, ranks) for partition, ranks in orders if partition is not None]


def best_partition(problem: PaddedProblem, speeds: Floats) -> Partition | None:
    """Return the fastest partition for ranks of these speeds, in their order; None if max_tokens allows none.

    Whether a time can be met is decided by filling one rank after another, longest samples first: a rank that takes all
    it can leaves fewer and shorter ones. The least such time is found by bisection.
    """
    costs = problem.costs[problem.longest_first]
    limits = np.full(len(costs), len(costs))
    if problem.max_tokens is not None:
        limits = problem.max_tokens // np.maximum(problem.tokens[problem.longest_first], 1)
    cost, limit, speed = costs.tolist(), limits.tolist(), speeds.tolist()

    def partition_within(time: float) -> Partition | None:
        counts = _fill(cost, limit, speed, time)
        if counts is None:
            return None
        firsts = np.minimum(np.cumsum([0, *counts[:-1]]), max(0, len(costs) - 1))
        return Partition(float((counts * costs[firsts] / speeds).max(initial=0.0)) if cost else 0.0, counts)

    best = partition_within(len(cost) * max(cost, default=0.0) / min(speed))
    low = problem.mean_time
    while best is not None and best.time - low > _PRECISION * best.time:
        middle = (low + best.time) / 2
        better = partition_within(middle)
        low, best = (middle, best) if better is None else (low, better)
    return best


def _fill(costs: list[float], limits: list[int], speeds: list[float], time: float) -> list[int] | None:
    """Return how many samples each rank takes within a time; None if some are left.

    Samples are sorted, longest first. A rank leaves one sample for every rank after it.
    """
    counts, first = [0] * len(speeds), 0
    for position, speed in enumerate(yield_gil(speeds)):
        left = len(costs) - first
        if not left:
            return counts
        fitting = int(time * speed * (1 + _ROUNDING) // costs[first]) if costs[first] else left
        counts[position] = min(fitting, limits[first], max(1, left - (len(speeds) - position - 1)))
        if not counts[position]:
            return None
        first += counts[position]
    return counts if first == len(costs) else None


def _place(problem: PaddedProblem, partition: Partition, ranks: Ints) -> Ints:
    """Give group i to rank i of `ranks`, or to another of the same speed that holds more of it."""
    placed = np.empty(len(problem.costs), dtype=np.int64)
    placed[problem.longest_first] = np.repeat(ranks, partition.counts)
    return match_source_ranks(problem, placed)
