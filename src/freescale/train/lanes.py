"""Where the operations of a step run: whose method does each, on which exchange, recorded under which cause."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from freescale.bubbles.recorder import Flight as Transfer
from freescale.bubbles.recorder import Recorder
from freescale.embedding.prioritized import Held, Journey, RowOperations, held
from freescale.embedding.sharded import ShardedTables
from freescale.overlap.executor import Executor, Rest, Streams
from freescale.overlap.schedule import Operation, Schedule
from freescale.transport.choose import Chosen


class Travels(Protocol):
    """A batch on its way through a step."""

    journey: Journey


F = TypeVar("F", bound=Travels)


class Lanes(Generic[F]):
    """Runs the steps of a schedule. Operations on rows are done by `RowOperations`, all others by methods of `does`.

    `ways`: what moves rows; that for what is deferred is another lane of the tables.
    """

    def __init__(
        self,
        schedule: Schedule,
        does: Any,
        tables: ShardedTables | None,
        ways: Chosen,
        recorder: Recorder | None,
        device: torch.device,
    ) -> None:
        self._does, self._recorder = does, recorder
        self._deferred_cause = ""
        """Of what goes on behind the step right now."""
        self.most_held = Held(0, 0, 0)
        """The most bytes that batches under way held after a step."""
        self._rows = None if tables is None else RowOperations(tables)
        if ways.deferred is not None and tables is not None:
            ways.deferred.watch(None if recorder is None else partial(self._begins, recorder))
            tables.add_lane("deferred", ways.deferred)
        streams = Streams() if device.type == "cpu" else SideStream(device)
        self.executor: Executor[F] = Executor(schedule, self._do, self._waiting, streams=streams)

    def run(self, flight: F, following: F | None) -> None:
        """One step. Afterwards the next batch's rows and this one's gradients may be on their way."""
        self.executor.run(flight, following)
        now = held([one.journey for one in self.executor.under_way])
        self.most_held = Held(*map(max, self.most_held, now))

    def _do(self, operation: Operation, flight: F) -> Rest | None:
        if flight.journey.canceled:  # on all ranks alike, so nobody waits for an exchange that is skipped
            return None
        behind = operation.lane == "deferred" and self.executor.overlaps  # another thread: only its traffic is recorded
        if behind:
            self._deferred_cause = operation.cause
        with nullcontext() if behind or self._recorder is None else self._recorder.during(operation.cause):
            if hasattr(self._rows, operation.name):
                return getattr(self._rows, operation.name)(flight.journey, operation.lane)
            return getattr(self._does, operation.name)(flight, operation)

    def _begins(self, recorder: Recorder, name: str, size: int) -> Transfer:
        """What is told of deferred transfers: behind the steps, unless everything runs one after another."""
        if not self.executor.overlaps:
            return recorder.begins(name, size)
        return recorder.arrive(name, self._deferred_cause, alone=True, size=size)

    def _waiting(self, cause: str) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.waiting(cause)


class SideStream(Streams):
    """A stream of a device for what is deferred. Not run by us: no GPU was at hand."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.Stream(device)

    def deferred(self) -> AbstractContextManager[object]:
        """Launch there."""
        return self._side

    def hand_over(self) -> Callable[[], None]:
        """By an event, which the other stream waits for; no host does."""
        event = torch.accelerator.current_stream(self._device).record_event()
        return lambda: torch.accelerator.current_stream(self._device).wait_event(event)
