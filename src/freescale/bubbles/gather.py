"""What the ranks tell each other about their steps: when the last of them came to each collective, and their sums.

Everything is asked for now and used later, when the answer has come long since. Two all-reduces of a fixed size, so
what is sent does not grow with the number of ranks.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from freescale.bubbles import records
from freescale.bubbles.events import RankStep
from freescale.bubbles.ledger import Ledger
from freescale.log import warning_once

SLOTS = 1024
"""Collectives that can be asked about at once."""


class Arrivals:
    """When did the last rank come to each collective?"""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._asked: tuple[list[RankStep], list[str], Tensor, dist.Work] | None = None
        self._last: dict[str, int] = {}
        """Of the step before: what it began may still be under way in the next one."""

    def ask(self, steps: list[RankStep]) -> None:
        """Ask about the collectives that these steps began. What was asked before must have been answered."""
        new = (t for step in steps for t in step.transfers if not t.alone and t.name not in self._last)
        mine = {t.name: t.arrived for t in new}
        if len(mine) > SLOTS - 2:
            warning_once(f"{len(mine)} collectives in {len(steps)} steps: who came last is known of {SLOTS - 2}")
        names = list(mine)[: SLOTS - 2]
        # The largest of a digest and of its negative are opposites only where all ranks speak of the same collectives.
        digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")
        told = [digest, -digest, *(mine[name] for name in names)]
        arrivals = torch.tensor(told + [0] * (SLOTS - len(told)))
        work = dist.all_reduce(arrivals, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._asked = steps, names, arrivals, work

    def answered(self) -> Iterator[tuple[RankStep, dict[str, int]]]:
        """Each step that was asked about, and when the last rank came to its collectives."""
        if self._asked is None:
            return
        (steps, names, arrivals, work), self._asked = self._asked, None
        work.wait()
        largest, least, *latest = arrivals.tolist()
        came = dict(zip(names, latest, strict=False))
        if largest != -least:
            came = {}
            warning_once("ranks came to different collectives in one step: nobody can say there who waited for whom")
        known = self._last | came
        for step in steps:
            self._last = {t.name: known.get(t.name, t.arrived) for t in step.transfers}
            yield step, self._last


class Sums:
    """Ledgers added up over steps, then over ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._world_size = group, group.rank(), group.size()
        self._sent: tuple[Tensor, dist.Work, int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self._own, self.steps = np.zeros(len(records.COLUMNS)), 0

    def add(self, ledger: Ledger) -> None:
        """Count a step of this rank."""
        self._own += records.row(ledger)
        self.steps += 1

    def send(self, step: int) -> None:
        """Add up over the ranks what was counted up to a step; counting begins anew."""
        table = torch.from_numpy(records.placed(self._own, self._rank, self._world_size))
        work = dist.all_reduce(table, group=self._group, async_op=True)
        assert work is not None
        self._sent = table, work, step, self.steps
        self._begin()

    def received(self, *, clock_bound: int) -> records.Interval | None:
        """What was sent and not yet received."""
        if self._sent is None:
            return None
        (table, work, step, steps), self._sent = self._sent, None
        work.wait()
        return records.interval(
            table.numpy(), step=step, steps=steps, world_size=self._world_size, clock_bound=clock_bound
        )
