"""Profiles the steps of a run: accounts for every rank's time, exchanges sums between ranks and writes them to files.

When a step ends, the marks of the step before it are read. Every few steps the ranks exchange when the last of them
reached each collective, and the steps of the previous exchange are accounted for. Every interval, rank 0 writes the
sums of all ranks. Each answer is used one exchange later, so no step waits for another rank, except for a clock
alignment between hosts now and then. Both exchanges have a fixed size and go along a tree, and files are bounded
(`records`).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from freescale.bubbles import records
from freescale.bubbles.clock import ClockAlignment, build_clock, device_name
from freescale.bubbles.events import RankStep
from freescale.bubbles.flight_recorder import FlightRecorder
from freescale.bubbles.ledger import Ledger, account, compute_ns
from freescale.bubbles.recorder import Recorder, StepMarks
from freescale.connections import BackgroundWork, GlooWire, TreeCollectives, few_connections
from freescale.errors import UsageError
from freescale.log import warning_once

T = TypeVar("T")
_ALIGN_EVERY = 16  # intervals: between hosts an alignment synchronizes all ranks
_EXCHANGE_EVERY = 16  # steps: a collective costs more than all the marks of a step
SLOTS = 1024
"""Collectives that one exchange of arrivals covers."""


class StepProfiler:
    """Records where the time of each training step goes. Create one on every rank, after `init_process_group`:

    with fs.StepProfiler("runs/mine") as profiler:
        for batch in profiler.iterate("data", loader):
            with profiler.record("forward"):
                ...
            profiler.end_step()

    `steps`: the length of the run, if known; it spreads the samples evenly. `every`: steps per written interval.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        steps: int | None = None,
        every: int = 10,
        device: torch.device | None = None,
        timeout: float = 600.0,
    ) -> None:
        if not dist.is_initialized():
            remedy = "call torch.distributed.init_process_group first, with world_size=1 for a single process"
            raise UsageError("StepProfiler needs a process group", remedy=remedy)
        # A separate group keeps this traffic from interleaving with the collectives of training.
        with few_connections(dist.get_world_size()):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        assert isinstance(group, dist.ProcessGroup)
        folder = Path(path)
        self._flight_recorder = FlightRecorder(folder, group.rank())
        self.recorder = Recorder(group.rank(), build_clock(device), self._flight_recorder)
        self.step = 0
        """Completed steps. A resumed run sets it."""
        self.on_compute_time: Callable[[int, int], None] | None = None
        """Called with a step and the nanoseconds that this rank computed in it, when the next step ends."""
        self.on_interval: Callable[[records.IntervalRecord], None] | None = None
        """Called on rank 0 with each interval that is written."""
        self._is_rank_zero = group.rank() == 0
        self._steps, self._every = steps, max(every, -(-(steps or 0) // records.LINES))
        self._exchange_every = min(_EXCHANGE_EVERY, self._every)
        self._is_sampled_rank = group.rank() % -(-group.size() // records.SAMPLED_RANKS) == 0
        self._arrivals, self._sums = LastArrivals(group, timeout=timeout), IntervalSums(group, timeout=timeout)
        self._alignment = ClockAlignment(group, timeout=timeout)
        self._writer = records.RecordWriter(folder)
        if self._is_rank_zero:
            self._writer.write_machine(records.MachineRecord(device_name(device), group.size()))
        self._unread: StepMarks | None = None
        self._read: list[RankStep] = []
        self._samples: list[records.StepSample] = []
        self._warm, self._intervals = False, 0
        self._align()
        self.restart_step()

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close, unless an exception is raised: other ranks may not get here, and the flight record is needed."""
        if kind is None:
            self.close()

    def record(self, cause: str) -> AbstractContextManager[None]:
        """Attribute the block to a cause: one of `events.CAUSES`."""
        return self.recorder.record(cause)

    def iterate(self, cause: str, values: Iterable[T]) -> Iterator[T]:
        """Yield values; waiting for the next one has this cause."""
        return self.recorder.iterate(cause, values)

    def restart_step(self) -> None:
        """Begin the step now. What ran since the last step, such as an evaluation, is not profiled."""
        self.recorder.restart_step()

    def end_step(self, work: float = 0.0) -> None:
        """End the step. `work`: the cost that a cost model predicts for this rank's batch."""
        if self._is_rank_zero and not self._intervals and self._unread is None:
            self._writer.truncate_after(self.step)
        self.step += 1
        marks = self.recorder.end_step(self.step, work)
        with self.recorder.record("host"):
            self._read_marks(marks)
            self._write_interval()
            if len(self._read) == self._exchange_every:
                self._exchange()

    def close(self) -> None:
        """Write what is pending and remove the flight record. A collective operation: call it on all ranks."""
        self._flush()
        self._flight_recorder.remove()

    def rewind(self, step: int) -> None:
        """Go back to a step; later ones run again. A collective operation: call it on all ranks."""
        self._flush()
        self.step, self._warm, self._intervals = step, False, 0
        self.restart_step()

    def _flush(self) -> None:
        self._read_marks(None)
        self._exchange()
        self._account()
        if self._sums.steps:
            self._end_interval(self.step)
        self._write_interval()

    def _read_marks(self, marks: StepMarks | None) -> None:
        """Read the marks of the step before: one step later, reading them does not block."""
        if self._unread is not None:
            step = self.recorder.read(self._unread)
            self._read.append(step)
            if self.on_compute_time is not None:
                self.on_compute_time(step.step, compute_ns(step))
        self._unread = marks

    def _exchange(self) -> None:
        """Account for the steps of the last exchange, and start one for the steps read since."""
        self._account()
        self._arrivals.start(self._read)
        self._read = []

    def _account(self) -> None:
        for step, last in self._arrivals.results():
            if self._warm:
                self._sums.add(account(step, last))
            self._warm = True  # the first step of a process includes one-time work
            if self._is_sampled_rank and self._is_sampled(step.step):
                self._samples.append(records.StepSample(step, last))
            if self._sums.steps and step.step % self._interval_steps(step.step) == 0:
                self._end_interval(step.step)

    def _is_sampled(self, step: int) -> bool:
        """Whether a step is written whole: evenly spread ones, or powers of two if the length is unknown."""
        if self._steps is None:
            return step & (step - 1) == 0
        return step % max(1, -(-self._steps // records.SAMPLED_STEPS)) == 0

    def _interval_steps(self, step: int) -> int:
        """Steps per interval. It doubles as a run of unknown length grows, so that the file stays short."""
        longer = 0 if self._steps is not None else step // (self._every * records.LINES // 2)
        return self._every << longer.bit_length()

    def _end_interval(self, step: int) -> None:
        self._write_interval()
        self._sums.send(step)
        self._writer.write_samples(self._samples)
        self._samples.clear()
        self._intervals += 1
        if self._intervals % _ALIGN_EVERY == 0:
            self._align()

    def _write_interval(self) -> None:
        interval = self._sums.receive(clock_bound=self._clock_bound)
        if interval is not None:
            self._writer.write_interval(interval)
            if self.on_interval is not None:
                self.on_interval(interval)

    def _align(self) -> None:
        """Align clocks again, since they drift. Ranks of one host share a clock and skip this."""
        offset = self._alignment.measure()
        self.recorder.clock_offset, self._clock_bound = offset.add, offset.widest


class LastArrivals:
    """Exchanges when the last rank reached each collective."""

    def __init__(self, group: dist.ProcessGroup, *, timeout: float) -> None:
        self._tree, self._timeout = TreeCollectives(GlooWire(group, tag=1)), timeout
        self._pending: tuple[list[RankStep], list[str], BackgroundWork[Tensor]] | None = None
        self._last: dict[str, int] = {}
        """Arrivals of the previous step: its collectives may still be in flight in the next one."""

    def start(self, steps: list[RankStep]) -> None:
        """Start an exchange for the collectives that these steps began. Consume the results of the last one first."""
        new = (t for step in steps for t in step.transfers if not t.independent and t.name not in self._last)
        arrived = {t.name: t.arrived for t in new}
        if len(arrived) > SLOTS - 2:
            warning_once(f"{len(arrived)} collectives in {len(steps)} steps: last arrivals cover only {SLOTS - 2}")
        names = list(arrived)[: SLOTS - 2]
        # The maxima of a digest and of its negative are opposites only if all ranks list the same collectives.
        digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")
        values = [digest, -digest, *(arrived[name] for name in names)]
        arrivals = torch.tensor(values + [0] * (SLOTS - len(values)))
        work = BackgroundWork(lambda: self._tree.all_reduce(arrivals, torch.maximum), name="exchange of arrivals")
        self._pending = steps, names, work

    def results(self) -> Iterator[tuple[RankStep, dict[str, int]]]:
        """Yield each step of the exchange with the last arrival at each of its collectives."""
        if self._pending is None:
            return
        (steps, names, work), self._pending = self._pending, None
        largest, least, *latest = work.wait(self._timeout).tolist()
        last = dict(zip(names, latest, strict=False))
        if largest != -least:
            last = {}
            warning_once("ranks ran different collectives in one step: waits for slower ranks are not measured there")
        last = self._last | last
        for step in steps:
            self._last = {t.name: last.get(t.name, t.arrived) for t in step.transfers}
            yield step, self._last


class IntervalSums:
    """Sums ledgers over the steps of an interval, then over ranks."""

    def __init__(self, group: dist.ProcessGroup, *, timeout: float) -> None:
        self._tree, self._timeout = TreeCollectives(GlooWire(group, tag=2)), timeout
        self._rank, self._world_size = group.rank(), group.size()
        self._sent: tuple[BackgroundWork[Tensor], int, int] | None = None
        self._reset()

    def _reset(self) -> None:
        self._own, self.steps = np.zeros(len(records.COLUMNS)), 0

    def add(self, ledger: Ledger) -> None:
        """Add a step of this rank."""
        self._own += records.ledger_row(ledger)
        self.steps += 1

    def send(self, step: int) -> None:
        """Start the sum over ranks of all steps up to this one, and begin a new interval."""
        table = torch.from_numpy(records.place_row(self._own, self._rank, self._world_size))
        work = BackgroundWork(lambda: self._tree.reduce(table, torch.add), name="sum of records")
        self._sent = work, step, self.steps
        self._reset()

    def receive(self, *, clock_bound: int) -> records.IntervalRecord | None:
        """Wait for the sum that was started, if any. Only rank 0 has it."""
        if self._sent is None:
            return None
        (work, step, steps), self._sent = self._sent, None
        total = work.wait(self._timeout)
        if self._rank:
            return None
        return records.build_interval(
            total.numpy(), step=step, steps=steps, world_size=self._world_size, clock_bound=clock_bound
        )
