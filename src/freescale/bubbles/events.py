"""Events of a step: spans and transfers of one rank, in integer nanoseconds of one clock. Pure.

Integers make the parts of a step add up exactly. Tuples are cheap: every step creates dozens.
"""

from collections.abc import Iterable
from typing import NamedTuple

COMPUTE = ("forward", "backward", "optimizer")
TRAFFIC = ("samples", "ids", "urgent rows", "deferred rows", "row gradients", "dense gradients", "other traffic")
CAUSES = (*COMPUTE, "straggler", *TRAFFIC, "data", "host", "idle")
"""Every instant of a rank's step has one of these causes. Traffic counts only where it is exposed."""


class Span(NamedTuple):
    """An activity of a rank: a kind of compute, `data` (wait for a batch), `host`, or a wait for background traffic."""

    kind: str
    begin: int
    end: int


class Transfer(NamedTuple):
    """A collective, as seen by one rank."""

    kind: str
    name: str
    """The same on all ranks, and unique in the step."""
    arrived: int
    """When this rank entered it."""
    done: int
    waits: tuple[tuple[int, int], ...] = ()
    """When this rank blocked on it."""
    independent: bool = False
    """Whether arrivals of other ranks do not matter: a one-sided copy, or a transfer in the background of the step."""
    size: int = 0
    """Bytes that this rank sends, if known."""


def merge_intervals(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of intervals as disjoint intervals, in order."""
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
    """Cost of this rank's batch by the cost model, in its unit; 0 without one."""

    def shifted(self, by: int) -> "RankStep":
        """Return the step with all times shifted."""
        spans = tuple(Span(s.kind, s.begin + by, s.end + by) for s in self.spans)
        transfers = tuple(
            t._replace(arrived=t.arrived + by, done=t.done + by, waits=tuple((b + by, e + by) for b, e in t.waits))
            for t in self.transfers
        )
        return self._replace(begin=self.begin + by, end=self.end + by, spans=spans, transfers=transfers)
