"""Every instant of every rank's step under exactly one cause. Pure.

What counts, in this order: compute that is really going on; a wait for a collective, split at the moment when the last
rank arrived (before it *straggler*, after it that traffic); traffic in flight while nothing is computed; waiting for
data; host work; else idle. Traffic behind compute costs nothing and is counted as hidden.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freescale.bubbles.events import CAUSES, COMPUTE, TRAFFIC, Ints, RankStep, Transfer, covered

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Ledger:
    """Nanoseconds of one rank's step by cause, and of traffic that was hidden behind compute."""

    rank: int
    step: int
    causes: Ints
    """In the order of CAUSES; they add up to the step."""
    hidden: Ints
    """In the order of TRAFFIC; over and above the step."""

    @property
    def wall(self) -> int:
        """How long the step took."""
        return int(self.causes.sum())

    def __getitem__(self, cause: str) -> int:
        return int(self.causes[CAUSES.index(cause)])


def last_arrivals(ranks: Iterable[RankStep]) -> dict[str, int]:
    """When the last rank came to each collective, on one clock for all."""
    found: dict[str, int] = {}
    for rank in ranks:
        for transfer in rank.transfers:
            found[transfer.name] = max(found.get(transfer.name, transfer.arrived), transfer.arrived)
    return found


def account(step: RankStep, last: Mapping[str, int]) -> Ledger:
    """Share out one rank's step. `last`: when the last rank arrived at each collective."""
    line = _Line(step, last)
    length = np.diff(line.points)
    free = np.ones(len(length), dtype=bool)
    causes = np.zeros(len(CAUSES), dtype=np.int64)
    for cause, claimed in _claims(line):
        causes[CAUSES.index(cause)] += length[free & claimed].sum()
        free &= ~claimed
    computed = np.logical_or.reduce([line.computed(kind) for kind in COMPUTE])
    hidden = [length[computed & line.in_flight(kind)].sum() for kind in TRAFFIC]
    return Ledger(step.rank, step.step, causes, np.array(hidden, dtype=np.int64))


def ledgers(ranks: Sequence[RankStep]) -> list[Ledger]:
    """Share out one step of all ranks, whose clocks are aligned."""
    last = last_arrivals(ranks)
    return [account(rank, last) for rank in ranks]


def straggler_percent(of_ranks: Sequence[Ledger]) -> float:
    """Mean time that ranks stand idle for slower ones, over the time of the iteration."""
    iteration = max(ledger.wall for ledger in of_ranks)
    return 100.0 * float(np.mean([ledger["straggler"] for ledger in of_ranks])) / max(1, iteration)


class _Line:
    """A step cut into segments in which nothing begins or ends, and what goes on in each."""

    def __init__(self, step: RankStep, last: Mapping[str, int]) -> None:
        self._step, self._last = step, last
        ends = [end for span in step.spans for end in (span.begin, span.end)]
        for transfer in step.transfers:
            ends += [transfer.arrived, transfer.done, last[transfer.name], *sum(transfer.waits, ())]
        inside = np.clip(np.array([step.begin, step.end, *ends], dtype=np.int64), step.begin, step.end)
        self.points = np.unique(inside)
        self._waiting = self._during(pair for transfer in step.transfers for pair in transfer.waits)

    def spent(self, kind: str) -> Mask:
        return self._during((span.begin, span.end) for span in self._step.spans if span.kind == kind)

    def computed(self, kind: str) -> Mask:
        """Waiting inside a backward pass is not computing."""
        return self.spent(kind) & ~self._waiting

    def in_flight(self, kind: str) -> Mask:
        return self._during((t.arrived, t.done) for t in self._step.transfers if t.kind == kind)

    def straggler(self, *, waited: bool) -> Mask:
        """A collective is under way and a rank has not come to it yet."""
        pairs = ((t, pair) for t in self._step.transfers for pair in _pairs(t, waited))
        return self._during((begin, min(end, self._last[t.name])) for t, (begin, end) in pairs)

    def traffic(self, kind: str, *, waited: bool) -> Mask:
        """Everyone has come, and data moves."""
        pairs = ((t, pair) for t in self._step.transfers if t.kind == kind for pair in _pairs(t, waited))
        return self._during((max(begin, self._last[t.name]), end) for t, (begin, end) in pairs)

    def _during(self, pairs: Iterable[tuple[int, int]]) -> Mask:
        low, high = self._step.begin, self._step.end
        return covered(((max(begin, low), min(end, high)) for begin, end in pairs), self.points)


def _claims(line: _Line) -> Iterator[tuple[str, Mask]]:
    """Who claims which segments, the strongest claim first."""
    for kind in COMPUTE:
        yield kind, line.computed(kind)
    for waited in (True, False):
        yield "straggler", line.straggler(waited=waited)
        for kind in TRAFFIC:
            yield kind, line.traffic(kind, waited=waited)
    for kind in ("data", "host"):
        yield kind, line.spent(kind)
    yield "idle", np.ones(len(line.points) - 1, dtype=bool)


def _pairs(transfer: Transfer, waited: bool) -> Sequence[tuple[int, int]]:
    return transfer.waits if waited else ((transfer.arrived, transfer.done),)
