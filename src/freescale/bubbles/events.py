"""What is recorded of a step: intervals on one rank, in whole nanoseconds of one clock. Pure.

Whole numbers, so that the parts of a step add up to it exactly. Tuples, because dozens are made in every step.
"""

from collections.abc import Iterable
from typing import NamedTuple

COMPUTE = ("forward", "backward", "optimizer")
TRAFFIC = ("samples", "ids", "urgent rows", "deferred rows", "row gradients", "dense gradients", "other traffic")
CAUSES = (*COMPUTE, "straggler", *TRAFFIC, "data", "host", "idle")
"""Every instant of a rank's step is one of these. Of traffic, only what is exposed."""


class Span(NamedTuple):
    """Something that a rank did for a while: a kind of compute, `data` (waiting for a batch), `host`, or waiting for
    traffic that goes on in a thread of its own.
    """

    kind: str
    begin: int
    end: int


class Transfer(NamedTuple):
    """One collective as one rank saw it."""

    kind: str
    name: str
    """The same on all ranks, and of no other collective in the step."""
    arrived: int
    """When this rank was ready for it."""
    done: int
    waits: tuple[tuple[int, int], ...] = ()
    """When this rank could do nothing but wait for it."""
    independent: bool = False
    """Whether no other rank's arrival matters: something is fetched, or it goes on behind the step."""
    size: int = 0
    """Bytes that this rank gave to it, if that is known."""


def merge_intervals(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same instants, in intervals that lie apart."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(merged.pop()[1], end)
        merged.append((begin, end))
    return merged


class RankStep(NamedTuple):
    """One step of one rank."""

    rank: int
    step: int
    begin: int
    end: int
    spans: tuple[Span, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    work: float = 0.0
    """What a cost model thinks of this rank's batch, in whatever it counts; 0 where there is none."""

    def shifted(self, by: int) -> "RankStep":
        """The same on a clock that shows so much more."""
        spans = tuple(Span(s.kind, s.begin + by, s.end + by) for s in self.spans)
        transfers = tuple(
            t._replace(arrived=t.arrived + by, done=t.done + by, waits=tuple((b + by, e + by) for b, e in t.waits))
            for t in self.transfers
        )
        return self._replace(begin=self.begin + by, end=self.end + by, spans=spans, transfers=transfers)
