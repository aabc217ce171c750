"""Writes down what a rank does, cheaply enough to be always on.

A mark is a moment. On a CPU it is read at once; on a GPU it is an event in a stream that is read a step later, when it
has passed. So marks are only turned into times when a finished step is taken.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from freescale.bubbles.events import RankStep, Span, Transfer


class Clock(Protocol):
    """Where moments come from."""

    def mark(self) -> Any:
        """Note this moment."""
        ...

    def read(self, mark: Any) -> int:
        """Nanoseconds of a moment, on the host's monotonic clock."""
        ...


class HostClock:
    """Moments of the process itself."""

    mark = staticmethod(time.monotonic_ns)

    @staticmethod
    def read(mark: int) -> int:
        """A moment is its own time."""
        return mark


@dataclass
class Flight:
    """A collective on its way."""

    kind: str
    name: str
    arrived: Any
    done: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)


class Recorder:
    """What this rank does, step by step. One thread drives it; `landed` may be called by any."""

    def __init__(self, rank: int, clock: Clock | None = None) -> None:
        self.rank = rank
        self._clock: Clock = clock or HostClock()
        self._spans: list[tuple[str, Any, Any]] = []
        self._flights: list[Flight] = []
        self._begin: Any = self._clock.mark()

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Everything inside is of this kind."""
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append((kind, begin, self._clock.mark()))

    def arrive(self, kind: str, name: str) -> Flight:
        """This rank has come to a collective."""
        flight = Flight(kind, name, self._clock.mark())
        self._flights.append(flight)
        return flight

    @contextmanager
    def waiting(self, flight: Flight) -> Iterator[None]:
        """This rank can do nothing but wait for it."""
        begin = self._clock.mark()
        try:
            yield
        finally:
            end = self._clock.mark()
            flight.waits.append((begin, end))
            flight.done = flight.done or end

    def landed(self, flight: Flight) -> None:
        """It is done, whether anyone waits for it or not."""
        flight.done = flight.done or self._clock.mark()

    def take(self, step: int) -> RankStep:
        """End the step here: what happened since the last time. The next one begins at the same moment."""
        end = self._clock.mark()
        spans, flights, begin = self._spans, self._flights, self._begin
        self._spans, self._flights, self._begin = [], [f for f in flights if f.done is None], end
        read = self._clock.read
        return RankStep(
            self.rank,
            step,
            read(begin),
            read(end),
            tuple(Span(kind, read(low), read(high)) for kind, low, high in spans),
            tuple(_landed(flight, end, self._clock) for flight in flights),
        )


def _landed(flight: Flight, end: Any, clock: Clock) -> Transfer:
    """What is still under way at the end of a step has come as far as that."""
    waits = tuple((clock.read(low), clock.read(high)) for low, high in flight.waits)
    done = clock.read(flight.done if flight.done is not None else end)
    return Transfer(flight.kind, flight.name, clock.read(flight.arrived), done, waits)
