"""Keeps the books of a run: what each rank did becomes ledgers, sums and files, behind the steps that follow.

When a step ends, it is cut off, and the marks of the one before it are read. Every few steps the ranks are asked when
the last of them came to each collective, and the time of those that were asked about before is shared out: the answer
has come long since, so nothing is ever waited for. What is kept and sent is bounded, however many ranks there are (see
`records`).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from freescale.bubbles import records
from freescale.bubbles.clock import Alignment, clock_of
from freescale.bubbles.events import RankStep
from freescale.bubbles.ledger import account
from freescale.bubbles.recorder import Flight, Marks, Recorder
from freescale.log import notice

T = TypeVar("T")
_ASK_EVERY = 16  # a collective costs more than all the marks of a step, so one speaks for several steps
_SLOTS = 64 * _ASK_EVERY


@dataclass(frozen=True)
class _Asked:
    """Steps whose last arrivals are on their way."""

    steps: list[RankStep]
    names: list[str]
    arrivals: Tensor
    work: dist.Work


class Bubbles:
    """Records where the time of a training goes. On every rank, after the process group was made:

    bubbles = Bubbles(Path("runs/mine"), steps=1000)
    for batch in bubbles.each("data", loader):
        with bubbles.during("forward"):
            ...
        bubbles.end_step()
    bubbles.close()
    """

    def __init__(self, folder: Path, *, steps: int, every: int = 10, device: torch.device | None = None) -> None:
        # A group of its own: its traffic must never come between training's collectives.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        self.recorder = Recorder(self._rank, clock_of(device or torch.device("cpu")))
        self.step = 0
        """How many were done; a resumed run sets it."""
        self._every = max(every, -(-steps // records.LINES))
        self._ask_every = min(_ASK_EVERY, self._every)
        self._sample_every = max(1, -(-steps // records.SAMPLED_STEPS))
        self._samples_here = self._rank % -(-self._ranks // records.SAMPLED_RANKS) == 0
        self._writer = records.Writer(folder)
        self._alignment = Alignment(group)
        self._align()
        self._unread: Marks | None = None
        self._read: list[RankStep] = []
        self._asked: _Asked | None = None
        self._last: dict[str, int] = {}
        self._samples: list[records.Sample] = []
        self._warm = False
        self._total, self._counted = np.zeros(len(records.COLUMNS)), 0
        self._summed: tuple[Tensor, dist.Work, int, int] | None = None
        self.recorder.restart()

    def during(self, cause: str) -> AbstractContextManager[None]:
        """Everything inside is of this cause: one of `events.CAUSES`."""
        return self.recorder.during(cause)

    def each(self, cause: str, values: Iterable[T]) -> Iterator[T]:
        """Pass values on; waiting for one is of this cause."""
        return self.recorder.each(cause, values)

    def end_step(self, work: float = 0.0) -> None:
        """The step ends here. `work`: what a cost model thinks of this rank's part of it."""
        self.step += 1
        marks = self.recorder.cut(self.step, work)
        with self.recorder.during("host"):
            self._move_on(marks)

    def restart(self) -> None:
        """What happened since the last step belongs to none: an evaluation, say."""
        self.recorder.restart()

    def close(self) -> None:
        """Work off what is still open. All ranks must come."""
        self._move_on(None)
        for _ in range(2):
            self._turn()
        if self._counted:
            self._sum_up(self.step)
        self._write_sum()

    def _move_on(self, marks: Marks | None) -> None:
        self._write_sum()
        if self._unread is not None:
            self._read.append(self.recorder.read(self._unread))
        self._unread = marks
        if len(self._read) == self._ask_every:
            self._turn()

    def _turn(self) -> None:
        """Share out what was asked about, and ask about what was read since."""
        if self._asked is not None:
            self._share_out(self._asked)
        self._asked = self._ask(self._read)
        self._read = []

    def _ask(self, steps: list[RankStep]) -> _Asked:
        """When did the last rank come to each collective that these steps began?"""
        mine = {t.name: t.arrived for step in steps for t in step.transfers if t.name not in self._last}
        if len(mine) > _SLOTS - 2:
            notice(f"{len(mine)} collectives in {len(steps)} steps: who came last is known of {_SLOTS - 2}")
        names = list(mine)[: _SLOTS - 2]
        digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")
        arrivals = torch.tensor([digest, -digest, *(mine[name] for name in names)] + [0] * (_SLOTS - 2 - len(names)))
        work = dist.all_reduce(arrivals, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        return _Asked(steps, names, arrivals, work)

    def _share_out(self, asked: _Asked) -> None:
        asked.work.wait()
        largest, least, *latest = asked.arrivals.tolist()
        came = dict(zip(asked.names, latest, strict=False))
        if largest != -least:
            came = {}
            notice("ranks came to different collectives in one step: nobody can say there who waited for whom")
        known = self._last | came  # what an earlier step began was answered then
        for step in asked.steps:
            last = {t.name: known.get(t.name, t.arrived) for t in step.transfers}
            self._count(step, last)
            self._last = last

    def _count(self, step: RankStep, last: dict[str, int]) -> None:
        if self._warm:
            self._total += records.row(account(step, last))
            self._counted += 1
        self._warm = True  # the first step of a process pays for what is done once
        if self._samples_here and step.step % self._sample_every == 0:
            self._samples.append(records.Sample(step, last))
        if step.step % self._every == 0 and self._counted:
            self._sum_up(step.step)

    def _sum_up(self, step: int) -> None:
        """Add up over all ranks what happened since the last time, and look at the clocks again."""
        self._write_sum()
        total = torch.from_numpy(records.placed(self._total, self._rank, self._ranks))
        work = dist.all_reduce(total, group=self._group, async_op=True)
        assert work is not None
        self._summed = (total, work, step, self._counted)
        self._total, self._counted = np.zeros(len(records.COLUMNS)), 0
        self._writer.samples(self._samples)
        self._samples.clear()
        self._align()

    def _write_sum(self) -> None:
        if self._summed is None:
            return
        total, work, step, steps = self._summed
        work.wait()
        self._summed = None
        if self._rank == 0:
            self._writer.interval(
                records.interval(
                    total.numpy(), step=step, steps=steps, ranks=self._ranks, clock_bound=self._clock_bound
                )
            )

    def _align(self) -> None:
        offset = self._alignment.measure()
        self.recorder.ahead, self._clock_bound = offset.add, offset.widest


def watched(hook: Callable[[Any, dist.GradBucket], Any], recorder: Recorder) -> Callable[..., Any]:
    """A communication hook of DDP that does what another one does, and has its traffic recorded.

    When the last bucket is on its way, the backward pass can do nothing but wait.
    """
    waiting: list[Flight] = []

    def watching(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        flight = recorder.arrive(f"bucket {bucket.index()}", "dense gradients")
        waiting.append(flight)
        future = hook(state, bucket)

        def landed(done: torch.futures.Future[Tensor]) -> Tensor:
            flight.landed()
            return done.value()

        future = future.then(landed)
        if bucket.is_last():
            for one in waiting:
                one.waits()
            waiting.clear()
        return future

    return watching
