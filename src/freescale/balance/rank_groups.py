"""Divides ranks into groups that place their samples separately, and decides what groups give to each other. Pure.

The more ranks there are, the longer each of them plans a step. Beyond a bound, samples are placed inside groups of
whole hosts. Groups of some hundred ranks hold so many samples that they are nearly equal, so little has to move between
them: what a group has above the mean and a part of the tolerance. All ranks know only the sum of each group.

Sums that decide are taken one by one, not pairwise, so every machine computes the same from the same sums bitwise.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from freescale.balance.placement import Floats, Ints

_GOLDEN = 0.6180339887498949
_SHARE_BETWEEN = 0.25
"""Of the tolerance, between groups. A plan with less of it inside of a group takes longer and moves more."""


@dataclass(frozen=True)
class RankGroups:
    """The group of each rank, and which ranks of different groups exchange samples."""

    group: Ints
    """Of each rank."""

    @staticmethod
    def of_hosts(hosts: Ints, most: int) -> "RankGroups":
        """Divide ranks into groups of whole hosts, in their order, of about equal size and about `most` ranks.

        A host with more ranks than that is a group by itself. With at most `most` ranks there is one group.
        """
        groups = -(-len(hosts) // most)
        _, first, host, sizes = np.unique(hosts, return_index=True, return_inverse=True, return_counts=True)
        order, middle = np.argsort(first, kind="stable"), np.empty(len(sizes))
        middle[order] = np.cumsum(sizes[order]) - sizes[order] / 2
        group = np.minimum((middle * groups / len(hosts)).astype(np.int64), groups - 1)[host.ravel()]
        return RankGroups(np.unique(group, return_inverse=True)[1].ravel())

    @cached_property
    def sizes(self) -> Ints:
        """The number of ranks of each group."""
        return np.bincount(self.group)

    @cached_property
    def place(self) -> Ints:
        """The place of each rank in its group."""
        place = np.empty(len(self.group), dtype=np.int64)
        place[self._by_group] = np.arange(len(place)) - self._first[self.group[self._by_group]]
        return place

    def members(self, group: int) -> Ints:
        """Return the ranks of a group."""
        return self._by_group[self._first[group] : self._first[group] + self.sizes[group]]

    @cached_property
    def columns(self) -> list[Ints]:
        """The ranks that exchange sums and samples between groups: each column has about one rank of every group."""
        column = self.place % self.sizes.min()
        return [np.flatnonzero(column == number) for number in range(int(self.sizes.min()))]

    def column(self, rank: int) -> Ints:
        """Return the column of a rank."""
        return self.columns[self.place[rank] % len(self.columns)]

    def partners(self, rank: int) -> Ints:
        """Return the rank of each group that takes the samples that this rank gives to the group."""
        turn, column = divmod(int(self.place[rank]), len(self.columns))
        in_column = -(-(self.sizes - column) // len(self.columns))
        place = column + len(self.columns) * (turn % in_column)
        return self._by_group[self._first + place]

    @cached_property
    def _by_group(self) -> Ints:
        """The ranks, group by group, ascending."""
        return np.argsort(self.group, kind="stable")

    @cached_property
    def _first(self) -> Ints:
        """The place of each group among them."""
        return np.cumsum(self.sizes) - self.sizes


def transfers_between(work: Floats, capacity: Floats, tolerance: float) -> Floats:
    """Return how much work each group gives to each other one, [groups, groups]. `tolerance`: `tolerance_between`.

    A group above the mean by more than the tolerance gives what is above; the least loaded groups take it.
    """
    limit = _sum(work) / max(_sum(capacity), 1e-300) * (1.0 + tolerance)
    given = np.maximum(work - limit * capacity, 0.0)
    if _sum(given) <= 0.0:
        return np.zeros((len(work), len(work)))
    taken = above_level(-work, capacity, _sum(given))
    given_end, taken_end = np.cumsum(given), np.cumsum(taken)
    end = np.minimum(given_end[:, None], taken_end)
    return np.maximum(end - np.maximum((given_end - given)[:, None], taken_end - taken), 0.0)


def tolerance_between(tolerance: float) -> float:
    """Return how far groups may be above the mean. Most of the tolerance is left for the ranks of such a group."""
    return _SHARE_BETWEEN * tolerance


def tolerance_inside(tolerance: float, mean: float, group_mean: float) -> float:
    """Return how far ranks may be above the mean of their group, to end within the tolerance of the mean of all.

    A group with little work may be less even, and moves less.
    """
    return (
        max((1.0 + tolerance) * mean / group_mean - 1.0, (1.0 - _SHARE_BETWEEN) * tolerance)
        if group_mean > 0
        else tolerance
    )


def above_level(values: Floats, capacity: Floats, amount: float) -> Floats:
    """Return what each value has above a level in proportion to capacity, which leaves `amount` above it."""
    ratio = values / capacity
    order = np.argsort(-ratio, kind="stable")
    levels = (np.cumsum(values[order]) - amount) / np.cumsum(capacity[order])
    level = levels[np.argmax(levels >= np.append(ratio[order][1:], -np.inf))]
    return np.maximum(values - level * capacity, 0.0)


def samples_to_give(costs: Floats, work: Floats, *, place: int, given: Floats) -> tuple[Ints, Ints]:
    """Return the samples that a rank gives to other groups, and the group of each.

    costs: of this rank's samples. work: of the ranks of its group, in which it has this place. given: what the group
    gives to each other one. The most loaded ranks give, since they would have to give inside the group too: each its
    largest samples that fit, which carry more work per token than short ones. The smallest sample left follows if it is
    little larger than the rest: by a threshold that is spread evenly over the ranks, so that a group gives neither more
    nor less in the mean.
    """
    end = np.cumsum(above_level(work, np.ones(len(work)), _sum(given)))
    begin = float(end[place - 1]) if place else 0.0
    chosen, others, left = list[int](), list[int](), float(end[place]) - begin
    for sample in np.argsort(-costs, kind="stable").tolist() if left > 0 else ():
        fits = costs[sample] <= left
        (chosen if fits else others).append(sample)
        left -= float(costs[sample]) * fits
    if others and left > (place * _GOLDEN % 1.0) * costs[others[-1]]:
        chosen.append(others[-1])
    samples = np.array(chosen, dtype=np.int64)
    middle = begin + np.cumsum(costs[samples]) - costs[samples] / 2
    group = np.searchsorted(np.cumsum(given), middle, side="right")
    return samples, np.minimum(group, np.flatnonzero(given > 0).max(initial=0))


def give_between_groups(costs: Floats, source_rank: Ints, groups: RankGroups, tolerance: float) -> Ints:
    """Return the rank that holds each sample after all groups have given theirs: what the ranks do together.

    tolerance: `tolerance_between`.
    """
    world_size, held_by = len(groups.group), source_rank.copy()
    work = np.bincount(source_rank, weights=costs, minlength=world_size).astype(np.float64)
    of_groups = np.bincount(groups.group, weights=work).astype(np.float64)
    transfers = transfers_between(of_groups, groups.sizes.astype(np.float64), tolerance)
    by_rank = np.argsort(source_rank, kind="stable")
    begin = np.searchsorted(source_rank[by_rank], np.arange(world_size + 1))
    for number in np.flatnonzero(transfers.any(axis=1)).tolist():
        members = groups.members(number)
        for place, rank in enumerate(members.tolist()):
            own = by_rank[begin[rank] : begin[rank + 1]]
            given, to = samples_to_give(costs[own], work[members], place=place, given=transfers[number])
            if len(given):
                held_by[own[given]] = groups.partners(rank)[to]
    return held_by


def _sum(values: Floats) -> float:
    return float(np.cumsum(values)[-1])
