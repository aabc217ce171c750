"""Balance by moving only the excess: ranks with too much work give some of it to ranks with room. Pure.

A rank that is above the target gives its largest samples that fit into the excess: a long sample carries more work per
token than a short one, so few tokens move. What was given goes, largest first, to where there is most room. That may
overfill a rank by a little; then it gives again, smaller samples this time, until nobody is above the target.
"""

import heapq
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from freescale.balance.placement import Ints, Problem

T = TypeVar("T")
Given = tuple[float, int]
"""A sample on its way: its cost and its number."""
_COVER = 1.05  # a sample this much larger than the excess is better than several that fit it exactly
_ROUNDS = 12
_BREATHE_EVERY = 16


def shed(problem: Problem, tolerance: float) -> "Shelves":
    """Place samples so that no rank takes longer than the least possible time and a little."""
    shelves = Shelves(problem, problem.least() * (1.0 + tolerance))
    for _ in range(_ROUNDS):
        given = [sample for rank in breathing(shelves.overfull()) for sample in shelves.give_excess(rank)]
        if not given:
            break
        _hand_out(shelves, _largest_first(given))
    return shelves


def _largest_first(given: list[Given]) -> list[Given]:
    """Sorted outside of the interpreter: thousands of tuples would hold it for milliseconds."""
    costs, samples = zip(*given, strict=True)
    order = np.lexsort((samples, costs))[::-1]
    return [given[place] for place in order.tolist()]


class Shelves:
    """What each rank holds, in order of cost; looked at only where something changes."""

    def __init__(self, problem: Problem, target: float) -> None:
        self.problem, self.rank = problem, problem.homes.copy()
        self.room = (target * problem.speeds - problem.times(self.rank) * problem.speeds).tolist()
        """Work that each rank can still take."""
        cap = problem.max_tokens
        self.space = None if cap is None else (cap - problem.held(self.rank)).tolist()
        """Tokens that each rank can still hold, where that is limited."""
        by_cost = np.argsort(problem.costs, kind="stable")
        narrow = problem.homes[by_cost].astype(
            np.min_scalar_type(problem.world_size)
        )  # small numbers are sorted faster
        self._order = by_cost[np.argsort(narrow, kind="stable")]
        self._ends = [0, *np.cumsum(np.bincount(problem.homes, minlength=problem.world_size)).tolist()]
        self._held: dict[int, tuple[list[float], list[int]]] = {}

    def held(self, rank: int) -> tuple[list[float], list[int]]:
        """Costs of a rank's samples in ascending order, and the samples."""
        if rank not in self._held:
            samples = self._order[self._ends[rank] : self._ends[rank + 1]]
            self._held[rank] = self.problem.costs[samples].tolist(), samples.tolist()
        return self._held[rank]

    def overfull(self) -> list[int]:
        """Ranks that hold too much."""
        full = [rank for rank, room in enumerate(self.room) if room < 0]
        if self.space is None:
            return full
        return sorted({*full, *(rank for rank, space in enumerate(self.space) if space < 0)})

    def take(self, rank: int, place: int) -> Given:
        """Take a sample off its rank."""
        costs, samples = self.held(rank)
        cost, sample = costs.pop(place), samples.pop(place)
        self.room[rank] += cost
        if self.space is not None:
            self.space[rank] += int(self.problem.tokens[sample])
        return cost, sample

    def put(self, rank: int, given: Given) -> None:
        """Give a rank a sample."""
        costs, samples = self.held(rank)
        cost, sample = given
        place = bisect_right(costs, cost)
        costs.insert(place, cost)
        samples.insert(place, sample)
        self.room[rank] -= cost
        if self.space is not None:
            self.space[rank] -= int(self.problem.tokens[sample])
        self.rank[sample] = rank

    def has_space(self, rank: int, tokens: int) -> bool:
        """Whether a rank has the memory for so much more."""
        return self.space is None or self.space[rank] >= tokens

    def give_excess(self, rank: int) -> Iterator[Given]:
        """Take samples off an overfull rank: the largest that fits into the excess, again and again."""
        costs, _ = self.held(rank)
        while costs and (self.room[rank] < 0 or not self.has_space(rank, 0)):
            excess = -self.room[rank]
            place = bisect_right(costs, excess) - 1
            if place + 1 < len(costs) and (place < 0 or costs[place + 1] <= excess * _COVER):
                place += 1
            yield self.take(rank, place)


def _hand_out(shelves: Shelves, given: list[Given]) -> None:
    """Give samples to where there is most room: on the host that they come from if they fit there, else anywhere."""
    problem = shelves.problem
    if len(np.unique(problem.hosts)) > 1:
        given = _hand_out_at_home(shelves, given)
    roomy = [(-room, rank) for rank, room in enumerate(shelves.room)]
    heapq.heapify(roomy)
    for sample in breathing(given):
        _put_where_most_room(shelves, roomy, sample)


def _hand_out_at_home(shelves: Shelves, given: list[Given]) -> list[Given]:
    """Place what fits on its own host, and give back the rest."""
    problem, rest = shelves.problem, []
    roomy: dict[int, list[tuple[float, int]]] = {}
    for rank, host in enumerate(problem.hosts.tolist()):
        roomy.setdefault(host, []).append((-shelves.room[rank], rank))
    for heap in roomy.values():
        heapq.heapify(heap)
    for sample in breathing(given):
        heap = roomy[int(problem.hosts[shelves.rank[sample[1]]])]
        rank = heap[0][1]
        if shelves.room[rank] >= sample[0] and shelves.has_space(rank, int(problem.tokens[sample[1]])):
            shelves.put(rank, sample)
            heapq.heapreplace(heap, (-shelves.room[rank], rank))
        else:
            rest.append(sample)
    return rest


def _put_where_most_room(shelves: Shelves, roomy: list[tuple[float, int]], sample: Given) -> None:
    """Among the ranks that have the memory."""
    full, tokens = [], int(shelves.problem.tokens[sample[1]])
    while roomy and not shelves.has_space(roomy[0][1], tokens):
        full.append(heapq.heappop(roomy))
    if not roomy:  # it goes back to where there is most room, and the placement will be found not to be allowed
        roomy += full
        full.clear()
    rank = roomy[0][1]
    shelves.put(rank, sample)
    heapq.heapreplace(roomy, (-shelves.room[rank], rank))
    for one in full:
        heapq.heappush(roomy, one)


def breathing(values: Sequence[T]) -> Iterator[T]:
    """Pass values on, and let other threads run now and then: planning goes on while a step is being launched."""
    for place, value in enumerate(values):
        if place % _BREATHE_EVERY == 0:
            time.sleep(0)
        yield value


_SWAPS_PER_RANK = 20


def level(shelves: Shelves) -> Ints:
    """Make the counts equal, and keep the balance as well as can be."""
    _hand_on_the_cheapest(shelves)
    _exchange(shelves)
    return shelves.rank


def _hand_on_the_cheapest(shelves: Shelves) -> None:
    world_size = shelves.problem.world_size
    counts = np.bincount(shelves.rank, minlength=world_size)
    each, over = divmod(len(shelves.rank), world_size)
    wanted = np.full(world_size, each)
    wanted[np.argsort(-counts, kind="stable")[:over]] += 1
    given = [
        shelves.take(rank, 0) for rank in range(world_size) for _ in range(max(0, int(counts[rank] - wanted[rank])))
    ]
    lacking = {rank: int(wanted[rank] - counts[rank]) for rank in range(world_size) if wanted[rank] > counts[rank]}
    roomy = [(-shelves.room[rank], rank) for rank in lacking]
    heapq.heapify(roomy)
    for sample in breathing(sorted(given, reverse=True)):
        _, rank = heapq.heappop(roomy)
        shelves.put(rank, sample)
        lacking[rank] -= 1
        if lacking[rank]:
            heapq.heappush(roomy, (-shelves.room[rank], rank))


def _exchange(shelves: Shelves) -> None:
    """One at a time: the fullest rank exchanges with the one that has most room, or else for the cheapest anywhere."""
    room = shelves.room
    over = [(room[rank], rank) for rank in shelves.overfull()]
    roomy = [(-free, rank) for rank, free in enumerate(room)]
    heapq.heapify(over)
    heapq.heapify(roomy)
    cheapest: list[int] | None = None
    for _ in breathing(range(_SWAPS_PER_RANK * shelves.problem.world_size)):
        while over and (over[0][0] != room[over[0][1]] or room[over[0][1]] >= 0):
            heapq.heappop(over)
        if not over:
            return
        while -roomy[0][0] != room[roomy[0][1]]:
            heapq.heappop(roomy)
        full, free = heapq.heappop(over)[1], roomy[0][1]
        touched = _exchange_between(shelves, full, free)
        if room[full] < 0:
            if cheapest is None:
                cheapest = _cheapest(shelves)
            touched |= _exchange_for_cheapest(shelves, full, cheapest)
        for rank in touched:
            heapq.heappush(roomy, (-room[rank], rank))
            if room[rank] < 0:
                heapq.heappush(over, (room[rank], rank))


def _exchange_between(shelves: Shelves, full: int, free: int) -> set[int]:
    """The pair of samples whose difference is nearest to the excess, if there is room for that."""
    excess, room = -shelves.room[full], shelves.room[free]
    (mine, my_samples), (theirs, their_samples) = shelves.held(full), shelves.held(free)
    best: tuple[float, int, int] | None = None
    if not theirs:
        return set()
    for place in range(len(mine) - 1, -1, -1):
        other = max(0, bisect_right(theirs, mine[place] - excess) - 1)
        moved = mine[place] - theirs[other]
        if moved <= 0:
            break
        if moved <= room and (best is None or abs(moved - excess) < best[0]):
            best = abs(moved - excess), place, other
    if best is None or not _has_space(shelves, full, free, my_samples[best[1]], their_samples[best[2]]):
        return set()
    _swap(shelves, full, best[1], free, best[2])
    return {full, free}


def _cheapest(shelves: Shelves) -> list[int]:
    """The cheapest samples of all: as many as a few ranks hold."""
    few = min(len(shelves.rank), 4 * (len(shelves.rank) // shelves.problem.world_size + 1))
    return np.argsort(shelves.problem.costs, kind="stable")[:few].tolist()


def _exchange_for_cheapest(shelves: Shelves, full: int, cheapest: list[int]) -> set[int]:
    """A rank whose largest sample is nearly the whole of its time can only hold the cheapest ones beside it."""
    costs, touched = shelves.problem.costs, {full}
    for cost, sample in reversed(list(zip(*shelves.held(full), strict=True))):
        if shelves.room[full] >= 0:
            break
        for cheap in cheapest:
            free, moved = int(shelves.rank[cheap]), cost - float(costs[cheap])
            if moved <= 0:
                break
            if free != full and shelves.room[free] >= moved and _has_space(shelves, full, free, sample, cheap):
                _swap(shelves, full, shelves.held(full)[1].index(sample), free, shelves.held(free)[1].index(cheap))
                touched.add(free)
                break
    return touched if len(touched) > 1 else set()


def _swap(shelves: Shelves, full: int, place: int, free: int, other: int) -> None:
    mine, theirs = shelves.take(full, place), shelves.take(free, other)
    shelves.put(free, mine)
    shelves.put(full, theirs)


def _has_space(shelves: Shelves, full: int, free: int, mine: int, theirs: int) -> bool:
    tokens = shelves.problem.tokens
    moved = int(tokens[mine] - tokens[theirs])
    return shelves.has_space(free, moved) and shelves.has_space(full, -moved)
