"""Balances ranks by moving only excess work from overloaded ranks to ranks with spare capacity. Pure.

A rank above the target time gives up the largest samples that fit into its excess: a long sample carries more work per
token than a short one, so few tokens move. Removed samples go, largest first, to the least loaded rank. That may
overload a rank by a little; the next round removes smaller samples, until no rank is above the target.

`equalize` then makes the sample counts equal: ranks with too many samples give their cheapest, which hardly change the
load, and ranks above the target swap a sample for a cheaper one.
"""

import heapq
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from freescale.balance.placement import AssignmentProblem, Ints

T = TypeVar("T")
CostedSample = tuple[float, int]
"""A sample that was removed from its rank: its cost and its index."""
_OVERSHOOT = 1.05  # one sample this much larger than the excess beats several that fit exactly
_ROUNDS = 12
_YIELD_EVERY = 16
_SWAPS_PER_RANK = 20


def rebalance(problem: AssignmentProblem, tolerance: float) -> "RankLoads":
    """Return loads under which no rank takes longer than the lower bound plus the tolerance, where possible."""
    loads = RankLoads(problem, problem.lower_bound_time() * (1.0 + tolerance))
    for _ in range(_ROUNDS):
        removed = [sample for rank in yield_gil(loads.overloaded()) for sample in loads.take_excess(rank)]
        if not removed:
            break
        _place_removed(loads, _largest_first(removed))
    return loads


def _largest_first(removed: list[CostedSample]) -> list[CostedSample]:
    """Sort with numpy: sorting thousands of tuples would hold the GIL for milliseconds."""
    costs, samples = zip(*removed, strict=True)
    order = np.lexsort((samples, costs))[::-1]
    return [removed[position] for position in order.tolist()]


class RankLoads:
    """The samples of each rank in order of cost. Lists are built only for ranks whose samples change."""

    def __init__(self, problem: AssignmentProblem, target: float) -> None:
        self.problem, self.rank = problem, problem.source_rank.copy()
        self.spare = (target * problem.speeds - problem.times(self.rank) * problem.speeds).tolist()
        """Work that each rank can still take. Negative for overloaded ranks."""
        cap = problem.max_tokens
        self.spare_tokens = None if cap is None else (cap - problem.tokens_per_rank(self.rank)).tolist()
        """Tokens that each rank can still hold; None without a limit."""
        by_cost = np.argsort(problem.costs, kind="stable")
        narrow = problem.source_rank[by_cost].astype(np.min_scalar_type(problem.world_size))  # narrow types sort faster
        self._order = by_cost[np.argsort(narrow, kind="stable")]
        self._ends = [0, *np.cumsum(np.bincount(problem.source_rank, minlength=problem.world_size)).tolist()]
        self._samples_of: dict[int, tuple[list[float], list[int]]] = {}

    def samples_of(self, rank: int) -> tuple[list[float], list[int]]:
        """Return the costs of a rank's samples in ascending order, and their indices."""
        if rank not in self._samples_of:
            samples = self._order[self._ends[rank] : self._ends[rank + 1]]
            self._samples_of[rank] = self.problem.costs[samples].tolist(), samples.tolist()
        return self._samples_of[rank]

    def overloaded(self) -> list[int]:
        """Return the ranks above the target or above the token limit."""
        full = [rank for rank, spare in enumerate(self.spare) if spare < 0]
        if self.spare_tokens is None:
            return full
        return sorted({*full, *(rank for rank, tokens in enumerate(self.spare_tokens) if tokens < 0)})

    def take(self, rank: int, position: int) -> CostedSample:
        """Remove a sample from its rank."""
        costs, samples = self.samples_of(rank)
        cost, sample = costs.pop(position), samples.pop(position)
        self.spare[rank] += cost
        if self.spare_tokens is not None:
            self.spare_tokens[rank] += int(self.problem.tokens[sample])
        return cost, sample

    def put(self, rank: int, item: CostedSample) -> None:
        """Add a sample to a rank."""
        costs, samples = self.samples_of(rank)
        cost, sample = item
        position = bisect_right(costs, cost)
        costs.insert(position, cost)
        samples.insert(position, sample)
        self.spare[rank] -= cost
        if self.spare_tokens is not None:
            self.spare_tokens[rank] -= int(self.problem.tokens[sample])
        self.rank[sample] = rank

    def has_token_capacity(self, rank: int, tokens: int) -> bool:
        """Whether a rank can hold so many more tokens."""
        return self.spare_tokens is None or self.spare_tokens[rank] >= tokens

    def take_excess(self, rank: int) -> Iterator[CostedSample]:
        """Remove samples from an overloaded rank: repeatedly the largest that fits into the excess."""
        costs, _ = self.samples_of(rank)
        while costs and (self.spare[rank] < 0 or not self.has_token_capacity(rank, 0)):
            excess = -self.spare[rank]
            position = bisect_right(costs, excess) - 1
            if position + 1 < len(costs) and (position < 0 or costs[position + 1] <= excess * _OVERSHOOT):
                position += 1
            yield self.take(rank, position)


def _place_removed(loads: RankLoads, removed: list[CostedSample]) -> None:
    """Put samples on the least loaded rank: of their source host if they fit there, else of all."""
    problem = loads.problem
    if len(np.unique(problem.hosts)) > 1:
        removed = _place_on_source_host(loads, removed)
    least_loaded = [(-spare, rank) for rank, spare in enumerate(loads.spare)]
    heapq.heapify(least_loaded)
    for sample in yield_gil(removed):
        _place_on_least_loaded(loads, least_loaded, sample)


def _place_on_source_host(loads: RankLoads, removed: list[CostedSample]) -> list[CostedSample]:
    """Put samples that fit on ranks of their source host. Return the others."""
    problem, unplaced = loads.problem, []
    least_loaded: dict[int, list[tuple[float, int]]] = {}
    for rank, host in enumerate(problem.hosts.tolist()):
        least_loaded.setdefault(host, []).append((-loads.spare[rank], rank))
    for heap in least_loaded.values():
        heapq.heapify(heap)
    for sample in yield_gil(removed):
        heap = least_loaded[int(problem.hosts[loads.rank[sample[1]]])]
        rank = heap[0][1]
        if loads.spare[rank] >= sample[0] and loads.has_token_capacity(rank, int(problem.tokens[sample[1]])):
            loads.put(rank, sample)
            heapq.heapreplace(heap, (-loads.spare[rank], rank))
        else:
            unplaced.append(sample)
    return unplaced


def _place_on_least_loaded(loads: RankLoads, least_loaded: list[tuple[float, int]], sample: CostedSample) -> None:
    """Put a sample on the least loaded rank with enough token capacity."""
    full, tokens = [], int(loads.problem.tokens[sample[1]])
    while least_loaded and not loads.has_token_capacity(least_loaded[0][1], tokens):
        full.append(heapq.heappop(least_loaded))
    if not least_loaded:  # no rank has the capacity: `assign` rejects this placement
        least_loaded += full
        full.clear()
    rank = least_loaded[0][1]
    loads.put(rank, sample)
    heapq.heapreplace(least_loaded, (-loads.spare[rank], rank))
    for entry in full:
        heapq.heappush(least_loaded, entry)


def yield_gil(values: Sequence[T]) -> Iterator[T]:
    """Yield values and release the GIL regularly: planning runs in a thread beside the training step."""
    for position, value in enumerate(values):
        if position % _YIELD_EVERY == 0:
            time.sleep(0)
        yield value


def equalize(loads: RankLoads) -> Ints:
    """Make the sample counts of all ranks equal, give or take one, and keep the balance where possible."""
    _equalize_counts(loads)
    _swap_until_balanced(loads)
    return loads.rank


def _equalize_counts(loads: RankLoads) -> None:
    world_size = loads.problem.world_size
    counts = np.bincount(loads.rank, minlength=world_size)
    each, over = divmod(len(loads.rank), world_size)
    target_counts = np.full(world_size, each)
    target_counts[np.argsort(-counts, kind="stable")[:over]] += 1
    surplus = (counts - target_counts).tolist()
    removed = [loads.take(rank, 0) for rank in range(world_size) for _ in range(max(0, surplus[rank]))]
    missing = {rank: -surplus[rank] for rank in range(world_size) if surplus[rank] < 0}
    least_loaded = [(-loads.spare[rank], rank) for rank in missing]
    heapq.heapify(least_loaded)
    for sample in yield_gil(sorted(removed, reverse=True)):
        _, rank = heapq.heappop(least_loaded)
        loads.put(rank, sample)
        missing[rank] -= 1
        if missing[rank]:
            heapq.heappush(least_loaded, (-loads.spare[rank], rank))


def _swap_until_balanced(loads: RankLoads) -> None:
    """Swap samples one pair at a time: of the most loaded with the least loaded rank, else for the cheapest of all."""
    spare = loads.spare
    over = [(spare[rank], rank) for rank in loads.overloaded()]
    least_loaded = [(-free, rank) for rank, free in enumerate(spare)]
    heapq.heapify(over)
    heapq.heapify(least_loaded)
    cheapest: list[int] | None = None
    for _ in yield_gil(range(_SWAPS_PER_RANK * loads.problem.world_size)):
        while over and (over[0][0] != spare[over[0][1]] or spare[over[0][1]] >= 0):
            heapq.heappop(over)
        if not over:
            return
        while -least_loaded[0][0] != spare[least_loaded[0][1]]:
            heapq.heappop(least_loaded)
        full, free = heapq.heappop(over)[1], least_loaded[0][1]
        touched = _swap_between(loads, full, free)
        if spare[full] < 0:
            if cheapest is None:
                cheapest = _cheapest_samples(loads)
            touched |= _swap_for_cheapest(loads, full, cheapest)
        for rank in touched:
            heapq.heappush(least_loaded, (-spare[rank], rank))
            if spare[rank] < 0:
                heapq.heappush(over, (spare[rank], rank))


def _swap_between(loads: RankLoads, full: int, free: int) -> set[int]:
    """Swap the pair of samples whose cost difference is nearest to the excess, if the other rank has the capacity."""
    excess, spare = -loads.spare[full], loads.spare[free]
    (full_costs, full_samples), (free_costs, free_samples) = loads.samples_of(full), loads.samples_of(free)
    best: tuple[float, int, int] | None = None
    if not free_costs:
        return set()
    for position in range(len(full_costs) - 1, -1, -1):
        other = max(0, bisect_right(free_costs, full_costs[position] - excess) - 1)
        moved = full_costs[position] - free_costs[other]
        if moved <= 0:
            break
        if moved <= spare and (best is None or abs(moved - excess) < best[0]):
            best = abs(moved - excess), position, other
    if best is None or not _fits_after_swap(loads, full, free, full_samples[best[1]], free_samples[best[2]]):
        return set()
    _swap(loads, full, best[1], free, best[2])
    return {full, free}


def _cheapest_samples(loads: RankLoads) -> list[int]:
    """Return the cheapest samples of all ranks: as many as a few ranks hold."""
    few = min(len(loads.rank), 4 * (len(loads.rank) // loads.problem.world_size + 1))
    return np.argsort(loads.problem.costs, kind="stable")[:few].tolist()


def _swap_for_cheapest(loads: RankLoads, full: int, cheapest: list[int]) -> set[int]:
    """Swap for the cheapest samples: a rank whose largest sample nearly fills the target can hold no others."""
    costs, touched = loads.problem.costs, {full}
    for cost, sample in reversed(list(zip(*loads.samples_of(full), strict=True))):
        if loads.spare[full] >= 0:
            break
        for cheap in cheapest:
            free, moved = int(loads.rank[cheap]), cost - float(costs[cheap])
            if moved <= 0:
                break
            if free != full and loads.spare[free] >= moved and _fits_after_swap(loads, full, free, sample, cheap):
                (_, full_samples), (_, free_samples) = loads.samples_of(full), loads.samples_of(free)
                _swap(loads, full, full_samples.index(sample), free, free_samples.index(cheap))
                touched.add(free)
                break
    return touched if len(touched) > 1 else set()


def _swap(loads: RankLoads, full: int, position: int, free: int, other: int) -> None:
    full_item, free_item = loads.take(full, position), loads.take(free, other)
    loads.put(free, full_item)
    loads.put(full, free_item)


def _fits_after_swap(loads: RankLoads, full: int, free: int, full_sample: int, free_sample: int) -> bool:
    tokens = loads.problem.tokens
    moved = int(tokens[full_sample] - tokens[free_sample])
    return loads.has_token_capacity(free, moved) and loads.has_token_capacity(full, -moved)
