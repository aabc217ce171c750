"""Every instant of every rank's step under exactly one cause. Pure.

What counts, in this order: compute that is really going on; a wait for a collective, split at the moment when the last
rank arrived (before it *straggler*, after it that traffic); traffic in flight while nothing is computed; waiting for
data; host work; else idle. Traffic behind compute costs nothing and is counted as hidden.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from freescale.bubbles.events import CAUSES, COMPUTE, TRAFFIC, RankStep

# Who may claim an instant, the strongest first: a claim is a bit, and the lowest bit that is set wins.
_CLAIMS = (*COMPUTE, "straggler", *TRAFFIC, "straggler", *TRAFFIC, "data", "host", "idle")
_WAITED, _UNDER_WAY = len(COMPUTE), len(COMPUTE) + 1 + len(TRAFFIC)
_IDLE = len(_CLAIMS) - 1
# And what is true of an instant beside that: a wait goes on; traffic of each kind is in flight.
_WAITING, _FLIGHT = len(_CLAIMS), len(_CLAIMS) + 1
_SPENT = {claim: bit for bit, claim in enumerate(_CLAIMS)}
_SENT = {kind: place for place, kind in enumerate(TRAFFIC)}
_COMPUTE_MASK = (1 << len(COMPUTE)) - 1


class Ledger(NamedTuple):
    """Nanoseconds of one rank's step by cause, and of traffic that was hidden behind compute."""

    rank: int
    step: int
    causes: tuple[int, ...]
    """In the order of CAUSES; they add up to the step."""
    hidden: tuple[int, ...]
    """In the order of TRAFFIC; over and above the step."""
    in_flight: int
    """How long any traffic was under way, hidden or not."""
    overlapped: int
    """How long any was hidden: less than the sum of `hidden` where several kinds were under way at once."""

    @property
    def wall(self) -> int:
        """How long the step took."""
        return sum(self.causes)

    def cause_ns(self, cause: str) -> int:
        """What one cause took."""
        return self.causes[CAUSES.index(cause)]


def last_arrivals(ranks: Iterable[RankStep]) -> dict[str, int]:
    """When the last rank came to each collective, on one clock for all."""
    found: dict[str, int] = {}
    for rank in ranks:
        for transfer in rank.transfers:
            found[transfer.name] = max(found.get(transfer.name, transfer.arrived), transfer.arrived)
    return found


class Segment(NamedTuple):
    """A while of a step in which nothing changes."""

    begin: int
    end: int
    cause: str
    computing: bool
    flying: int
    """Which kinds of traffic are in flight: a bit each, in the order of TRAFFIC."""


def account(step: RankStep, last: Mapping[str, int]) -> Ledger:
    """Share out one rank's step. `last`: when the last rank arrived at each collective."""
    causes, in_flight = dict.fromkeys(CAUSES, 0), 0
    behind: dict[int, int] = {}  # by which kinds were under way behind compute
    for begin, end, cause, computing, flying in segments(step, last):
        causes[cause] += end - begin
        if flying:
            in_flight += end - begin
            if computing:
                behind[flying] = behind.get(flying, 0) + end - begin
    hidden = tuple(sum(time for kinds, time in behind.items() if kinds >> kind & 1) for kind in range(len(TRAFFIC)))
    return Ledger(step.rank, step.step, (*causes.values(),), hidden, in_flight, sum(behind.values()))


def compute_ns(step: RankStep) -> int:
    """How long a rank computed. Whom it waited for does not matter here."""
    pieces = segments(step, {transfer.name: transfer.arrived for transfer in step.transfers})
    return sum(piece.end - piece.begin for piece in pieces if piece.computing)


def segments(step: RankStep, last: Mapping[str, int]) -> Iterator[Segment]:
    """A step from its begin to its end, piece by piece.

    A sweep over everything that begins or ends, in plain Python: a step has a few dozen of those, and this runs on
    every rank after every step.
    """
    going_on, true, then = [0] * (_FLIGHT + len(TRAFFIC)), 1 << _IDLE, step.begin
    for now, bit, change in [*_edges(step, last), (step.end, _IDLE, 0)]:
        if now > then:
            claims = true & ~_COMPUTE_MASK if true >> _WAITING & 1 else true  # waiting in a backward pass is no compute
            computing = claims & _COMPUTE_MASK > 0
            strongest = (claims & -claims).bit_length() - 1
            yield Segment(then, now, _CLAIMS[strongest], computing, true >> _FLIGHT)
            then = now
        going_on[bit] += change
        true = true | 1 << bit if going_on[bit] or bit == _IDLE else true & ~(1 << bit)


def ledgers(ranks: Sequence[RankStep]) -> list[Ledger]:
    """Share out one step of all ranks, whose clocks are aligned."""
    last = last_arrivals(ranks)
    return [account(rank, last) for rank in ranks]


def _edges(step: RankStep, last: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Where each claim begins and ends within the step, in order: (moment, bit, +1 or -1)."""
    begin, end, edges = step.begin, step.end, []
    for low, high, bit in _intervals(step, last):
        low, high = low if low > begin else begin, high if high < end else end
        if low < high:
            edges += ((low, bit, 1), (high, bit, -1))
    edges.sort()
    return edges


def _intervals(step: RankStep, last: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    for span in step.spans:
        yield span.begin, span.end, _SPENT[span.kind]
        if span.kind in _SENT:  # nothing but a wait is of such a kind
            yield span.begin, span.end, _WAITING
    for transfer in step.transfers:
        kind, come, arrived, done = _SENT[transfer.kind], last[transfer.name], transfer.arrived, transfer.done
        yield arrived, done, _FLIGHT + kind
        if transfer.independent:  # behind the step: it holds the rank up only where that waits for a batch
            late = [span for span in step.spans if span.kind == "data"]
            yield from ((max(s.begin, arrived), min(s.end, done), _UNDER_WAY + 1 + kind) for s in late)
            continue
        yield arrived, min(done, come), _UNDER_WAY
        yield max(arrived, come), done, _UNDER_WAY + 1 + kind
        for begin, end in transfer.waits:
            yield begin, end, _WAITING
            yield begin, min(end, come), _WAITED
            yield max(begin, come), end, _WAITED + 1 + kind
