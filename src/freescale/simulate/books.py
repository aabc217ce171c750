"""What simulated ranks did, written down as `bubbles.recorder` would, and shared out by `bubbles.ledger`.

All ranks are simulated; the time of some of them is shared out.
"""

from dataclasses import dataclass, field

import numpy as np

from freescale.balance.placement import Floats
from freescale.bubbles import records
from freescale.bubbles.events import COMPUTE, RankStep, Span, Transfer
from freescale.bubbles.ledger import account

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

    def lasts(self, until: Floats) -> bool:
        """Whether some rank is not done with it when some rank comes to a moment."""
        assert self.done is not None
        return bool(self.done.max() > until.min())

    def seen_by(self, rank: int) -> Transfer:
        """As one rank would have recorded it."""
        assert self.done is not None
        waits = tuple((_ns(begin[rank]), _ns(end[rank])) for begin, end in self.waits if end[rank] > begin[rank])
        return Transfer(self.kind, self.name, _ns(self.arrived[rank]), _ns(self.done[rank]), waits, self.alone)


class Books:
    """Steps of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.sent: list[Sent] = []
        """Transfers that have begun."""
        self.ends: dict[int, Floats] = {-1: np.zeros(world_size)}
        """When each rank ended a step."""
        self._spans: dict[int, list[tuple[str, Floats, Floats]]] = {}

    def note(self, step: int, cause: str, begin: Floats, end: Floats) -> None:
        """All ranks did something for a while."""
        self._spans.setdefault(step, []).append((cause, begin, end))

    def behind_traffic(self, step: int, now: float) -> float:
        """Of the compute of a step, on a middling rank: the share that had traffic beside it which takes cores."""
        rank = self._world_size // 2
        passes = [(begin[rank], end[rank]) for cause, begin, end in self._spans[step] if cause in COMPUTE]
        recent = [sent for sent in self.sent[-_RECENT:] if sent.takes_cores]
        flights = [(sent.last, now if sent.done is None else sent.done[rank]) for sent in recent]
        beside = sum(max(0.0, min(end, done) - max(begin, last)) for begin, end in passes for last, done in flights)
        whole = sum(end - begin for begin, end in passes)
        return min(1.0, beside / whole) if whole else 0.0

    def shared_out(self, step: int) -> records.IntervalRecord:
        """Where the time of a step went."""
        some = np.unique(
            np.linspace(0, self._world_size - 1, min(self._world_size, _KEPT)).round().astype(int)
        ).tolist()
        begin, end = self.ends[step - 1], self.ends[step]
        near = [sent for sent in self.sent if sent.arrived.min() < end.max() and sent.lasts(begin)]
        last = {sent.name: _ns(sent.last) for sent in near}
        total = np.zeros((len(some), len(records.COLUMNS)))
        for place, rank in enumerate(some):
            spans = tuple(Span(cause, _ns(low[rank]), _ns(high[rank])) for cause, low, high in self._spans[step])
            transfers = tuple(sent.seen_by(rank) for sent in near)
            done = RankStep(rank, step, _ns(begin[rank]), _ns(end[rank]), spans, transfers)
            total[place] = records.ledger_row(account(done, last))
        return records.build_interval(total, step=step, steps=1, world_size=len(some), clock_bound=0)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
