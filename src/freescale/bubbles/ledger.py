"""Attributes every instant of a rank's step to one cause. Pure.

Precedence: running compute; a blocking wait for a collective, split at the arrival of the last rank (before it
*straggler*, after it that traffic); traffic in flight without compute; waiting for data; host work; else idle. Traffic
overlapped with compute costs nothing and is counted as hidden.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from freescale.bubbles.events import CAUSES, COMPUTE, TRAFFIC, RankStep

# Causes by precedence. Each is a bit, and the lowest set bit wins.
_CLAIMS = (*COMPUTE, "straggler", *TRAFFIC, "straggler", *TRAFFIC, "data", "host", "idle")
_WAITED, _UNDER_WAY = len(COMPUTE), len(COMPUTE) + 1 + len(TRAFFIC)
_IDLE = len(_CLAIMS) - 1
# Further bits: a wait is active; traffic of each kind is in flight.
_WAITING, _FLIGHT = len(_CLAIMS), len(_CLAIMS) + 1
_SPENT = {claim: bit for bit, claim in enumerate(_CLAIMS)}
_SENT = {kind: place for place, kind in enumerate(TRAFFIC)}
_COMPUTE_MASK = (1 << len(COMPUTE)) - 1


class Ledger(NamedTuple):
    """Nanoseconds of one rank's step by cause, and of traffic hidden by compute."""

    rank: int
    step: int
    causes: tuple[int, ...]
    """In the order of CAUSES; they add up to the step."""
    hidden: tuple[int, ...]
    """In the order of TRAFFIC; in addition to the step."""
    in_flight: int
    """How long any traffic was in flight, hidden or not."""
    overlapped: int
    """How long any traffic was hidden: less than the sum of `hidden` where several kinds were in flight at once."""

    @property
    def wall(self) -> int:
        """Return the duration of the step."""
        return sum(self.causes)

    def cause_ns(self, cause: str) -> int:
        """Return the time of one cause."""
        return self.causes[CAUSES.index(cause)]


def last_arrivals(ranks: Iterable[RankStep]) -> dict[str, int]:
    """Return when the last rank entered each collective, on one clock."""
    last: dict[str, int] = {}
    for rank in ranks:
        for transfer in rank.transfers:
            last[transfer.name] = max(last.get(transfer.name, transfer.arrived), transfer.arrived)
    return last


class StepSegment(NamedTuple):
    """A part of a step with one cause throughout."""

    begin: int
    end: int
    cause: str
    computing: bool
    flying: int
    """The kinds of traffic in flight: a bit each, in the order of TRAFFIC."""


def account(step: RankStep, last: Mapping[str, int]) -> Ledger:
    """Attribute one rank's step to causes. `last`: when the last rank entered each collective."""
    causes, in_flight = dict.fromkeys(CAUSES, 0), 0
    hidden_by_kinds: dict[int, int] = {}  # keyed by the kinds in flight
    for begin, end, cause, computing, flying in segments(step, last):
        causes[cause] += end - begin
        if flying:
            in_flight += end - begin
            if computing:
                hidden_by_kinds[flying] = hidden_by_kinds.get(flying, 0) + end - begin
    overlaps = hidden_by_kinds.items()
    hidden = tuple(sum(time for kinds, time in overlaps if kinds >> kind & 1) for kind in range(len(TRAFFIC)))
    return Ledger(step.rank, step.step, (*causes.values(),), hidden, in_flight, sum(hidden_by_kinds.values()))


def compute_ns(step: RankStep) -> int:
    """Return how long a rank computed, whatever ranks it waited for."""
    pieces = segments(step, {transfer.name: transfer.arrived for transfer in step.transfers})
    return sum(piece.end - piece.begin for piece in pieces if piece.computing)


def segments(step: RankStep, last: Mapping[str, int]) -> Iterator[StepSegment]:
    """Yield the segments of a step, in order.

    Sweeps over all begins and ends in plain Python: a step has a few dozen, and this runs on every rank each step.
    """
    going_on, true, then = [0] * (_FLIGHT + len(TRAFFIC)), 1 << _IDLE, step.begin
    for now, bit, change in [*_edges(step, last), (step.end, _IDLE, 0)]:
        if now > then:
            claims = (
                true & ~_COMPUTE_MASK if true >> _WAITING & 1 else true
            )  # a wait inside the backward pass is not compute
            computing = claims & _COMPUTE_MASK > 0
            strongest = (claims & -claims).bit_length() - 1
            yield StepSegment(then, now, _CLAIMS[strongest], computing, true >> _FLIGHT)
            then = now
        going_on[bit] += change
        true = true | 1 << bit if going_on[bit] or bit == _IDLE else true & ~(1 << bit)


def ledgers(ranks: Sequence[RankStep]) -> list[Ledger]:
    """Attribute one step of all ranks to causes. Their clocks must be aligned."""
    last = last_arrivals(ranks)
    return [account(rank, last) for rank in ranks]


def _edges(step: RankStep, last: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Return the begins and ends of all claims within the step, in order: (time, bit, +1 or -1)."""
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
        if span.kind in _SENT:  # such a span is always a wait
            yield span.begin, span.end, _WAITING
    for transfer in step.transfers:
        kind, come, arrived, done = _SENT[transfer.kind], last[transfer.name], transfer.arrived, transfer.done
        yield arrived, done, _FLIGHT + kind
        if transfer.independent:  # in the background: it delays the rank only while that waits for a batch
            late = [span for span in step.spans if span.kind == "data"]
            yield from ((max(s.begin, arrived), min(s.end, done), _UNDER_WAY + 1 + kind) for s in late)
            continue
        yield arrived, min(done, come), _UNDER_WAY
        yield max(arrived, come), done, _UNDER_WAY + 1 + kind
        for begin, end in transfer.waits:
            yield begin, end, _WAITING
            yield begin, min(end, come), _WAITED
            yield max(begin, come), end, _WAITED + 1 + kind
