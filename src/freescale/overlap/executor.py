"""Executes a schedule: deferred operations on a background thread, all others where they are issued. Torch-free.

Strictly serial execution runs the same operations in the same order on one thread. The training result is bitwise
identical.
"""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

from freescale.overlap.schedule import Operation, Schedule

F = TypeVar("F")
Completion = Callable[[], None]
"""Completion callback of an operation: waits for the transfer that it started."""
RunOperation = Callable[[Operation, F], Completion | None]
"""Runs an operation on a batch."""
RecordWait = Callable[[str], AbstractContextManager[None]]
"""Surrounds a wait for deferred work of some cause."""
StreamWait = Callable[[], None]
Key = tuple[str, int]
"""An operation and the number of the batch that it works on."""
_Tasks = queue.SimpleQueue[tuple[Future[StreamWait], Callable[[], StreamWait]] | None]


class Streams:
    """The device streams of the lanes. This base is for devices that compute synchronously, such as the CPU."""

    def deferred(self) -> AbstractContextManager[object]:
        """Launch the work inside on the stream of the deferred lane."""
        return nullcontext()

    def fence(self) -> StreamWait:
        """Mark the work launched so far. Work launched after calling the result, on any stream, runs after it."""
        return lambda: None


_NO_STREAMS = Streams()


class Executor(Generic[F]):
    """Issues the operations of one step after another. A batch is any object that the operations work on."""

    def __init__(
        self,
        schedule: Schedule,
        run_operation: RunOperation[F],
        record_wait: RecordWait,
        *,
        streams: Streams = _NO_STREAMS,
        strictly_serial: bool = False,
    ) -> None:
        self._schedule, self._run_operation, self._record_wait = schedule, run_operation, record_wait
        self._streams = streams
        deferred = any(operation.lane == "deferred" for operation in schedule.operations)
        self.overlaps = deferred and not strictly_serial
        self.prefetches = any(operation.batch > 0 for operation in schedule.operations)
        self._thread = _DeferredThread(self._streams) if self.overlaps else None
        self._operation = {operation.key: operation for operation in schedule.operations}
        self._deferred: dict[Key, tuple[Future[StreamWait], F]] = {}
        self._incomplete: dict[Key, Completion] = {}
        self._issued_early: set[str] = set()
        self._batches: dict[int, F] = {}
        self._number = 0

    @property
    def prefetched(self) -> F | None:
        """The batch of the next step, if its rows are being prefetched."""
        return self._batches.get(self._number)

    @property
    def in_flight(self) -> list[F]:
        """Batches with prefetched rows or deferred operations."""
        batches = [*self._batches.values(), *(batch for _, batch in self._deferred.values())]
        return list({id(batch): batch for batch in batches}.values())

    def run(self, batch: F, following: F | None = None) -> None:
        """Issue the step that computes a batch. Prefetching operations work on `following`."""
        if batch is not self.prefetched:
            self.discard_prefetched()
            self._batches[self._number] = batch
            self._issue_step(self._number - 1)
        if following is not None and self.prefetches:
            self._batches[self._number + 1] = following
        self._issue_step(self._number)
        del self._batches[self._number]
        self._number += 1
        self._finish([key for key, (future, _) in self._deferred.items() if future.done()])

    def issue_early(self, key: str) -> None:
        """Issue an operation on the current batch before its turn, if its other dependencies are complete.

        The operation that it depends on calls this, once its output is ready.
        """
        operation = self._operation.get(key)
        if operation is None or not self.overlaps:
            return
        pending = [self._deferred.get((name, self._number + batch)) for name, batch in operation.dependencies()]
        if all(entry is None or entry[0].done() for entry in pending):
            self._issue(operation, self._number, self._number)
            self._issued_early.add(key)

    def synchronize(self) -> None:
        """Wait for every issued operation. The last step's batch is then fully applied."""
        self._finish([*self._deferred, *self._incomplete])

    def discard_prefetched(self) -> None:
        """Synchronize, then drop prefetched rows: the next batch is fetched anew."""
        self.synchronize()
        self._batches.clear()

    def close(self) -> None:
        """End the background thread."""
        if self._thread is not None:
            self._thread.end()

    def _issue_step(self, step: int) -> None:
        for operation in self._schedule.operations:
            number = step + operation.batch
            if operation.key in self._issued_early:
                self._issued_early.remove(operation.key)
            elif number in self._batches:
                self._issue(operation, step, number)

    def _issue(self, operation: Operation, step: int, number: int) -> None:
        batch, needed = self._batches[number], [(key, step + of_batch) for key, of_batch in operation.dependencies()]
        lane = operation.lane
        # A lane runs one operation at a time, and a dependency must be complete.
        self._finish([key for key in self._incomplete if key in needed or self._operation[key[0]].lane == lane])
        if lane == "deferred" and self._thread is not None:
            # Its dependencies on this lane were issued before it; those on other lanes are complete.
            wait_for_issuer = self._streams.fence()
            future = self._thread.submit(lambda: self._run_deferred(operation, batch, wait_for_issuer))
            self._deferred[operation.key, number] = future, batch
            return
        self._finish(needed)
        completion = self._run_operation(operation, batch)
        if completion is not None and self.overlaps:
            self._incomplete[operation.key, number] = completion
        else:
            _complete(completion)

    def _run_deferred(self, operation: Operation, batch: F, wait_for_issuer: StreamWait) -> StreamWait:
        """Run an operation on the deferred lane, ordered after the work launched before it."""
        wait_for_issuer()
        _complete(self._run_operation(operation, batch))
        return self._streams.fence()

    def _finish(self, keys: list[Key]) -> None:
        """Wait for incomplete and deferred operations. Errors from the deferred thread surface here."""
        for key in keys:
            _complete(self._incomplete.pop(key, None))
            future, _ = self._deferred.pop(key, (None, None))
            if future is None:
                continue
            if not future.done():
                with self._record_wait(self._operation[key[0]].cause):
                    future.result()
            future.result()()


def _complete(completion: Completion | None) -> None:
    if completion is not None:
        completion()


class _DeferredThread:
    """A daemon thread that runs tasks in order, and ends with this object. After a failure, later tasks fail alike."""

    def __init__(self, streams: Streams) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        threading.Thread(target=_run_tasks, args=(self._tasks, streams), name="freescale-deferred", daemon=True).start()
        self._end = weakref.finalize(self, self._tasks.put, None)

    def submit(self, function: Callable[[], StreamWait]) -> Future[StreamWait]:
        future: Future[StreamWait] = Future()
        self._tasks.put((future, function))
        return future

    def end(self) -> None:
        self._end()


def _run_tasks(tasks: _Tasks, streams: Streams) -> None:
    failure: BaseException | None = None
    with streams.deferred():
        while (task := tasks.get()) is not None:
            future, function = task
            try:
                if failure is None:
                    future.set_result(function())
            except BaseException as error:  # raised again where the operation is waited for
                failure = error
            if failure is not None:
                future.set_exception(failure)
            del task, future, function  # they reference a batch
