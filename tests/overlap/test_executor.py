"""Operations run in an order that the schedule allows, and errors of deferred ones surface in the step."""

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from freescale.overlap.executor import Executor
from freescale.overlap.executor import Streams as NoStreams
from freescale.overlap.schedule import Operation, overlapped, serial

STEPS = 6


@contextlib.contextmanager
def nothing(_: str) -> Iterator[None]:
    yield


def ran(strictly_serial: bool, seed: int, settle_after: frozenset[int] = frozenset()) -> list[tuple[str, int, str]]:
    """What was begun and what ended, in order, if everything takes a random time."""
    rng, lock = np.random.default_rng(seed), threading.Lock()
    events: list[tuple[str, int, str]] = []

    def do(operation: Operation, batch: int) -> None:
        with lock:
            events.append((operation.key, batch, "begins"))
            seconds = float(rng.exponential() * 5e-4)
        time.sleep(seconds)
        with lock:
            events.append((operation.key, batch, "ends"))

    executor: Executor[int] = Executor(overlapped(), do, nothing, strictly_serial=strictly_serial)
    for step in range(STEPS):
        executor.run(step, step + 1 if step + 1 < STEPS else None)
        if step in settle_after:
            executor.synchronize()
    executor.synchronize()
    executor.close()
    return events


@pytest.mark.parametrize("settle_after", [frozenset(), frozenset({1, 2, 4})], ids=["never settled", "settled"])
@pytest.mark.parametrize("strictly_serial", [True, False])
def test_operations_begin_after_their_dependencies_and_run_once(
    strictly_serial: bool, settle_after: frozenset[int]
) -> None:
    for seed in range(10):
        events = ran(strictly_serial, seed, settle_after)
        place = {event: at for at, event in enumerate(events)}
        assert len(place) == len(events)
        for operation, batch in itertools.product(overlapped().operations, range(STEPS)):
            assert (operation.key, batch, "ends") in place
            for key, of_batch in operation.dependencies():
                of_batch += batch - operation.batch
                if 0 <= of_batch < STEPS:
                    assert place[key, of_batch, "ends"] < place[operation.key, batch, "begins"]


def test_strictly_serial_execution_runs_one_operation_at_a_time_and_overlapped_does_not() -> None:
    for strictly_serial in (True, False):
        events = ran(strictly_serial, 0)
        one_by_one = all(a[:2] == b[:2] for a, b in zip(events[::2], events[1::2], strict=True))
        assert one_by_one == strictly_serial


@pytest.mark.parametrize("split_in_time", [True, False])
def test_an_operation_issued_early_runs_once_and_only_if_its_dependencies_are_complete(split_in_time: bool) -> None:
    events: list[tuple[str, int, str]] = []
    is_split, computed = threading.Event(), threading.Event()

    def do(operation: Operation, batch: int) -> Callable[[], None] | None:
        if operation.name == "send_split":
            computed.wait(0.0 if split_in_time else 5.0)
        events.append((operation.name, batch, "begins"))
        if operation.name == "send_split":
            is_split.set()
        if operation.name == "backward":
            is_split.wait(5.0 if split_in_time else 0.0)
            time.sleep(0.01)  # until it is known to have ended
            executor.issue_early("send_urgent_gradients")
            events.append((operation.name, batch, "ends"))
            computed.set()
        return (lambda: None) if operation.name == "send_urgent_gradients" else None

    executor: Executor[int] = Executor(overlapped(), do, nothing)
    executor.run(0)
    is_split.clear()
    computed.clear()
    executor.run(1, 2)
    executor.synchronize()
    executor.close()
    place = {event: at for at, event in enumerate(events)}
    assert len(place) == len(events)
    urgent, done = place["send_urgent_gradients", 1, "begins"], place["backward", 1, "ends"]
    assert (urgent < done) == split_in_time
    assert place["send_split", 2, "begins"] < urgent < place["update_urgent", 1, "begins"]


def test_errors_of_deferred_operations_surface_in_the_step() -> None:
    def do(operation: Operation, batch: int) -> None:
        if (operation.name, batch) == ("send_ids", 3):
            raise RuntimeError("the link is gone")

    executor: Executor[int] = Executor(overlapped(), do, nothing)

    def run() -> None:
        for step in range(STEPS):
            executor.run(step, step + 1)

    with pytest.raises(RuntimeError, match="the link is gone"):
        run()
    executor.close()


def test_no_deferred_operation_runs_after_one_has_failed() -> None:
    begun: list[tuple[str, int]] = []
    queued = threading.Event()

    def do(operation: Operation, batch: int) -> None:
        if operation.name == "forward" and batch == 1:
            queued.set()  # after the deferred operations of the next batch
        if operation.lane == "deferred" and batch == 2:
            begun.append((operation.name, batch))
        if (operation.name, batch) == ("send_ids", 2):
            queued.wait(5.0)
            raise RuntimeError("the link is gone")

    executor: Executor[int] = Executor(overlapped(), do, nothing)
    executor.run(0, 1)
    with pytest.raises(RuntimeError, match="the link is gone"):
        executor.run(1, 2)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "freescale-deferred"]
    executor.close()
    thread.join(5.0)
    assert not thread.is_alive()
    assert begun[-1] == ("send_ids", 2)


def test_everything_issued_has_ended_after_synchronize() -> None:
    begun: set[tuple[str, int]] = set()
    ended: set[tuple[str, int]] = set()

    def do(operation: Operation, batch: int) -> None:
        begun.add((operation.key, batch))
        time.sleep(0.02 if operation.lane == "deferred" else 0.0)
        ended.add((operation.key, batch))

    executor: Executor[int] = Executor(overlapped(), do, nothing)
    for step in range(2):
        executor.run(step)
        assert ("update_deferred", step) not in ended, "it overlaps with what follows"
        executor.synchronize()
        assert {key for key, batch in ended if batch == step} == {o.key for o in overlapped().operations}
        assert begun == ended
    executor.close()


class Streams(NoStreams):
    """A device that has run only what its streams were told to wait for: one stream per thread."""

    def __init__(self) -> None:
        self.known: dict[int, set[tuple[str, int]]] = {}

    @property
    def here(self) -> set[tuple[str, int]]:
        return self.known.setdefault(threading.get_ident(), set())

    def fence(self) -> Callable[[], None]:
        launched = set(self.here)
        return lambda: self.here.update(launched)


def test_streams_wait_for_dependencies_on_other_streams() -> None:
    streams, missing = Streams(), []

    def do(operation: Operation, batch: int) -> None:
        needed = [(key, batch - operation.batch + of_batch) for key, of_batch in operation.dependencies()]
        missing.extend([(operation.key, batch, one) for one in needed if one[1] >= 0 and one not in streams.here])
        streams.here.add((operation.key, batch))

    executor: Executor[int] = Executor(overlapped(), do, nothing, streams=streams)
    for step in range(STEPS):
        executor.run(step, step + 1)
    executor.synchronize()
    executor.close()
    assert len(streams.known) == 2
    assert missing == []


def test_a_serial_schedule_needs_no_thread() -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    executor: Executor[int] = Executor(serial(sharded=True), lambda *_: None, nothing)
    executor.run(0)
    assert not executor.overlaps
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("closed", [True, False])
def test_the_deferred_thread_ends_with_its_executor(closed: bool) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    before = names().count("freescale-deferred")
    executor: Executor[int] = Executor(overlapped(), lambda *_: None, nothing)
    executor.run(0, None)
    executor.synchronize()
    assert names().count("freescale-deferred") == before + 1
    if closed:
        executor.close()
    del executor
    gc.collect()
    deadline = time.monotonic() + 10
    while names().count("freescale-deferred") > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert names().count("freescale-deferred") == before
