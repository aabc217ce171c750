"""Keeps the books of a run: what each rank did becomes ledgers, sums and files, behind the steps that follow.

When a step ends, it is cut off, and the marks of the one before it are read. Every few steps the ranks are asked who
came last, and the time of the steps that were asked about before is shared out; every interval the sums go to rank 0,
which writes them down. No step waits for another rank here, but for comparing clocks between hosts once in a while; and
what is kept is bounded (see `records`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from freescale.bubbles import records
from freescale.bubbles.clock import Alignment, clock_of, device_name
from freescale.bubbles.events import RankStep
from freescale.bubbles.gather import Arrivals, Sums
from freescale.bubbles.ledger import account, computed
from freescale.bubbles.recorder import Marks, Recorder
from freescale.bubbles.ring import Ring

T = TypeVar("T")
_ALIGN_EVERY = 16  # intervals: between hosts it is a meeting of all ranks, the only one
_ASK_EVERY = 16  # a collective costs more than all the marks of a step, so one speaks for several steps


class Bubbles:
    """Records where the time of a training goes. On every rank, after the process group was made:

    bubbles = Bubbles(Path("runs/mine"), steps=1000)
    for batch in bubbles.each("data", loader):
        with bubbles.during("forward"):
            ...
        bubbles.end_step()
    bubbles.close()
    """

    def __init__(
        self, folder: Path, *, steps: int, every: int = 10, device: torch.device | None = None, timeout: float = 600.0
    ) -> None:
        # A group of its own: its traffic must never come between training's collectives.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        assert isinstance(group, dist.ProcessGroup)
        self._ring = Ring(folder, group.rank())
        self.recorder = Recorder(group.rank(), clock_of(device), self._ring)
        self.step = 0
        """How many were done; a resumed run sets it."""
        self.watcher: Callable[[int, int], None] | None = None
        """Is told how many nanoseconds this rank computed in a step, when the next one ends."""
        self._is_rank_zero = group.rank() == 0
        self._every = max(every, -(-steps // records.LINES))
        self._ask_every = min(_ASK_EVERY, self._every)
        self._sample_every = max(1, -(-steps // records.SAMPLED_STEPS))
        self._samples_here = group.rank() % -(-group.size() // records.SAMPLED_RANKS) == 0
        self._arrivals, self._sums, self._alignment = Arrivals(group), Sums(group), Alignment(group)
        self._writer = records.Writer(folder)
        if self._is_rank_zero:
            self._writer.machine(records.Machine(device_name(device), group.size()))
        self._unread: Marks | None = None
        self._read: list[RankStep] = []
        self._samples: list[records.Sample] = []
        self._warm, self._intervals = False, 0
        self._align()
        self.restart()

    def during(self, cause: str) -> AbstractContextManager[None]:
        """Everything inside is of this cause: one of `events.CAUSES`."""
        return self.recorder.during(cause)

    def each(self, cause: str, values: Iterable[T]) -> Iterator[T]:
        """Pass values on; waiting for one is of this cause."""
        return self.recorder.each(cause, values)

    def restart(self) -> None:
        """What happened since the last step belongs to none: an evaluation, say."""
        self.recorder.restart()

    def end_step(self, work: float = 0.0) -> None:
        """The step ends here. `work`: what a cost model thinks of this rank's part of it."""
        if self._is_rank_zero and not self._intervals and self._unread is None:
            self._writer.forget_after(self.step)
        self.step += 1
        marks = self.recorder.cut(self.step, work)
        with self.recorder.during("host"):
            self._read_and_keep(marks)
            self._write_interval()
            if len(self._read) == self._ask_every:
                self._ask()

    def close(self) -> None:
        """Work off what is still open: the run has ended well. All ranks must come."""
        self._work_off()
        self._ring.remove()

    def _work_off(self) -> None:
        self._read_and_keep(None)
        self._ask()
        self._share_out()
        if self._sums.steps:
            self._end_interval(self.step)
        self._write_interval()

    def go_back(self, step: int) -> None:
        """Steps beyond this one will be done again. All ranks must come."""
        self._work_off()
        self.step, self._warm, self._intervals = step, False, 0
        self.restart()

    def _read_and_keep(self, marks: Marks | None) -> None:
        """Marks can be read without waiting a step after they were made."""
        if self._unread is not None:
            step = self.recorder.read(self._unread)
            self._read.append(step)
            if self.watcher is not None:
                self.watcher(step.step, computed(step))
        self._unread = marks

    def _ask(self) -> None:
        """Share out what was asked about before, and ask about what was read since."""
        self._share_out()
        self._arrivals.ask(self._read)
        self._read = []

    def _share_out(self) -> None:
        for step, last in self._arrivals.answered():
            if self._warm:
                self._sums.add(account(step, last))
            self._warm = True  # the first step of a process pays for what is done once
            if self._samples_here and step.step % self._sample_every == 0:
                self._samples.append(records.Sample(step, last))
            if self._sums.steps and step.step % self._every == 0:
                self._end_interval(step.step)

    def _end_interval(self, step: int) -> None:
        self._write_interval()
        self._sums.send(step)
        self._writer.samples(self._samples)
        self._samples.clear()
        self._intervals += 1
        if self._intervals % _ALIGN_EVERY == 0:
            self._align()

    def _write_interval(self) -> None:
        interval = self._sums.received(clock_bound=self._clock_bound)
        if interval is not None and self._is_rank_zero:
            self._writer.interval(interval)

    def _align(self) -> None:
        """Clocks drift, so they are compared again now and then. Ranks of one host have nothing to do here."""
        offset = self._alignment.measure()
        self.recorder.ahead, self._clock_bound = offset.add, offset.widest
