"""What simulated ranks did, written down as `bubbles.recorder` would, and shared out by `bubbles.ledger`.

All ranks are simulated; the time of some of them is shared out.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freescale.bubbles import records
from freescale.bubbles.events import COMPUTE, RankStep, Span, Transfer
from freescale.bubbles.ledger import account
from freescale.bubbles.records import Interval

Floats = NDArray[np.float64]
_KEPT = 64
"""Ranks whose time is shared out."""
_RECENT = 64
"""Transfers that may still go on."""


@dataclass
class Sent:
    """A transfer as its ranks see it."""

    kind: str
    name: str
    arrived: Floats
    alone: bool
    """Behind the steps: nobody is asked who came last."""
    takes_cores: bool
    done: Floats | None = None
    waits: list[tuple[Floats, Floats]] = field(default_factory=list)

    @property
    def last(self) -> float:
        """When the last rank came."""
        return float(self.arrived.max())

    def seen_by(self, rank: int) -> Transfer:
        """As one rank would have recorded it."""
        assert self.done is not None
        waits = tuple((_ns(begin[rank]), _ns(end[rank])) for begin, end in self.waits if end[rank] > begin[rank])
        return Transfer(self.kind, self.name, _ns(self.arrived[rank]), _ns(self.done[rank]), waits, self.alone)


class Books:
    """Steps of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sent: list[Sent] = []
        self._spans: dict[int, list[tuple[str, Floats, Floats]]] = {}
        self._ends: dict[int, Floats] = {-1: np.zeros(ranks)}

    def note(self, step: int, cause: str, begin: Floats, end: Floats) -> None:
        """All ranks did something for a while."""
        self._spans.setdefault(step, []).append((cause, begin, end))

    def send(self, sent: Sent) -> None:
        """A transfer begins."""
        self._sent.append(sent)

    def end(self, step: int, at: Floats) -> None:
        """A step ends."""
        self._ends[step] = at

    def behind_traffic(self, step: int, now: float) -> float:
        """Of the compute of a step, on a middling rank: the share that had traffic beside it which takes cores."""
        rank = self._ranks // 2
        passes = [(begin[rank], end[rank]) for cause, begin, end in self._spans[step] if cause in COMPUTE]
        beside = sum(
            max(0.0, min(end, now if sent.done is None else sent.done[rank]) - max(begin, sent.last))
            for begin, end in passes
            for sent in self._sent[-_RECENT:]
            if sent.takes_cores
        )
        whole = sum(end - begin for begin, end in passes)
        return min(1.0, beside / whole) if whole else 0.0

    def shared_out(self, first: int, last: int) -> list[Interval]:
        """Where the time of some steps went."""
        return [self._interval(step) for step in range(first, last)]

    def _interval(self, step: int) -> Interval:
        some = np.unique(np.linspace(0, self._ranks - 1, min(self._ranks, _KEPT)).round().astype(int)).tolist()
        begin, end = self._ends[step - 1], self._ends[step]
        near = [sent for sent in self._sent if sent.arrived.min() < end.max() and self._lasts(sent, begin)]
        last = {sent.name: _ns(sent.last) for sent in near}
        total = np.zeros((len(some), len(records.COLUMNS)))
        for place, rank in enumerate(some):
            spans = tuple(Span(cause, _ns(low[rank]), _ns(high[rank])) for cause, low, high in self._spans[step])
            transfers = tuple(sent.seen_by(rank) for sent in near)
            done = RankStep(rank, step, _ns(begin[rank]), _ns(end[rank]), spans, transfers)
            total[place] = records.row(account(done, last))
        return records.interval(total, step=step, steps=1, ranks=len(some), clock_bound=0)

    @staticmethod
    def _lasts(sent: Sent, until: Floats) -> bool:
        assert sent.done is not None
        return bool(sent.done.max() > until.min())


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
