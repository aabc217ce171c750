"""Balances ranks by moving only excess work from overloaded ranks to ranks with spare capacity. Pure.

A rank above its capacity gives up the largest samples that fit into its excess: a long sample carries more work per
token than a short one, so few tokens move. Removed samples go, largest first, to the ranks with most room, on their
source host if they fit there. That may overload a rank by a little; the next round removes smaller samples.

All ranks are handled at once in bulk operations of numpy, which release the GIL: planning runs beside a training step.
"""

import math
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freescale.balance.placement import AssignmentProblem, Floats, Ints

Bools = NDArray[np.bool_]
NO_SAMPLE = -1
"""Fills up small sets of samples. It indexes the last entry of padded arrays: no cost, no tokens."""
_ROUNDS = 6
_NEARLY_ROOMIEST = 0.7  # ranks with less of the largest room get no sample in the same turn
_SHARE_OF_ROOM = 0.25  # samples that are small against the room are placed several per rank and turn


class RankLoads:
    """What each rank holds under a placement that changes, and how much it may hold."""

    def __init__(self, problem: AssignmentProblem, target_time: float, rank: Ints | None = None) -> None:
        self.problem, self.rank = problem, (problem.source_rank if rank is None else rank).copy()
        self.capacity = target_time * problem.speeds
        """Cost that each rank may hold."""
        self.mean_capacity = target_time * math.fsum(problem.speeds) / problem.world_size
        self.load: Floats = np.zeros(problem.world_size)
        """Cost that each rank holds."""
        self.tokens: Floats = np.zeros(problem.world_size)
        """Tokens that each rank holds; not counted without a limit."""
        self.max_tokens = math.inf if problem.max_tokens is None else float(problem.max_tokens)
        self.costs, self.sizes = np.append(problem.costs, 0.0), np.append(problem.tokens, 0)
        """Cost and tokens of each sample, padded for NO_SAMPLE."""
        self._source = np.append(problem.source_rank, -1)
        self.many_hosts = bool((problem.hosts != problem.hosts[0]).any())
        self._add(np.arange(len(self.rank)), self.rank, 1.0)

    @property
    def room(self) -> Floats:
        """Cost that each rank can still take. Negative for overloaded ranks."""
        return self.capacity - self.load

    def move(self, samples: Ints, to: Ints) -> None:
        """Move samples to ranks."""
        self.remove(samples)
        self.put(samples, to)

    def remove(self, samples: Ints) -> None:
        """Take samples off their ranks. `put` must follow."""
        self._add(samples, self.rank[samples], -1.0)

    def put(self, samples: Ints, to: Ints) -> None:
        """Put removed samples on ranks."""
        self.rank[samples] = to
        self._add(samples, to, 1.0)

    def _add(self, samples: Ints, ranks: Ints, sign: float) -> None:
        world_size = self.problem.world_size
        self.load += sign * np.bincount(ranks, weights=self.costs[samples], minlength=world_size)
        if self.max_tokens < math.inf:
            self.tokens += sign * np.bincount(ranks, weights=self.sizes[samples], minlength=world_size)

    def transferred(self, samples: Ints, ranks: Ints) -> Ints:
        """Return the tokens to transfer for samples on ranks: none at the source, twice as many to another host."""
        source, size = self._source[samples], self.sizes[samples]
        tokens = np.where(source != ranks, size, 0)
        if self.many_hosts:
            hosts = self.problem.hosts
            tokens += np.where(hosts[source] != hosts[ranks], size, 0)
        return tokens

    def largest_first(self, samples: Ints) -> Ints:
        """Return samples in descending order of cost."""
        chosen = np.zeros(len(self.rank), dtype=bool)
        chosen[samples] = True
        ascending = self.problem.ascending
        return ascending[chosen[ascending]][::-1]

    def by_rank(self, ranks: Bools) -> Ints:
        """Return the samples of some ranks, rank by rank, cheapest first."""
        ascending = self.problem.ascending
        samples = ascending[ranks[self.rank[ascending]]]
        narrow = self.rank[samples].astype(np.min_scalar_type(self.problem.world_size))  # narrow types sort faster
        return samples[np.argsort(narrow, kind="stable")]


def move_excess(loads: RankLoads) -> None:
    """Move samples until no rank is above its capacity, where that is found within a few rounds."""
    for _ in range(_ROUNDS):
        crowded = loads.tokens > loads.max_tokens
        if crowded.any():
            sizes = loads.sizes.astype(np.float64)
            _place(loads, _excess_samples(loads, crowded, loads.tokens - loads.max_tokens, sizes))
        overloaded = loads.load > loads.capacity
        if overloaded.any():
            _place(loads, _excess_samples(loads, overloaded, loads.load - loads.capacity, loads.costs))
        elif not crowded.any():
            return


class _SortedSamples(NamedTuple):
    """The samples of some ranks in one array: rank by rank, lightest first. Positions refer to this order."""

    samples: Ints
    weights: Floats
    tokens: Ints
    key: Floats
    """Weight plus the base of the rank: ascending over all ranks."""
    base: Floats
    """Of each rank."""
    begin: Ints
    """Position of each rank's first sample with weight; samples without weight stay."""
    end: Ints
    """Position after each rank's last sample."""


def _sorted_samples(loads: RankLoads, ranks: Bools, weights: Floats, largest_excess: float) -> _SortedSamples:
    samples = loads.by_rank(ranks)
    if weights is not loads.costs:
        samples = samples[np.lexsort((weights[samples], loads.rank[samples]))]
    row = (np.cumsum(ranks) - 1)[loads.rank[samples]]
    stride = 2.0 * (weights.max() + largest_excess) + 1.0
    base = np.arange(np.count_nonzero(ranks)) * stride
    key = row * stride + weights[samples]
    begin, end = np.searchsorted(key, base, side="right"), np.searchsorted(key, base + stride)
    return _SortedSamples(samples, weights[samples], loads.sizes[samples], key, base, begin, end)


def _excess_samples(loads: RankLoads, ranks: Bools, excess: Floats, weights: Floats) -> Ints:
    """Return samples of overloaded ranks whose weights cover the excess, with few tokens.

    Each rank gives up the largest samples that fit into what is left of its excess, and ends with one that covers the
    rest, at the point where that takes the fewest tokens.
    """
    left = excess[ranks].copy()
    held = _sorted_samples(loads, ranks, weights, float(left.max()))
    weight_sums, token_sums = (np.concatenate([[0.0], np.cumsum(values)]) for values in (held.weights, held.tokens))
    tokens_per_weight = token_sums[-1] / weight_sums[-1]
    spent, top = np.zeros(len(left)), held.end.copy()
    fewest, last, last_after = np.full(len(left), np.inf), np.full(len(left), -1), np.zeros(len(left), dtype=np.int64)
    runs: list[tuple[Ints, Ints, Ints]] = []
    active = np.arange(len(left))
    while len(active):
        covering = np.searchsorted(held.key, held.base[active] + left[active])
        at = np.minimum(covering, len(held.key) - 1)
        overshoot = held.weights[at] - left[active]
        tokens = spent[active] + held.tokens[at] + tokens_per_weight * overshoot
        better = (covering < top[active]) & (tokens < fewest[active])
        row = active[better]
        fewest[row], last[row], last_after[row] = tokens[better], at[better], len(runs)
        end = np.minimum(covering, top[active])
        begin = np.maximum(np.searchsorted(weight_sums, weight_sums[end] - left[active]), held.begin[active])
        fits = begin < end
        active, begin, end = active[fits], begin[fits], end[fits]
        runs.append((active, begin, end))
        left[active] -= weight_sums[end] - weight_sums[begin]
        spent[active] += token_sums[end] - token_sums[begin]
        top[active] = begin
        active = active[(left[active] > 0) & (spent[active] < fewest[active])]
    covered = (left <= 0) & (spent <= fewest)
    last_after[covered] = len(runs)
    given = [last[~covered & (last >= 0)]]
    for number, (row, begin, end) in enumerate(runs):
        kept = number < last_after[row]
        given.append(ranges(begin[kept], end[kept]))
    return held.samples[np.concatenate(given)]


def ranges(begin: Ints, end: Ints) -> Ints:
    """Return the numbers of all ranges [begin, end)."""
    lengths = end - begin
    return np.repeat(begin - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())


def _place(loads: RankLoads, removed: Ints) -> None:
    """Put samples on the ranks with most room: of their source host if they fit there, else of all."""
    problem = loads.problem
    removed = loads.largest_first(removed)
    loads.remove(removed)
    if loads.many_hosts:
        source_host, rejected = problem.hosts[problem.source_rank[removed]], []
        for host in np.unique(source_host):
            ranks = np.flatnonzero(problem.hosts == host)
            rejected.append(_place_largest_first(loads, removed[source_host == host], ranks, must_fit=True))
        removed = loads.largest_first(np.concatenate(rejected))
    _place_largest_first(loads, removed, np.arange(problem.world_size), must_fit=False)


def _place_largest_first(loads: RankLoads, samples: Ints, ranks: Ints, *, must_fit: bool) -> Ints:
    """Place samples, which are in descending order of cost, on some ranks. Return those that do not fit.

    In each turn the i-th sample goes to the i-th roomiest rank, as far as that has nearly as much room as the first.
    Without `must_fit`, a sample that fits nowhere goes to the roomiest rank that can hold its tokens.
    """
    rejected, limited = [], loads.max_tokens < math.inf
    while len(samples):
        time.sleep(0)
        head = samples[: len(ranks)]
        costs, room = loads.costs[head], loads.room[ranks]
        if limited:
            is_full = loads.tokens[ranks] + loads.sizes[head[0]] > loads.max_tokens
            order = np.lexsort((-room, is_full))
        else:
            order = np.argsort(-room, kind="stable")
        roomiest, room = ranks[order], room[order]
        fits = (costs <= room[: len(head)]) & (room[: len(head)] >= _least_room(room[0], costs[0]))
        if limited:
            fits &= loads.tokens[roomiest[: len(head)]] + loads.sizes[head] <= loads.max_tokens
        count = _leading(fits)
        if count == 0 and must_fit:
            unfit = loads.costs[samples] > room[0]
            unfit[0] = True
            rejected.append(samples[unfit])
            samples = samples[~unfit]
            continue
        if count == 0:
            count = 1 if limited else max(1, _leading(costs > room[0]))
        each = 1 if limited else max(1, int(_SHARE_OF_ROOM * room[count - 1] / max(costs[0], 1.0)))
        taken, samples = samples[: count * each], samples[count * each :]
        loads.put(taken, roomiest[np.arange(len(taken)) % count])
    return np.concatenate([samples, *rejected])


def _leading(values: Bools) -> int:
    """Return how many values are true before the first that is not."""
    return len(values) if values.all() else int(np.argmin(values))


def _least_room(largest_room: float, largest_cost: float) -> float:
    """Return the room of a rank that is still served in the same turn as the roomiest one."""
    return min(largest_room - largest_cost, _NEARLY_ROOMIEST * largest_room)


def equalize_counts(loads: RankLoads) -> None:
    """Make the sample counts of all ranks equal, give or take one: ranks with too many give their cheapest samples."""
    world_size = loads.problem.world_size
    counts = np.bincount(loads.rank, minlength=world_size)
    each, one_more = divmod(len(loads.rank), world_size)
    target_counts = np.full(world_size, each)
    target_counts[np.argsort(-counts, kind="stable")[:one_more]] += 1
    surplus = counts - target_counts
    samples = loads.by_rank(surplus > 0)
    rank = loads.rank[samples]
    position = np.arange(len(samples)) - np.searchsorted(rank, rank)
    removed = samples[position < surplus[rank]]
    removed = loads.largest_first(removed)
    loads.remove(removed)
    missing = np.maximum(-surplus, 0)
    vacant = np.repeat(np.arange(world_size), missing)
    turn = np.arange(len(vacant)) - np.searchsorted(vacant, vacant)
    loads.put(removed, vacant[np.lexsort((-loads.room[vacant], turn))])


def trade_for_cheapest(loads: RankLoads) -> None:
    """Swap samples of overloaded ranks, largest first, for the cheapest ones of ranks with room.

    With equal counts, the rank of a very long sample can end in time only if its other samples are the cheapest.
    """
    costs, sizes, ascending = loads.costs, loads.sizes, loads.problem.ascending
    for rank in np.argsort(loads.room, kind="stable")[: np.count_nonzero(loads.room < 0)]:
        time.sleep(0)
        holder = loads.rank[ascending]
        own, others = ascending[holder == rank][::-1], ascending[loads.room[holder] > 0]
        if not len(others):
            return
        own = own[costs[own] <= costs[others[0]] + loads.room.max()][: len(others)]
        others = _roomiest_first(loads, others[costs[others] <= costs[others[len(own) - 1]]])[: len(own)]
        donor, gain = loads.rank[others], costs[own] - costs[others]
        fits = (gain > 0) & (_running_sums(donor, gain) <= loads.room[donor])
        if loads.max_tokens < math.inf:
            spare = loads.max_tokens - loads.tokens
            fits &= _running_sums(donor, np.maximum(sizes[own] - sizes[others], 0)) <= spare[donor]
        count = np.searchsorted(np.cumsum(gain[fits]), -loads.room[rank]) + 1
        own, others, donor = own[fits][:count], others[fits][:count], donor[fits][:count]
        loads.move(np.concatenate([own, others]), np.concatenate([donor, np.full(len(others), rank)]))


def _roomiest_first(loads: RankLoads, samples: Ints) -> Ints:
    """Order samples by cost, and those of equal cost rank by rank in turn, beginning with the rank with most room."""
    rank = loads.rank[samples]
    turn = _running_sums(rank, np.ones(len(samples)))
    return samples[np.lexsort((-loads.room[rank], turn, loads.costs[samples]))]


def _running_sums(group: Ints, values: Floats | Ints) -> Floats:
    """Return at each position the sum of its group so far."""
    order = np.argsort(group, kind="stable")
    sums, begins = np.cumsum(values[order]), np.searchsorted(group[order], group[order])
    running = np.empty(len(values))
    running[order] = sums - sums[begins] + values[order][begins]
    return running
