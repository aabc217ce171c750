"""The same number of samples on every rank, after the work was balanced with free counts. Pure.

Ranks with too many samples give their cheapest, which hardly matter; then ranks that are above the target exchange a
sample for a cheaper one.
"""

import heapq
from bisect import bisect_right

import numpy as np

from freescale.balance.place.placement import Ints
from freescale.balance.place.shed import Shelves, breathing

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
