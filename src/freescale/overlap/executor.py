"""Runs a schedule: what is deferred in a thread of its own, everything else where it is issued. Knows no torch.

Run strictly serially, the same operations are done in the same order, one after another, on one thread; what is learnt
must be the same to the last bit.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager

from freescale.overlap.schedule import Operation, Schedule

Do = Callable[[Operation, int], None]
"""Does an operation on a batch."""
Waits = Callable[[str], AbstractContextManager[None]]
"""Surrounds a wait for deferred work of some cause."""


class Executor:
    """Issues the operations of one step after another."""

    def __init__(self, schedule: Schedule, do: Do, waits: Waits, *, strictly_serial: bool = False) -> None:
        self._schedule, self._do, self._waits = schedule, do, waits
        deferred = any(operation.lane == "deferred" for operation in schedule.operations)
        self.overlaps = deferred and not strictly_serial
        self._lane = _Thread() if self.overlaps else None
        self._cause = {operation.key: operation.cause for operation in schedule.operations}
        self._deferred: dict[tuple[str, int], Future[None]] = {}
        self._early: set[tuple[str, int]] = set()

    def run(self, step: int, exists: Callable[[int], bool]) -> None:
        """Issue a step: its operations on batches that exist and that were not done early."""
        for operation in self._schedule.operations:
            batch = step + operation.batch
            if (operation.key, batch) in self._early:
                self._early.discard((operation.key, batch))
            elif exists(batch):
                self._issue(operation, step)
        for key, batch in [known for known, future in self._deferred.items() if future.done()]:
            self._wait_for(key, batch)

    def settle(self, step: int) -> None:
        """Do now what the next step would do for this step's batch and those before it, and wait for it."""
        for operation in self._schedule.operations:
            if operation.batch < 0 and (operation.key, step + 1 + operation.batch) not in self._early:
                self._issue(operation, step + 1)
                self._early.add((operation.key, step + 1 + operation.batch))
        for key, batch in list(self._deferred):
            self._wait_for(key, batch)

    def close(self) -> None:
        """End the thread."""
        if self._lane is not None:
            self._lane.end()

    def _issue(self, operation: Operation, step: int) -> None:
        batch = step + operation.batch
        if operation.lane == "deferred" and self._lane is not None:
            # What it waits for was issued before it: on this lane, which does one thing at a time, or on others, done.
            self._deferred[operation.key, batch] = self._lane.submit(lambda: self._do(operation, batch))
            return
        for key, of_batch in operation.needs():
            self._wait_for(key, step + of_batch)
        self._do(operation, batch)

    def _wait_for(self, key: str, batch: int) -> None:
        """Only what is deferred can still be under way. An error there is raised here."""
        if (future := self._deferred.pop((key, batch), None)) is None:
            return
        if future.done():
            future.result()
            return
        with self._waits(self._cause[key]):
            future.result()


class _Thread:
    """Does one thing after another; nothing more once something has failed. It keeps no process from ending."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        threading.Thread(target=self._work, name="freescale-deferred", daemon=True).start()

    def submit(self, does: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._orders.put((future, does))
        return future

    def end(self) -> None:
        self._orders.put(None)

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            future, does = order
            try:
                if self._failed is None:
                    does()
            except BaseException as error:  # whatever it is, it belongs to who waits
                self._failed = error
            if self._failed is None:
                future.set_result(None)
            else:
                future.set_exception(self._failed)
