"""Every instant of every rank's step under exactly one cause. Pure.

What counts, in this order: compute that is really going on; a wait for a collective, split at the moment when the last
rank arrived (before it *straggler*, after it that traffic); traffic in flight while nothing is computed; waiting for
data; host work; else idle. Traffic behind compute costs nothing and is counted as hidden.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from freescale.bubbles.events import CAUSES, COMPUTE, TRAFFIC, Ints, RankStep

# Who may claim an instant, the strongest first: a claim is a bit, and the lowest bit that is set wins.
_CLAIMS = (*COMPUTE, "straggler", *TRAFFIC, "straggler", *TRAFFIC, "data", "host", "idle")
_CAUSE = [CAUSES.index(claim) for claim in _CLAIMS]
_WAITED, _UNDER_WAY = len(COMPUTE), len(COMPUTE) + 1 + len(TRAFFIC)
_IDLE = len(_CLAIMS) - 1
# And what is true of an instant beside that: a wait goes on; traffic of each kind is in flight.
_WAITING, _FLIGHT = len(_CLAIMS), len(_CLAIMS) + 1
_COMPUTE_MASK = (1 << len(COMPUTE)) - 1


@dataclass(frozen=True)
class Ledger:
    """Nanoseconds of one rank's step by cause, and of traffic that was hidden behind compute."""

    rank: int
    step: int
    causes: Ints
    """In the order of CAUSES; they add up to the step."""
    hidden: Ints
    """In the order of TRAFFIC; over and above the step."""
    in_flight: int
    """How long any traffic was under way, hidden or not."""

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
    """Share out one rank's step. `last`: when the last rank arrived at each collective.

    A sweep over everything that begins or ends, in plain Python: a step has a few dozen of those, and this runs on
    every rank after every step.
    """
    causes, hidden, in_flight = [0] * len(CAUSES), [0] * len(TRAFFIC), 0
    going_on, true, then = [0] * (_FLIGHT + len(TRAFFIC)), 1 << _IDLE, step.begin
    for now, bit, change in [*sorted(_edges(step, last)), (step.end, _IDLE, 0)]:
        if now > then:
            flying = true >> _FLIGHT
            claims = true & ~_COMPUTE_MASK if true >> _WAITING & 1 else true  # waiting in a backward pass is no compute
            causes[_CAUSE[_lowest(claims)]] += now - then
            if flying:
                in_flight += now - then
                if claims & _COMPUTE_MASK:
                    hidden[_lowest(flying)] += now - then
            then = now
        going_on[bit] += change
        true = true | 1 << bit if going_on[bit] or bit == _IDLE else true & ~(1 << bit)
    return Ledger(step.rank, step.step, np.array(causes), np.array(hidden), in_flight)


def ledgers(ranks: Sequence[RankStep]) -> list[Ledger]:
    """Share out one step of all ranks, whose clocks are aligned."""
    last = last_arrivals(ranks)
    return [account(rank, last) for rank in ranks]


def straggler_percent(of_ranks: Sequence[Ledger]) -> float:
    """Mean time that ranks stand idle for slower ones, over the time of the iteration."""
    iteration = max(ledger.wall for ledger in of_ranks)
    return 100.0 * float(np.mean([ledger["straggler"] for ledger in of_ranks])) / max(1, iteration)


def overlap_percent(of_ranks: Sequence[Ledger]) -> float:
    """How much of the time that traffic is under way lies behind compute."""
    hidden = sum(int(ledger.hidden.sum()) for ledger in of_ranks)
    return 100.0 * hidden / max(1, sum(ledger.in_flight for ledger in of_ranks))


def _edges(step: RankStep, last: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """Where each claim begins and ends within the step: (moment, bit, +1 or -1)."""
    for begin, end, bit in _intervals(step, last):
        low, high = max(begin, step.begin), min(end, step.end)
        if low < high:
            yield low, bit, 1
            yield high, bit, -1


def _intervals(step: RankStep, last: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    for span in step.spans:
        yield span.begin, span.end, _CLAIMS.index(span.kind)
    for transfer in step.transfers:
        kind, come = TRAFFIC.index(transfer.kind), last[transfer.name]
        yield transfer.arrived, transfer.done, _FLIGHT + kind
        for begin, end in transfer.waits:
            yield begin, end, _WAITING
            yield begin, min(end, come), _WAITED
            yield max(begin, come), end, _WAITED + 1 + kind
        yield transfer.arrived, min(transfer.done, come), _UNDER_WAY
        yield max(transfer.arrived, come), transfer.done, _UNDER_WAY + 1 + kind


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
