"""Runs a schedule with a table of operations: on which lane, recorded under which cause, and on which device stream."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from freescale.bubbles.recorder import CollectiveRecord as Transfer
from freescale.bubbles.recorder import Recorder
from freescale.embedding.prioritized import EmbeddingContext, EmbeddingMemory, embedding_memory
from freescale.embedding.sharded import ShardedTables
from freescale.overlap.executor import Completion, Executor, Streams
from freescale.overlap.schedule import Operation, Schedule
from freescale.transport.base import Transport
from freescale.transport.selection import TransportSelection


class HasEmbedding(Protocol):
    """The state of a batch, as far as operations on rows use it."""

    embedding: EmbeddingContext


S = TypeVar("S", bound=HasEmbedding)
Perform = Callable[[S, Operation], Completion | None]
"""Performs an operation on the state of a batch. A returned callback waits for what the operation started."""


class ScheduleRunner(Generic[S]):
    """Runs the steps of a schedule. `operations`: what each operation name does (see `train.step.operation_table`)."""

    def __init__(
        self,
        schedule: Schedule,
        operations: Mapping[str, Perform[S]],
        tables: ShardedTables | None,
        transports: TransportSelection,
        recorder: Recorder | None,
        device: torch.device,
    ) -> None:
        self._operations, self._recorder, self._tables = operations, recorder, tables
        self._deferred_cause = ""
        """Cause of the operation that the deferred lane runs now."""
        self.peak_bytes = EmbeddingMemory(0, 0, 0)
        """The most bytes that unfinished batches held after a step."""
        self._streams = Streams() if device.type == "cpu" else SideStream(device)
        self.executor = self._build_executor(schedule, transports.deferred)

    def switch(self, schedule: Schedule, urgent: Transport, deferred: Transport | None) -> None:
        """Continue with another schedule. Waits for all operations; prefetched rows are fetched anew."""
        self.executor.discard_prefetched()
        self.executor.close()
        if self._tables is not None:
            self._tables.add_lane("urgent", urgent)
        self.executor = self._build_executor(schedule, deferred)

    def _build_executor(self, schedule: Schedule, deferred: Transport | None) -> Executor[S]:
        if missing := {operation.name for operation in schedule.operations} - self._operations.keys():
            raise ValueError(f"the operation table lacks {', '.join(sorted(missing))}")
        if deferred is not None and self._tables is not None:
            recorder = self._recorder
            deferred.add_tracer(None if recorder is None else partial(self._trace_deferred, recorder))
            self._tables.add_lane("deferred", deferred)
        return Executor(schedule, self._perform, self._waiting, streams=self._streams)

    def run(self, state: S, following: S | None) -> None:
        """Run one step. Rows of `following` and gradients of `state` may still be in transfer afterwards."""
        self.executor.run(state, following)
        now = embedding_memory([batch.embedding for batch in self.executor.in_flight])
        self.peak_bytes = EmbeddingMemory(*map(max, self.peak_bytes, now))

    def _perform(self, operation: Operation, state: S) -> Completion | None:
        if state.embedding.canceled:  # on all ranks alike, so no rank waits for a skipped exchange
            return None
        # The deferred lane is another thread, which the recorder cannot follow: only its transfers are recorded.
        in_background = operation.lane == "deferred" and self.executor.overlaps
        if in_background:
            self._deferred_cause = operation.cause
        with nullcontext() if in_background or self._recorder is None else self._recorder.record(operation.cause):
            return self._operations[operation.name](state, operation)

    def _trace_deferred(self, recorder: Recorder, name: str, size: int) -> Transfer:
        """Record a deferred transfer beside the steps, or inside them where all operations run one after another."""
        if not self.executor.overlaps:
            return recorder.begin_transfer(name, size)
        return recorder.begin_collective(name, self._deferred_cause, independent=True, size=size)

    def _waiting(self, cause: str) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.record_wait(cause)


class SideStream(Streams):
    """A device stream for the deferred lane. Not tested on a GPU."""

    def __init__(self, device: torch.device) -> None:
        # High priority: its kernels are short and start between those of compute, not behind them.
        self._device, self._side = device, torch.Stream(device, priority=-1)

    def deferred(self) -> AbstractContextManager[object]:
        """Launch work on the side stream."""
        return self._side

    def fence(self) -> Callable[[], None]:
        """Record an event that another stream waits for, without blocking the host."""
        event = torch.accelerator.current_stream(self._device).record_event()
        return lambda: torch.accelerator.current_stream(self._device).wait_event(event)
