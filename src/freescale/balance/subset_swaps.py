"""Swaps small sets of samples between ranks: to end overloads, and to return samples to their source rank. Pure.

With few samples per rank no single sample fits into an excess or into the room of another rank, but the difference of
two small sets does. In each round all ranks propose swaps, the best ones are carried out, each rank in one at most.
"""

import math
import time
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from freescale.balance.placement import Floats, Ints
from freescale.balance.rebalance import NO_SAMPLE, Bools, RankLoads, ranges

_MOST_SAMPLES = {1: 64, 2: 10, 3: 8}
"""How many samples of a rank are considered for sets of this size."""
_MOST_SETS = 6000  # on either side of the swaps of a round
_SWAP_ROUNDS, _RETURN_ROUNDS = 60, 12
_LEAST_GAIN = 1e-5  # of a rank's capacity
_FIXED_PRICE = 0.02  # of a swap, as a share of a rank's tokens: fewer swaps leave more ranks as they are
_SWAPS_PER_RANK = 8


class Subsets(NamedTuple):
    """Small sets of samples, each of one rank. The empty set of each rank is one of them."""

    rank: Ints
    members: Ints
    """[sets, size], filled up with NO_SAMPLE."""
    cost: Floats
    tokens: Ints
    transferred: Ints
    """Tokens that are away from their source rank now."""
    count: Ints


class Swaps(NamedTuple):
    """Swaps of a set for another: positions in two lists of subsets."""

    given: Ints
    taken: Ints


def swap_subsets(loads: RankLoads, *, size: int) -> None:
    """Swap sets of up to `size`, then of more samples between overloaded ranks and others until none is overloaded."""
    for _ in range(_SWAP_ROUNDS):
        time.sleep(0)
        by_room, most = np.argsort(loads.room, kind="stable"), _most_ranks(loads, size)
        overloaded = np.sort(by_room[: min(most, np.count_nonzero(loads.room < 0))])
        others = np.sort(by_room[::-1][: min(most, np.count_nonzero(loads.room > 0))])
        if not len(overloaded) or not len(others):
            return
        given, taken = _subsets(loads, overloaded, max(size, 2)), _subsets(loads, others, size)
        swaps = _best_swaps(loads, given, taken)
        if len(swaps.given):
            _carry_out(loads, given, taken, swaps)
        elif size == max(_MOST_SAMPLES):
            return
        else:
            size += 1


def _most_ranks(loads: RankLoads, size: int) -> int:
    """Return how many ranks have as many sets as a round considers."""
    width = min(_MOST_SAMPLES[size], -(-len(loads.rank) // loads.problem.world_size))
    return max(1, _MOST_SETS // len(_combinations(width, size)[0]))


def return_to_source(loads: RankLoads) -> None:
    """Swap sets of up to two samples so that fewer tokens are away from their source, and no rank ends later."""
    times = loads.load / loads.problem.speeds
    loads.capacity = np.maximum(loads.capacity, times.max() * loads.problem.speeds)
    for _ in range(_RETURN_ROUNDS):
        time.sleep(0)
        subsets = _subsets(loads, np.arange(loads.problem.world_size), 2)
        swaps = _returning_swaps(loads, subsets)
        if not len(swaps.given):
            return
        _carry_out(loads, subsets, subsets, swaps)


@cache
def _combinations(width: int, size: int) -> tuple[Ints, Ints]:
    """Return all sets of up to `size` columns, filled up with the column -1, and how many columns each needs."""
    sets = [c + (-1,) * (size - len(c)) for k in range(size + 1) for c in combinations(range(width), k)]
    columns = np.array(sets, dtype=np.int64).reshape(len(sets), size)
    return columns, columns.max(axis=1) + 1


def _subsets(loads: RankLoads, ranks: Ints, size: int) -> Subsets:
    """Return the sets of up to `size` samples of each of these ranks, which hold them now."""
    table, counts = _sample_table(loads, ranks, _MOST_SAMPLES[size])
    columns, needed = _combinations(table.shape[1] - 1, size)
    row, chosen = np.nonzero(needed <= counts[:, None])
    rank, members = ranks[row], table[row[:, None], columns[chosen]]
    cost, (tokens, transferred, count) = np.zeros(len(rank)), np.zeros((3, len(rank)), dtype=np.int64)
    for samples in members.T:
        cost += loads.costs[samples]
        tokens += loads.sizes[samples]
        transferred += loads.transferred(samples, rank)
        count += samples != NO_SAMPLE
    return Subsets(rank, members, cost, tokens, transferred, count)


def _sample_table(loads: RankLoads, ranks: Ints, most: int) -> tuple[Ints, Ints]:
    """Return up to `most` samples of each rank, spread over their costs, and their number; the last column is none."""
    chosen = np.zeros(loads.problem.world_size, dtype=bool)
    chosen[ranks] = True
    samples = loads.by_rank(chosen)[::-1]
    rank = loads.rank[samples]
    counts = np.bincount(rank, minlength=len(chosen))
    place = np.arange(len(samples)) - (len(samples) - np.cumsum(counts))[rank]
    width = np.maximum(counts, most)[rank]
    kept = (place * most) // width != ((place - 1) * most) // width
    counts = np.minimum(counts, most)
    table = np.full((len(chosen), int(counts.max(initial=0)) + 1), NO_SAMPLE)
    table[rank[kept], ((place * most) // width)[kept]] = samples[kept]
    return table[ranks], counts[ranks]


def _best_swaps(loads: RankLoads, given: Subsets, taken: Subsets) -> Swaps:
    """Return swaps that reduce the overload, the best of each rank: fewest tokens for the overload that they end."""
    swaps = _candidates(loads, given, taken)
    excess = -loads.room[given.rank[swaps.given]]
    moved = given.cost[swaps.given] - taken.cost[swaps.taken]
    remaining = np.maximum(excess - moved, 0) + np.maximum(moved - loads.room[taken.rank[swaps.taken]], 0)
    gain = excess - remaining
    useful = (gain > _LEAST_GAIN * loads.mean_capacity) & _fits_tokens(loads, given, taken, swaps)
    swaps = Swaps(swaps.given[useful], swaps.taken[useful])
    excess, moved, gain = excess[useful], moved[useful], gain[useful]
    tokens_per_cost = loads.sizes.sum() / max(float(loads.costs.sum()), 1.0)
    wasted = _FIXED_PRICE * loads.mean_capacity + np.maximum(moved - excess, 0)
    price = (_transfer_change(loads, given, taken, swaps) + tokens_per_cost * wasted) / gain
    full, other = given.rank[swaps.given], taken.rank[swaps.taken]
    best = _first_of_each(full * loads.problem.world_size + other, price)
    best = best[np.lexsort((price[best], full[best]))]
    best = best[np.arange(len(best)) - np.searchsorted(full[best], full[best]) < _SWAPS_PER_RANK]
    best = best[np.lexsort((price[best], full[best], -excess[best]))]  # the most overloaded rank chooses first
    return Swaps(swaps.given[best], swaps.taken[best])


def _candidates(loads: RankLoads, given: Subsets, taken: Subsets) -> Swaps:
    """Return pairs of sets that may be worth a swap. With equal counts, the sets of a pair have the same size."""
    nonempty = np.flatnonzero(given.count > 0)
    if not loads.problem.equal_counts:
        return _near_pairs(loads, given, taken, nonempty, np.arange(len(taken.rank)))
    pairs = [
        _near_pairs(loads, given, taken, nonempty[given.count[nonempty] == count], np.flatnonzero(taken.count == count))
        for count in range(1, taken.members.shape[1] + 1)
    ]
    return Swaps(np.concatenate([pair.given for pair in pairs]), np.concatenate([pair.taken for pair in pairs]))


def _near_pairs(loads: RankLoads, given: Subsets, taken: Subsets, give: Ints, take: Ints) -> Swaps:
    """Return for each set to give those to take that leave one of the two ranks near its capacity."""
    cost, room = given.cost[give], loads.room
    wide = 12 if len(give) <= 1500 else 4
    empty = take[taken.count[take] == 0]
    windows = [
        (take, taken.cost[take], cost + room[given.rank[give]], np.arange(-wide, wide // 2)),  # the giving rank is
        (take, (taken.cost + room[taken.rank])[take], cost, np.arange(-2, wide)),  # the taking rank is
        (empty, room[taken.rank[empty]], cost, np.arange(-1, 4)),  # the taking rank is, and gives nothing
    ]
    found_given, found_taken = [], []
    for sets, key, wanted, offsets in windows:
        if len(sets) and len(give):
            order = np.argsort(key, kind="stable")
            near = np.searchsorted(key[order], wanted)[:, None] + offsets
            found_given.append(np.repeat(give, len(offsets)))
            found_taken.append(sets[order[np.clip(near.ravel(), 0, len(sets) - 1)]])
    nothing = np.zeros(0, dtype=np.int64)
    return Swaps(np.concatenate([nothing, *found_given]), np.concatenate([nothing, *found_taken]))


def _returning_swaps(loads: RankLoads, subsets: Subsets) -> Swaps:
    """Return the best swap of each rank with the source rank of one of its samples."""
    source = np.append(loads.problem.source_rank, NO_SAMPLE)[subsets.members]
    row, column = np.nonzero((source != subsets.rank[:, None]) & (source >= 0))
    swaps = _pairs_within_capacity(loads, subsets, row, source[row, column])
    allowed = _fits_tokens(loads, subsets, subsets, swaps)
    if loads.problem.equal_counts:
        allowed &= subsets.count[swaps.given] == subsets.count[swaps.taken]
    swaps = Swaps(swaps.given[allowed], swaps.taken[allowed])
    change = _transfer_change(loads, subsets, subsets, swaps)
    fewer = np.flatnonzero(change < 0)
    best = fewer[_first_of_each(subsets.rank[swaps.given[fewer]], change[fewer])]
    best = best[np.argsort(change[best], kind="stable")]
    return Swaps(swaps.given[best], swaps.taken[best])


def _pairs_within_capacity(loads: RankLoads, subsets: Subsets, give: Ints, to: Ints) -> Swaps:
    """Return for each set to give the sets of the other rank after whose swap both ranks are within capacity."""
    order = np.lexsort((subsets.cost, subsets.rank))
    room, cost = loads.room, subsets.cost[give]
    stride = 2.0 * (subsets.cost.max() + np.abs(room).max()) + 1.0
    key, base = subsets.rank[order] * stride + subsets.cost[order], to * stride
    begin = np.searchsorted(key, base + np.maximum(cost - room[to], 0))
    end = np.searchsorted(key, base + cost + room[subsets.rank[give]], side="right")
    end = np.maximum(begin, end)
    return Swaps(np.repeat(give, end - begin), order[ranges(begin, end)])


def _fits_tokens(loads: RankLoads, given: Subsets, taken: Subsets, swaps: Swaps) -> Bools:
    """Return whether both ranks can hold the tokens after each swap, or hold fewer than before."""
    if loads.max_tokens == math.inf:
        return np.ones(len(swaps.given), dtype=bool)
    moved = given.tokens[swaps.given] - taken.tokens[swaps.taken]
    spare = np.maximum(loads.max_tokens - loads.tokens, 0)
    return (moved <= spare[taken.rank[swaps.taken]]) & (-moved <= spare[given.rank[swaps.given]])


def _transfer_change(loads: RankLoads, given: Subsets, taken: Subsets, swaps: Swaps) -> Ints:
    """Return how many more tokens are away from their source rank after each swap."""
    change = -given.transferred[swaps.given] - taken.transferred[swaps.taken]
    for sets, chosen, to in (
        (given, swaps.given, taken.rank[swaps.taken]),
        (taken, swaps.taken, given.rank[swaps.given]),
    ):
        for samples in sets.members[chosen].T:
            change += loads.transferred(samples, to)
    return change


def _first_of_each(group: Ints, price: Floats | Ints) -> Ints:
    """Return the position of the lowest price of each group."""
    order = np.lexsort((price, group))
    ordered = group[order]
    return order[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(order) else order


def _carry_out(loads: RankLoads, given: Subsets, taken: Subsets, swaps: Swaps) -> None:
    """Carry out swaps, in their order, that have no rank in common."""
    giving, taking = given.rank[swaps.given], taken.rank[swaps.taken]
    used, chosen = [False] * loads.problem.world_size, []
    for position, (one, other) in enumerate(zip(giving.tolist(), taking.tolist(), strict=True)):
        if not used[one] and not used[other]:
            used[one] = used[other] = True
            chosen.append(position)
    outgoing, incoming = given.members[swaps.given[chosen]], taken.members[swaps.taken[chosen]]
    samples = np.concatenate([outgoing.ravel(), incoming.ravel()])
    to = np.concatenate([np.repeat(taking[chosen], outgoing.shape[1]), np.repeat(giving[chosen], incoming.shape[1])])
    loads.move(samples[samples != NO_SAMPLE], to[samples != NO_SAMPLE])
