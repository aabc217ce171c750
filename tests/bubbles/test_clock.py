"""Clocks of different hosts are aligned within the stated bound."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from freescale.bubbles.clock import DeviceClock
from freescale.bubbles.ledger import account
from freescale.bubbles.recorder import Recorder
from freescale.bubbles.records import read_intervals, read_samples
from tests.bubbles.emulated_host import SLEEP

AHEAD = (0, 1000, 5, 0)
"""Seconds by which each rank's clock is ahead; ranks 0 and 3 share one."""
SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four ranks on three clocks."""
    folder = tmp_path_factory.mktemp("apart")
    running = []
    for rank, ahead in enumerate(AHEAD):
        space = ["unshare", "--time", "--monotonic", str(ahead), "--fork", "--kill-child"] if ahead else []
        command = [*space, sys.executable, "-m", "tests.bubbles.emulated_host", str(rank), str(len(AHEAD)), str(folder)]
        running.append(subprocess.Popen(command, cwd=Path(__file__).parents[2]))
    try:
        assert [process.wait(120) for process in running] == [0] * len(AHEAD)
    finally:
        for process in running:
            process.kill()
    return folder


@pytest.mark.parametrize("rank", range(len(AHEAD)))
def test_a_clock_offset_is_measured_within_the_stated_bound(apart: Path, rank: int) -> None:
    add, bound = json.loads((apart / f"{rank}.json").read_text())
    assert abs(add + AHEAD[rank] * SECOND) <= bound
    assert bound < 0.005 * SECOND


def test_a_rank_that_shares_the_clock_of_rank_0_has_no_error_bound(apart: Path) -> None:
    assert json.loads((apart / "3.json").read_text()) == [0, 0]


@pytest.mark.quiet
def test_a_straggler_on_another_host_is_measured(apart: Path) -> None:
    steps = [of_ranks for step, of_ranks in read_samples(apart).items() if step >= 3]
    seen = [
        [account(sample.step, sample.last).cause_ns("straggler") / SECOND for sample in of_ranks] for of_ranks in steps
    ]
    waited = np.median(seen, axis=0)  # a busy machine makes single steps late
    assert waited[1] < 0.005
    assert all(abs(waited[rank] - SLEEP) < 0.01 for rank in (0, 2, 3))
    assert all(0 < interval.clock_bound_us < 5000 for interval in read_intervals(apart))


class Queue:
    """A device that works off its queue when told to, with the rules of CUDA events."""

    def __init__(self) -> None:
        self.now_ms, self.host_ahead_ms = 5000.0, 0.0

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._at: float | None = None

    def record(self) -> None:
        self._at = self._queue.now_ms + self._queue.host_ahead_ms

    def synchronize(self) -> None:
        assert self._at is not None, "an event that was not recorded cannot be waited for"
        self._queue.now_ms = max(self._queue.now_ms, self._at)

    def elapsed_time(self, other: "Event") -> float:
        assert self._at is not None
        assert other._at is not None
        if max(self._at, other._at) > self._queue.now_ms:
            raise RuntimeError("device not ready: both events must have passed")
        return other._at - self._at


def test_device_steps_follow_the_stream_and_are_read_once_complete() -> None:
    queue = Queue()
    recorder = Recorder(0, DeviceClock(queue.event))
    queue.host_ahead_ms = 0.0
    with recorder.record("forward"):
        queue.host_ahead_ms += 30  # the host only queues 30 ms of work
    flight = recorder.begin_collective("sum", "dense gradients")
    flight.on_wait()
    queue.host_ahead_ms += 5
    flight.on_complete()
    marks = recorder.end_step(1)
    assert queue.now_ms == 5000.0  # nothing has been waited for
    step = recorder.read(marks)
    assert step.end - step.begin == 35_000_000
    ledger = account(step, {t.name: t.arrived for t in step.transfers})
    assert (ledger.cause_ns("forward"), ledger.cause_ns("dense gradients")) == (30_000_000, 5_000_000)


def test_device_times_stay_exact_in_long_runs() -> None:
    queue = Queue()
    clock = DeviceClock(queue.event)
    first, before = clock.mark(), queue.now_ms
    start = clock.read(first)
    for _ in range(100):
        queue.now_ms += 1700.0
        found = clock.read(clock.mark())
    assert found - start == round((queue.now_ms - before) * 1e6)
