"""Placements that deal samples out from one global order, wherever they were before. Pure.

They move nearly everything. They are here to be compared with, and LPT for steps of few large samples, where moving the
excess alone does not reach its aim.
"""

import heapq

import numpy as np

from freescale.balance.place.placement import Ints, Problem


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
