"""Records what a rank does, cheaply enough to be always on. Marks become times once a finished step is read."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.bubbles.clock import HostClock
from freescale.bubbles.events import CAUSES, TRAFFIC, RankStep, Span, Transfer
from freescale.bubbles.flight_recorder import FlightRecorder

T = TypeVar("T")
_CAUSE_SET, _HOST = frozenset(CAUSES), HostClock()


@dataclass
class CollectiveRecord:
    """A collective in flight. It may complete on any thread."""

    clock: HostClock
    kind: str
    name: str
    arrived: Any
    independent: bool
    size: int
    waited: Any = None
    """When the rank began to block on it, if it did."""
    done: Any = None
    on_done: Callable[[], None] | None = None

    def on_wait(self) -> None:
        """The rank blocks on the collective from now on. A background thread does not block the step."""
        if self.waited is None and not self.independent:
            self.waited = self.clock.mark()

    def on_complete(self) -> None:
        """The collective is complete."""
        if self.done is None:
            self.done = self.clock.mark()
            if self.on_done is not None:
                self.on_done()


@dataclass(frozen=True)
class StepMarks:
    """A recorded step, with clock marks instead of times."""

    step: int
    work: float
    begin: Any
    end: Any
    spans: list[tuple[str, Any, Any]]
    collectives: list[CollectiveRecord]


class Recorder:
    """Records the steps of this rank. `flight_recorder`: keeps the last operations for post-mortem analysis."""

    def __init__(
        self, rank: int, clock: HostClock | None = None, flight_recorder: FlightRecorder | None = None
    ) -> None:
        self.rank = rank
        self.clock_offset = 0
        """Nanoseconds to add to this rank's clock to get rank 0's."""
        self._flight_recorder = flight_recorder
        self._clock = clock or HostClock()
        self._kind, self._steps = TRAFFIC[-1], 0
        self._lock = threading.Lock()
        self.restart_step()

    def restart_step(self) -> None:
        """Drop what the current step recorded; it begins now."""
        self._spans: list[tuple[str, Any, Any]] = []
        self._collectives: list[CollectiveRecord] = []
        self._names: Counter[str] = Counter()
        self._begin: Any = self._clock.mark()

    @contextmanager
    def record(self, cause: str) -> Iterator[None]:
        """Attribute the block to a cause. For traffic: transfers started inside have it, and packing is host work."""
        if cause not in _CAUSE_SET:
            raise ValueError(f"unknown cause '{cause}'; choose one of {', '.join(CAUSES)}")
        kind, before = cause, self._kind
        if cause in TRAFFIC:
            self._kind, kind = cause, "host"
        begin = self._clock.mark()
        self._log("in", cause)
        try:
            yield
        finally:
            self._spans.append((kind, begin, self._clock.mark()))
            self._kind = before
            self._log("out", cause)

    @contextmanager
    def record_wait(self, cause: str) -> Iterator[None]:
        """Attribute the block to a wait for a background thread."""
        begin = self._clock.mark()
        try:
            yield
        finally:
            self._spans.append((cause if cause in TRAFFIC else "host", begin, self._clock.mark()))

    def iterate(self, cause: str, values: Iterable[T]) -> Iterator[T]:
        """Yield values; waiting for the next one has this cause."""
        iterator = iter(values)
        while True:
            with self.record(cause):
                item = list(itertools.islice(iterator, 1))
            if not item:
                return
            yield item[0]

    def begin_transfer(self, name: str, size: int) -> CollectiveRecord:
        """Record a transfer under the current cause. A `TracerFactory` for transports."""
        return self.begin_collective(name, size=size)

    def begin_collective(
        self, name: str, kind: str | None = None, *, independent: bool = False, size: int = 0
    ) -> CollectiveRecord:
        """Record that this rank enters a collective. All ranks enter the same ones in the same order in a step.

        `independent`: the collective runs in the background of the steps, so arrivals are not compared. `size`: bytes.
        """
        clock = _HOST if independent else self._clock
        name = f"{name} in background" if independent else name  # distinct from the collectives that ranks compare
        with self._lock:
            self._names[name] += 1
            unique = f"{self._steps}/{name}" if self._names[name] == 1 else f"{self._steps}/{name} {self._names[name]}"
            on_done = None if self._flight_recorder is None else lambda: self._log("out", name)
            arrived = clock.mark()
            record = CollectiveRecord(clock, kind or self._kind, unique, arrived, independent, size, on_done=on_done)
            self._collectives.append(record)
        self._log("in", name)
        return record

    def _log(self, phase: str, operation: str) -> None:
        if self._flight_recorder is not None:
            self._flight_recorder.record(self._steps, phase, operation)

    def end_step(self, step: int, work: float = 0.0) -> StepMarks:
        """End the step; the next one begins at the same moment. A collective in flight belongs to both."""
        end = self._clock.mark()
        with self._lock:
            marks = StepMarks(step, work, self._begin, end, self._spans, self._collectives)
            self._spans, self._begin = [], end
            self._collectives = [record for record in self._collectives if record.done is None]
            self._names.clear()
            self._steps += 1
        return marks

    def read(self, marks: StepMarks) -> RankStep:
        """Convert marks to times on rank 0's clock."""
        offset, read = self.clock_offset, self._clock.read
        begin, end = read(marks.begin) + offset, read(marks.end) + offset

        def transfer(record: CollectiveRecord) -> Transfer:
            read = record.clock.read
            done = end if record.done is None else read(record.done) + offset
            waits = () if record.waited is None else ((read(record.waited) + offset, done),)
            arrived = read(record.arrived) + offset
            return Transfer(record.kind, record.name, arrived, done, waits, record.independent, record.size)

        spans = tuple([Span(kind, read(low) + offset, read(high) + offset) for kind, low, high in marks.spans])
        transfers = tuple([transfer(record) for record in marks.collectives])
        return RankStep(self.rank, marks.step, begin, end, spans, transfers, marks.work)


def record_comm_hook(hook: Callable[[Any, dist.GradBucket], Any], recorder: Recorder) -> Callable[..., Any]:
    """Wrap a DDP communication hook so that its gradient buckets are recorded.

    Once the last bucket is in flight and the graph is done, the backward pass blocks on the buckets.
    """
    pending: list[CollectiveRecord] = []

    def recorded(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        record = recorder.begin_collective(f"bucket {bucket.index()}", "dense gradients", size=bucket.buffer().nbytes)
        pending.append(record)

        def complete(done: torch.futures.Future[Tensor]) -> Tensor:
            record.on_complete()
            return done.value()

        future = hook(state, bucket).then(complete)
        if bucket.is_last():
            # Runs when the graph is done, just before DDP's own final callback, which was queued after it.
            torch.autograd.Variable._execution_engine.queue_callback(begin_wait)  # type: ignore[attr-defined]
        return future

    def begin_wait() -> None:
        for record in pending:
            record.on_wait()
        pending.clear()

    return recorded
