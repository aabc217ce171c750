"""The timeline of simulated ranks: spans and transfers as `bubbles.recorder` would record them.

`bubbles.ledger` attributes the time of a subset of the simulated ranks.
"""

from dataclasses import dataclass, field

import numpy as np

from freescale.balance.placement import Floats
from freescale.bubbles import records
from freescale.bubbles.events import COMPUTE, RankStep, Span, Transfer
from freescale.bubbles.ledger import account

_ATTRIBUTED_RANKS = 64
_RECENT = 64  # transfers that may still be active


@dataclass
class SimulatedTransfer:
    """A transfer as its ranks see it."""

    kind: str
    name: str
    arrived: Floats
    alone: bool
    """Deferred: not attributed to a straggler."""
    uses_sms: bool
    done: Floats | None = None
    waits: list[tuple[Floats, Floats]] = field(default_factory=list)

    @property
    def last_arrival(self) -> float:
        """The arrival of the last rank."""
        return float(self.arrived.max())

    def lasts(self, until: Floats) -> bool:
        """Return whether some rank finishes it after some rank reaches `until`."""
        assert self.done is not None
        return bool(self.done.max() > until.min())

    def seen_by(self, rank: int) -> Transfer:
        """Return the record of one rank."""
        assert self.done is not None
        waits = tuple((_ns(begin[rank]), _ns(end[rank])) for begin, end in self.waits if end[rank] > begin[rank])
        return Transfer(self.kind, self.name, _ns(self.arrived[rank]), _ns(self.done[rank]), waits, self.alone)


class Timeline:
    """The spans, transfers and step ends of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.transfers: list[SimulatedTransfer] = []
        """Transfers that have begun."""
        self.ends: dict[int, Floats] = {-1: np.zeros(world_size)}
        """The end of each step, by rank."""
        self._spans: dict[int, list[tuple[str, Floats, Floats]]] = {}

    def add_span(self, step: int, cause: str, begin: Floats, end: Floats) -> None:
        """Add a span of all ranks."""
        self._spans.setdefault(step, []).append((cause, begin, end))

    def overlapped_share(self, step: int, now: float) -> float:
        """Return the share of a step's compute that overlaps with traffic that uses SMs, on the middle rank."""
        rank = self._world_size // 2
        passes = [(begin[rank], end[rank]) for cause, begin, end in self._spans[step] if cause in COMPUTE]
        recent = [transfer for transfer in self.transfers[-_RECENT:] if transfer.uses_sms]
        active = [(t.last_arrival, now if t.done is None else t.done[rank]) for t in recent]
        overlap = sum(max(0.0, min(end, done) - max(begin, last)) for begin, end in passes for last, done in active)
        total = sum(end - begin for begin, end in passes)
        return min(1.0, overlap / total) if total else 0.0

    def attribute(self, step: int) -> records.IntervalRecord:
        """Attribute the time of a step to causes."""
        count = min(self._world_size, _ATTRIBUTED_RANKS)
        ranks = np.unique(np.linspace(0, self._world_size - 1, count).round().astype(int)).tolist()
        begin, end = self.ends[step - 1], self.ends[step]
        near = [t for t in self.transfers if t.arrived.min() < end.max() and t.lasts(begin)]
        last = {transfer.name: _ns(transfer.last_arrival) for transfer in near}
        total = np.zeros((len(ranks), len(records.COLUMNS)))
        for place, rank in enumerate(ranks):
            spans = tuple(Span(cause, _ns(low[rank]), _ns(high[rank])) for cause, low, high in self._spans[step])
            transfers = tuple(transfer.seen_by(rank) for transfer in near)
            rank_step = RankStep(rank, step, _ns(begin[rank]), _ns(end[rank]), spans, transfers)
            total[place] = records.ledger_row(account(rank_step, last))
        return records.build_interval(total, step=step, steps=1, world_size=len(ranks), clock_bound=0)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
