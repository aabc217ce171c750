"""What is recorded of a step: intervals on one rank, in whole nanoseconds of one clock. Pure.

Whole numbers, so that the parts of a step add up to it exactly.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

COMPUTE = ("forward", "backward", "optimizer")
TRAFFIC = ("samples", "ids", "urgent rows", "deferred rows", "row gradients", "dense gradients", "other traffic")
CAUSES = (*COMPUTE, "straggler", *TRAFFIC, "data", "host", "idle")
"""Every instant of a rank's step is one of these. Of traffic, only what is exposed."""


@dataclass(frozen=True)
class Span:
    """Something that a rank did for a while: a kind of compute, `data` (waiting for a batch) or `host`."""

    kind: str
    begin: int
    end: int


@dataclass(frozen=True)
class Transfer:
    """One collective as one rank saw it."""

    kind: str
    name: str
    """The same on all ranks, and of no other collective in the step."""
    arrived: int
    """When this rank was ready for it."""
    done: int
    waits: tuple[tuple[int, int], ...] = ()
    """When this rank could do nothing but wait for it."""


@dataclass(frozen=True)
class RankStep:
    """One step of one rank."""

    rank: int
    step: int
    begin: int
    end: int
    spans: tuple[Span, ...] = ()
    transfers: tuple[Transfer, ...] = field(default=())

    def shifted(self, by: int) -> "RankStep":
        """The same on a clock that shows so much more."""
        return RankStep(
            self.rank,
            self.step,
            self.begin + by,
            self.end + by,
            tuple(Span(s.kind, s.begin + by, s.end + by) for s in self.spans),
            tuple(
                Transfer(t.kind, t.name, t.arrived + by, t.done + by, tuple((b + by, e + by) for b, e in t.waits))
                for t in self.transfers
            ),
        )


def covered(intervals: Iterable[tuple[int, int]], points: Ints) -> NDArray[np.bool_]:
    """Which of the segments between consecutive points any interval covers. All ends must be among the points."""
    change = np.zeros(len(points), dtype=np.int64)
    found = np.array([pair for pair in intervals if pair[0] < pair[1]], dtype=np.int64).reshape(-1, 2)
    np.add.at(change, np.searchsorted(points, found[:, 0]), 1)
    np.add.at(change, np.searchsorted(points, found[:, 1]), -1)
    return np.cumsum(change)[:-1] > 0
