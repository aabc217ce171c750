"""Plans the step of one group of ranks, and what the ranks of the group give to other groups. Uses no process group.

Ranks of a group gather a row of sums each; from these, each computes the row of its group, which the groups gather. The
rows also carry what the previous step reached, so that every rank reports the balance of all groups.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from freescale.balance.cost import Cost
from freescale.balance.placement import Floats, Ints, Placement
from freescale.balance.planner import Planner
from freescale.balance.rank_groups import (
    RankGroups,
    samples_to_give,
    tolerance_between,
    tolerance_inside,
    transfers_between,
)
from freescale.config import BalanceConfig


class GroupPlanner(Planner):
    """Plans each step of a group, identically on its ranks. What it reports is that of all groups."""

    def __init__(
        self,
        cost: Cost,
        rules: BalanceConfig,
        *,
        groups: RankGroups,
        rank: int,
        hosts: Ints,
        anchored: bool = False,
    ) -> None:
        self.groups, self.rank = groups, rank
        self._group = int(groups.group[rank])
        self.members = groups.members(self._group)
        """The ranks of this group."""
        self.hosts = hosts[self.members]
        """Their hosts."""
        super().__init__(cost, rules, world_size=len(self.members), hosts=self.hosts, anchored=anchored)
        self._ranks = groups.sizes.astype(np.float64)
        # A sample that changes groups would change their counts.
        self._between = np.inf if rules.counts == "equal" else tolerance_between(rules.tolerance)
        self._costs: Floats = np.zeros(0)
        self._tokens: Ints = np.zeros(0, dtype=np.int64)
        self._sent = 0.0
        """Tokens that this rank has given to other groups in the current step."""
        self._reached = np.zeros(2)
        """Of the previous step: work of the slowest rank of this group, and tokens that moved inside of it."""
        self._previous: tuple[float, float, float] | None = None
        """Of the last step whose rows were gathered: mean work, slowest rank over it before balancing, all tokens."""

    def __call__(self, lengths: Mapping[str, Ints], source_rank: Ints) -> Placement:
        """Place the samples of the group."""
        costs, tokens = self.sizes(lengths)
        mean = float(np.cumsum(np.append(costs, 0.0))[-1]) / self._ranks[self._group]
        overall = mean if self._previous is None else self._previous[0]
        tolerance = tolerance_inside(self._rules.tolerance, overall, mean)
        placement = self._place(costs, tokens, source_rank, tolerance=tolerance)
        slowest = placement.max_over_mean * mean
        self._reached = np.array([slowest, placement.moved_tokens * int(tokens.sum())])
        return placement

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the cost. Speeds are those of all ranks, which are known only without groups."""
        super().load_state_dict(state | {"speeds": None})

    def rank_row(self, lengths: Mapping[str, Ints]) -> Floats:
        """Return the sums of this rank's samples: work, tokens, and tokens sent to other groups in the last step."""
        self._costs, self._tokens = self.sizes(lengths)
        return np.array([self._costs.sum(), self._tokens.sum(), self._sent])

    def group_row(self, rank_rows: Floats) -> Floats:
        """Return the sums of this group from the rows of its ranks."""
        work, tokens, sent = rank_rows.T
        return np.array(
            [np.cumsum(work)[-1], tokens.sum(), work.max(), self._reached[0], self._reached[1] + sent.sum()]
        )

    def give(self, rank_rows: Floats, group_rows: Floats) -> tuple[Ints, Ints] | None:
        """Return the samples that this rank gives away, and the group of each; None if no rank gives any."""
        self._record(group_rows)
        transfers = transfers_between(group_rows[:, 0], self._ranks, self._between)
        given = transfers[self._group]
        samples = to = np.zeros(0, dtype=np.int64)
        if given.any():
            place = int(self.groups.place[self.rank])
            samples, to = samples_to_give(self._costs, rank_rows[:, 0], place=place, given=given)
        self._sent = float(self._tokens[samples].sum())
        return (samples, to) if transfers.any() else None

    def _record(self, group_rows: Floats) -> None:
        """Add the previous step to the report, which the rows complete, and keep what they say of this one."""
        work, tokens, largest, slowest, moved = group_rows.T
        if self._previous is not None:
            mean, before, total = self._previous
            self._sums += 1, before, float(slowest.max()) / mean if mean else 1.0, float(moved.sum()) / max(1.0, total)
        mean = float(work.sum() / self._ranks.sum())
        self._previous = mean, float(largest.max()) / mean if mean else 1.0, float(tokens.sum())
