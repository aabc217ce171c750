"""Vector clocks of streams and host threads: which kernels are known to be complete before which.

Every kernel has a number on its stream. A clock maps streams to the newest kernel that is complete. Streams learn of
each other by events, a host thread by waiting, and a kernel of what its launching thread knows. Two uses of the same
memory by two streams, at least one a write, are a race unless one clock contains the other use.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

Clock = Counter[int]
AUTOGRAD = "autograd"
"""Name of the engine's device threads, which Python knows by no name of their own."""


def thread_name() -> str:
    """Return the name of this thread."""
    name = threading.current_thread().name
    return AUTOGRAD if name.startswith("Dummy") else name


class Clocks:
    """The clocks of one process. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._streams: defaultdict[int, Clock] = defaultdict(Counter)
        self._threads: defaultdict[str, Clock] = defaultdict(Counter)
        self._events: dict[int, Clock] = {}

    def launch(self, stream: int) -> int:
        """Number a kernel that this thread launches on a stream."""
        clock = self._streams[stream]
        join(clock, self._threads[thread_name()])
        clock[stream] += 1
        return clock[stream]

    def is_before(self, other: int, number: int, stream: int) -> bool:
        """Return whether a kernel of another stream is complete before the next one of a stream."""
        return max(self._streams[stream][other], self._threads[thread_name()][other]) >= number

    def is_known(self, stream: int, number: int) -> bool:
        """Return whether this thread knows that a kernel is complete."""
        return self._threads[thread_name()][stream] >= number

    def record_event(self, event: int, stream: int) -> None:
        with self.lock:
            self._events[event] = self._streams[stream].copy()

    def wait_event(self, event: int, stream: int) -> None:
        with self.lock:
            join(self._streams[stream], self._events.get(event, {}))

    def synchronize_event(self, event: int) -> None:
        with self.lock:
            join(self._threads[thread_name()], self._events.get(event, {}))

    def synchronize_stream(self, stream: int) -> None:
        with self.lock:
            join(self._threads[thread_name()], self._streams[stream])

    def synchronize_device(self) -> None:
        with self.lock:
            for clock in list(self._streams.values()):
                join(self._threads[thread_name()], clock)

    def of_thread(self) -> Clock:
        """Return what this thread knows, to be given to another thread."""
        with self.lock:
            return self._threads[thread_name()].copy()

    def learn(self, clock: Mapping[int, int], thread: str = "") -> None:
        """Give a thread, by default this one, the knowledge of another."""
        with self.lock:
            join(self._threads[thread or thread_name()], clock)


def join(into: Clock, clock: Mapping[int, int]) -> None:
    """Keep the newer kernel of each stream."""
    for stream, number in clock.items():
        into[stream] = max(into[stream], number)


class Task(Protocol):
    """A transfer or a signal, which ends later than the host has launched it."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object:
        """Wait, and raise its error."""


class Progress:
    """What streams have still to do, and so which events they have passed.

    Kernels are done when they are launched. Only tasks take time.
    """

    def __init__(self) -> None:
        self._of_stream: defaultdict[int, list[Task]] = defaultdict(list)
        self._before_event: dict[int, list[Task]] = {}
        self._recorded_at: dict[int, float] = {}

    def add(self, stream: int, task: Task) -> None:
        self._of_stream[stream] = [*_running(self._of_stream[stream]), task]

    def record_event(self, event: int, stream: int) -> None:
        self._recorded_at[event] = time.perf_counter()
        self._before_event[event] = _running(self._of_stream[stream])
        for other, tasks in list(self._before_event.items()):
            if not _running(tasks):
                self._before_event.pop(other, None)

    def wait_event(self, event: int, stream: int) -> None:
        self._of_stream[stream] = _running([*self._of_stream[stream], *self._before_event.get(event, [])])

    def has_passed(self, event: int) -> bool:
        """Return whether the work before an event is done. Raises the error of a task."""
        return _are_completed(self._before_event.get(event, []))

    def is_idle(self, stream: int) -> bool:
        return _are_completed(self._of_stream[stream])

    def elapsed_ms(self, begin: int, end: int) -> float:
        """Return the time between the launches of two events."""
        return (self._recorded_at[end] - self._recorded_at[begin]) * 1e3


def _running(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if not task.is_completed()]


def _are_completed(tasks: list[Task]) -> bool:
    if _running(tasks):
        return False
    for task in tasks:
        task.wait()
    return True


def follow_threads(clocks: Clocks) -> None:
    """Pass knowledge where threads synchronize: through queues, futures and backward passes."""
    _follow_queues(clocks)
    _follow_futures(clocks)
    _follow_backward(clocks)


def _follow_queues(clocks: Clocks) -> None:
    import queue

    class SimpleQueue(queue.Queue[Any]):
        def put(self, item: Any, *args: Any, **options: Any) -> None:
            super().put((clocks.of_thread(), item), *args, **options)

        def get(self, *args: Any, **options: Any) -> Any:
            clock, item = super().get(*args, **options)
            clocks.learn(clock)
            return item

    queue.SimpleQueue = SimpleQueue  # type: ignore[assignment, misc]


def _follow_futures(clocks: Clocks) -> None:
    from concurrent.futures import Future

    set_result, result = Future.set_result, Future.result

    def set_with_clock(self: Any, value: Any) -> None:
        self.clock = clocks.of_thread()
        set_result(self, value)

    def result_with_clock(self: Any, timeout: float | None = None) -> Any:
        value = result(self, timeout)
        clocks.learn(getattr(self, "clock", {}))
        return value

    Future.set_result, Future.result = set_with_clock, result_with_clock  # type: ignore[method-assign]


def _follow_backward(clocks: Clocks) -> None:
    import torch

    def wrapped(function: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            clocks.learn(clocks.of_thread(), AUTOGRAD)
            result = function(*args, **options)
            with clocks.lock:
                clocks.learn(clocks._threads[AUTOGRAD].copy())
            return result

        return run

    torch.autograd.backward, torch.autograd.grad = wrapped(torch.autograd.backward), wrapped(torch.autograd.grad)
