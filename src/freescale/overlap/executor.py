"""Runs a schedule: what is deferred in a thread of its own, everything else where it is issued. Knows no torch.

Run strictly serially, the same operations are done in the same order, one after another, on one thread; what is learnt
must be the same to the last bit.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

from freescale.overlap.schedule import Operation, Schedule

F = TypeVar("F")
Rest = Callable[[], None]
"""What is left to do of an operation when somebody needs it: to wait for what it began."""
Do = Callable[[Operation, F], Rest | None]
"""Does an operation on a batch."""
Waits = Callable[[str], AbstractContextManager[None]]
"""Surrounds a wait for deferred work of some cause."""
Take = Callable[[], None]


class Streams:
    """Where a device runs what the lanes launch. One that computes at once, as a CPU does, has nothing to do here."""

    def deferred(self) -> AbstractContextManager[object]:
        """What is launched inside runs beside everything else."""
        return nullcontext()

    def hand_over(self) -> Take:
        """Called where work was launched. What is launched after calling the result, anywhere, runs after that work."""
        return lambda: None


NONE = Streams()


class Executor(Generic[F]):
    """Issues the operations of one step after another. Batches are whatever the operations work on."""

    def __init__(
        self, schedule: Schedule, do: Do[F], waits: Waits, *, streams: Streams = NONE, strictly_serial: bool = False
    ) -> None:
        self._schedule, self._do, self._waits, self._streams = schedule, do, waits, streams
        deferred = any(operation.lane == "deferred" for operation in schedule.operations)
        self.overlaps = deferred and not strictly_serial
        self.looks_ahead = any(operation.batch > 0 for operation in schedule.operations)
        self._lane = _Thread(self._streams) if self.overlaps else None
        self._operation = {operation.key: operation for operation in schedule.operations}
        self._deferred: dict[tuple[str, int], tuple[Future[Take], F]] = {}
        self._begun: dict[tuple[str, int], Rest] = {}
        self._hastened: set[str] = set()
        self._batches: dict[int, F] = {}
        self._number = 0

    @property
    def expected(self) -> F | None:
        """The batch of the next step, if its rows are already being fetched."""
        return self._batches.get(self._number)

    @property
    def under_way(self) -> list[F]:
        """Batches of which something is done ahead, or still to be done behind."""
        known = [*self._batches.values(), *(batch for _, batch in self._deferred.values())]
        return list({id(batch): batch for batch in known}.values())

    def run(self, batch: F, following: F | None = None) -> None:
        """Issue the step that computes a batch. What is done ahead is done for `following`."""
        if batch is not self.expected:
            self.forget()
            self._batches[self._number] = batch
            self._issue_step(self._number - 1)
        if following is not None and self.looks_ahead:
            self._batches[self._number + 1] = following
        self._issue_step(self._number)
        del self._batches[self._number]
        self._number += 1
        self._finish([known for known, (future, _) in self._deferred.items() if future.done()])

    def hasten(self, key: str) -> None:
        """Begin an operation on the batch that is computed before its turn, if nothing else has to be waited for.

        Called by the operation that it waits for, once that has left all that it needs.
        """
        operation = self._operation.get(key)
        if operation is None or not self.overlaps:
            return
        needed = [self._deferred.get((needs, self._number + batch)) for needs, batch in operation.needs()]
        if all(one is None or one[0].done() for one in needed):
            self._issue(operation, self._number, self._number)
            self._hastened.add(key)

    def settle(self) -> None:
        """Wait for everything that was issued. Of the last step's batch nothing is left to do then."""
        self._finish([*self._deferred, *self._begun])

    def forget(self) -> None:
        """Drop what was done ahead: the next batch begins anew."""
        self.settle()
        self._batches.clear()

    def close(self) -> None:
        """End the thread."""
        if self._lane is not None:
            self._lane.end()

    def _issue_step(self, step: int) -> None:
        for operation in self._schedule.operations:
            number = step + operation.batch
            if operation.key in self._hastened:
                self._hastened.remove(operation.key)
            elif number in self._batches:
                self._issue(operation, step, number)

    def _issue(self, operation: Operation, step: int, number: int) -> None:
        batch, needed = self._batches[number], [(key, step + of_batch) for key, of_batch in operation.needs()]
        lane = operation.lane
        # A lane does one thing at a time, and nothing that was only begun is left behind by what needs it.
        self._finish([known for known in self._begun if known in needed or self._operation[known[0]].lane == lane])
        if lane == "deferred" and self._lane is not None:
            # All else that it waits for was issued before it on this lane, or on others and done.
            taken = self._streams.hand_over()
            future = self._lane.submit(lambda: self._behind(operation, batch, taken))
            self._deferred[operation.key, number] = future, batch
            return
        self._finish(needed)
        rest = self._do(operation, batch)
        if rest is not None and self.overlaps:
            self._begun[operation.key, number] = rest
        else:
            _whole(rest)

    def _behind(self, operation: Operation, batch: F, taken: Take) -> Take:
        """On the deferred lane: take over what was launched before it, do it, and hand it over."""
        taken()
        _whole(self._do(operation, batch))
        return self._streams.hand_over()

    def _finish(self, known: list[tuple[str, int]]) -> None:
        """Wait for what was only begun and for what is deferred. An error behind the step is raised here."""
        for one in known:
            _whole(self._begun.pop(one, None))
            future, _ = self._deferred.pop(one, (None, None))
            if future is None:
                continue
            if not future.done():
                with self._waits(self._operation[one[0]].cause):
                    future.result()
            future.result()()


def _whole(rest: Rest | None) -> None:
    if rest is not None:
        rest()


class _Thread:
    """Does one thing after another; nothing more once something has failed. It keeps no process from ending."""

    def __init__(self, streams: Streams) -> None:
        self._orders: queue.SimpleQueue[tuple[Future[Take], Callable[[], Take]] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        threading.Thread(target=self._work, args=(streams,), name="freescale-deferred", daemon=True).start()

    def submit(self, does: Callable[[], Take]) -> Future[Take]:
        future: Future[Take] = Future()
        self._orders.put((future, does))
        return future

    def end(self) -> None:
        self._orders.put(None)

    def _work(self, streams: Streams) -> None:
        with streams.deferred():
            while (order := self._orders.get()) is not None:
                self._do(*order)
                del order  # it holds a batch

    def _do(self, future: Future[Take], does: Callable[[], Take]) -> None:
        if self._failed is not None:
            future.set_exception(self._failed)
            return
        try:
            future.set_result(does())
        except BaseException as error:  # whatever it is, it belongs to who waits
            self._failed = error
            future.set_exception(error)
