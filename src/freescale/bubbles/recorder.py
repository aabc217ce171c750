"""Writes down what a rank does, cheaply enough to be always on. Marks become times when a finished step is read."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from freescale.bubbles.clock import Clock
from freescale.bubbles.events import CAUSES, TRAFFIC, RankStep, Span, Transfer
from freescale.bubbles.ring import Ring

T = TypeVar("T")
_KNOWN, _HOST = frozenset(CAUSES), Clock()


@dataclass
class CollectiveRecord:
    """A collective on its way. It may land on any thread."""

    clock: Clock
    kind: str
    name: str
    arrived: Any
    alone: bool
    size: int
    waited: Any = None
    """Since when the rank can do nothing but wait for it, if it does."""
    done: Any = None
    ends: Callable[[], None] | None = None
    """Is called when it is done."""

    def on_wait(self) -> None:
        """From here on this rank can do nothing but wait for it. A thread behind the step holds nothing up."""
        if self.waited is None and not self.alone:
            self.waited = self.clock.mark()

    def on_complete(self) -> None:
        """It is done."""
        if self.done is None:
            self.done = self.clock.mark()
            if self.ends is not None:
                self.ends()


@dataclass(frozen=True)
class Marks:
    """A step as it was written down, with marks instead of times."""

    step: int
    work: float
    begin: Any
    end: Any
    spans: list[tuple[str, Any, Any]]
    flights: list[CollectiveRecord]


class Recorder:
    """What this rank does, step by step."""

    def __init__(self, rank: int, clock: Clock | None = None, ring: Ring | None = None) -> None:
        """`ring`: keeps the last operations for whoever asks what a lost rank did."""
        self.rank, self.ahead = rank, 0
        """`ahead`: what to add to this rank's clock to get the one that all ranks share."""
        self._ring = ring
        self._clock = clock or Clock()
        self._kind, self._cuts = TRAFFIC[-1], 0
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Forget what was not yet cut off: the step begins now."""
        self._spans: list[tuple[str, Any, Any]] = []
        self._flights: list[CollectiveRecord] = []
        self._names: Counter[str] = Counter()
        self._begin: Any = self._clock.mark()

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Everything inside is of this cause. Of traffic: what is sent is, and packing it is host work."""
        if cause not in _KNOWN:
            raise ValueError(f"no cause is called '{cause}'; there are {', '.join(CAUSES)}")
        kind, before = cause, self._kind
        if cause in TRAFFIC:
            self._kind, kind = cause, "host"
        begin = self._clock.mark()
        self._note("in", cause)
        try:
            yield
        finally:
            self._spans.append((kind, begin, self._clock.mark()))
            self._kind = before
            self._note("out", cause)

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """This rank can do nothing but wait for something that goes on behind the step, in a thread of its own."""
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append((cause if cause in TRAFFIC else "host", begin, self._clock.mark()))

    def each(self, cause: str, values: Iterable[T]) -> Iterator[T]:
        """Pass values on; waiting for one is of this cause."""
        coming = iter(values)
        while True:
            with self.during(cause):
                found = list(itertools.islice(coming, 1))
            if not found:
                return
            yield found[0]

    def begins(self, name: str, size: int) -> CollectiveRecord:
        """What a transport tells of a transfer: it is of the cause that goes on."""
        return self.arrive(name, size=size)

    def arrive(self, name: str, kind: str | None = None, *, alone: bool = False, size: int = 0) -> CollectiveRecord:
        """This rank has come to a collective. All ranks come to the same ones in the same order, in the same step.

        `alone`: that is not so, since it goes on behind the steps; then nobody is asked who came last. `size`: bytes.
        """
        clock = _HOST if alone else self._clock
        name = f"{name} behind the step" if alone else name  # or it would count among those that all ranks come to
        with self._lock:
            self._names[name] += 1
            unique = f"{self._cuts}/{name}" if self._names[name] == 1 else f"{self._cuts}/{name} {self._names[name]}"
            ends = None if self._ring is None else lambda: self._note("out", name)
            flight = CollectiveRecord(clock, kind or self._kind, unique, clock.mark(), alone, size, ends=ends)
            self._flights.append(flight)
        self._note("in", name)
        return flight

    def _note(self, phase: str, what: str) -> None:
        if self._ring is not None:
            self._ring.note(self._cuts, phase, what)

    def cut(self, step: int, work: float = 0.0) -> Marks:
        """End the step here; the next one begins at the same moment. What is still in flight belongs to both."""
        end = self._clock.mark()
        with self._lock:
            marks = Marks(step, work, self._begin, end, self._spans, self._flights)
            self._spans, self._flights, self._begin = [], [f for f in self._flights if f.done is None], end
            self._names.clear()
            self._cuts += 1
        return marks

    def read(self, marks: Marks) -> RankStep:
        """Turn marks into times on the clock that all ranks share."""

        ahead, read = self.ahead, self._clock.read
        begin, end = read(marks.begin) + ahead, read(marks.end) + ahead

        def transfer(flight: CollectiveRecord) -> Transfer:
            read = flight.clock.read
            done = end if flight.done is None else read(flight.done) + ahead
            waits = () if flight.waited is None else ((read(flight.waited) + ahead, done),)
            arrived = read(flight.arrived) + ahead
            return Transfer(flight.kind, flight.name, arrived, done, waits, flight.alone, flight.size)

        spans = tuple([Span(kind, read(low) + ahead, read(high) + ahead) for kind, low, high in marks.spans])
        flights = tuple([transfer(flight) for flight in marks.flights])
        return RankStep(self.rank, marks.step, begin, end, spans, flights, marks.work)
