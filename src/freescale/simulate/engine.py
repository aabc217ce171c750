"""Runs a schedule on a clock: all ranks at once, lane by lane, transfer by transfer.

It follows `overlap.executor`. A CPU does what is on its host, compute and urgent lanes in one thread; a device has
streams, so every lane goes on by itself. A transfer begins when its last rank has come, and time goes on from the end
of one transfer to the end of the next; whatever waits for none is done at once, for all ranks together.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from freescale.balance.placement import Floats
from freescale.bubbles.events import TRAFFIC
from freescale.bubbles.records import IntervalRecord
from freescale.overlap.schedule import Operation, Schedule
from freescale.simulate.books import Books, Sent
from freescale.simulate.network import Flow, Network
from freescale.simulate.operations import BALANCE, READ, Operations, Task, begun
from freescale.simulate.workload import Load

Key = tuple[str, int]
"""An operation, and the number of its batch."""
_AHEAD = 2
"""Steps that are left out: the first ones have nothing behind them, and a host runs no further ahead."""


class _Ordered(NamedTuple):
    """An operation that was issued."""

    operation: Operation
    number: int
    """Of its batch."""
    step: int
    thread: str
    begun: bool
    """Whether its thread goes on while it travels."""
    issued_behind: Key | None
    """What the thread of the step had done when this was given to another thread."""

    @property
    def key(self) -> Key:
        return self.operation.key, self.number


class Engine:
    """Some ranks of a cluster, going through steps once."""

    def __init__(self, schedule: Schedule, operations: Operations, loads: Sequence[Load], *, balanced: bool) -> None:
        self._operations, self._loads, self._world_size = operations, loads, operations.world_size
        cluster = self._cluster = operations.cluster
        self._rng = operations.rng
        self._brings = BALANCE if balanced else (READ,)
        """What brings a batch."""
        self._schedule = begun(schedule)
        self._step_thread = "compute" if cluster.asynchronous else "main"
        """The one whose time is shared out."""
        self._network, self._books = Network(), Books(self._world_size)
        self._lanes: dict[str, deque[_Ordered]] = {}
        self._free: dict[str, Floats] = {}
        """When each thread has done what it was given."""
        self._ends: dict[Key, Floats] = {}
        self._begun: dict[Key, Floats] = {}
        self._latest: dict[str, Key] = {}
        """What each thread did last."""
        self._issued_last: Key | None = None
        """To the thread of the step."""
        self._passed: dict[Key, Floats] = {}
        """When the thread went on from what it only began."""
        self._held_up_by: dict[Key, Key] = {}
        """What an operation waited for last: of its needs, or else of its thread."""
        self._travelling: dict[Flow, tuple[_Ordered, Sent] | None] = {}
        self._sent: dict[Key, Sent] = {}
        self._varies: dict[int, Floats] = {}
        self._beside = 0.0
        """Of the compute of the step before, how much had traffic beside it."""
        on_host = min(self._world_size, cluster.ranks_per_host)
        self._grace = cluster.in_flight * on_host / cluster.far
        """Seconds of pieces that are under way when something urgent begins."""
        self._slow = 1.0 + cluster.slow_by * (self._rng.random(self._world_size) < cluster.slow_share)

    def run(self) -> list[IntervalRecord]:
        """Go through all steps; gives where their time went."""
        for step in range(-_AHEAD, len(self._loads)):
            self._issue(step)
            self._settle()
            if step >= 0:
                self._books.ends[step] = self._free[self._step_thread]
                self._beside = self._books.behind_traffic(step, self._network.now)
        while self._travelling:
            self._land()
        return [self._books.shared_out(step) for step in range(_AHEAD, len(self._loads) - 1)]

    def _issue(self, step: int) -> None:
        """Give the operations of a step to their threads."""
        issued = (*self._brings, *self._schedule)
        for place, operation in enumerate(issued):
            number, thread = step + operation.batch, self._thread(operation)
            if 0 <= number < len(self._loads):
                needed = any((operation.key, number) in _needed(later, step) for later in issued[place + 1 :])
                begun = thread == "main" and operation.lane == "urgent" and not needed
                lane = self._lanes.setdefault(thread, deque())
                behind = self._issued_last if thread == "deferred" else None
                lane.append(_Ordered(operation, number, step, thread, begun, behind))
                if thread == self._step_thread:
                    self._issued_last = operation.key, number

    def _settle(self) -> None:
        """Go on until the thread of the step has done what it was given; others may still be at it."""
        self._work()
        while self._lanes.get(self._step_thread):
            self._land()
            self._work()

    def _work(self) -> None:
        """Do whatever waits for no transfer."""
        moved = True
        while moved:
            moved = False
            for lane in self._lanes.values():
                while lane and self._can_begin(lane[0]):
                    self._do(lane.popleft())
                    moved = True

    def _can_begin(self, ordered: _Ordered) -> bool:
        own = (one[0] for one in self._travelling.values() if one is not None)
        held = any(one.thread == ordered.thread and not one.begun for one in own)
        behind = ordered.issued_behind
        issued = behind is None or behind in self._passed or behind in self._ends
        return not held and issued and all(key in self._ends for key in self._needs(ordered))

    def _do(self, ordered: _Ordered) -> None:
        operation, number = ordered.operation, ordered.number
        task = self._varied(operation, number, self._operations.task(operation, self._loads[number]))
        start = self._begun[ordered.key] = self._start(ordered)
        end = start + task.seconds
        self._note(ordered, task.cause, start, end)
        self._free[ordered.thread] = end
        if ordered.begun:
            self._passed[ordered.key] = end
        if task.demand is None:
            self._ends[ordered.key] = end
        else:
            self._send(ordered, task, start, end)

    def _send(self, ordered: _Ordered, task: Task, start: Floats, end: Floats) -> None:
        """Begin a transfer, behind what went ahead of it."""
        operation, behind = ordered.operation, ordered.operation.lane == "deferred"
        kind = operation.cause if operation.cause in TRAFFIC else "dense gradients"
        sent = Sent(kind, f"{ordered.number}/{operation.key}", end, behind, not (behind and self._operations.sm_free))
        self._books.sent.append(sent)
        self._sent[ordered.key] = sent
        assert task.demand is not None
        yields = behind and ordered.thread != "samples"
        flow = Flow(task.demand, sent.last, yields, not behind, grace=self._grace)
        if task.early is not None:
            ahead = float((start + task.from_share * task.seconds).max())
            flow.behind = Flow(task.early, ahead, yields, not behind)
            self._travelling[flow.behind] = None
            self._network.add(flow.behind)
        self._travelling[flow] = ordered, sent
        self._network.add(flow)

    def _land(self) -> None:
        """Go on to the end of a transfer."""
        flow = self._network.next_end()
        landed = self._travelling.pop(flow)
        if landed is None:
            return
        ordered, sent = landed
        here = sent.done = flow.demand.ends(flow.begin, self._network.now, self._world_size)
        self._ends[ordered.key] = here
        if not ordered.begun:
            if ordered.thread == self._step_thread:
                sent.waits.append((self._free[ordered.thread], here))
            self._free[ordered.thread] = here

    def _start(self, ordered: _Ordered) -> Floats:
        """When an operation can begin. What the thread of the step waits for meanwhile is written down."""
        now = self._free.get(ordered.thread, np.zeros(self._world_size))
        if ordered.thread in self._latest:
            self._held_up_by[ordered.key] = self._latest[ordered.thread]
        self._latest[ordered.thread] = ordered.key
        if ordered.issued_behind is not None:
            now = np.maximum(now, self._passed.get(ordered.issued_behind, self._ends.get(ordered.issued_behind, now)))
        # As the executor does: first for what was begun, then for what is deferred.
        for key in sorted(self._needs(ordered), key=lambda key: key not in self._sent or self._sent[key].alone):
            there = np.maximum(now, self._ends[key])
            if (there > now).any():
                self._held_up_by[ordered.key] = key
                if ordered.thread == self._step_thread:
                    self._waits(ordered, key, now, there)
            now = there
        return now

    def _waits(self, ordered: _Ordered, key: Key, since: Floats, until: Floats) -> None:
        """Write down what a step waits for. If that began late itself, it was held up by something else before."""
        sent = self._sent.get(key)
        if key[0] == self._brings[-1].key:
            self._note(ordered, "data", since, until)
            return
        came = np.clip(self._begun[key] if sent is None else sent.arrived, since, until)
        if sent is not None and not sent.alone:
            sent.waits.append((came, until))
        else:
            # A host that waits for a thread of its own does not know what that one waits for.
            came = came if sent is None or self._cluster.asynchronous else since
            self._note(ordered, "host" if sent is None else sent.kind, came, until)
        if (came > since).any() and key in self._held_up_by:
            self._waits(ordered, self._held_up_by[key], since, came)

    def _note(self, ordered: _Ordered, cause: str, begin: Floats, end: Floats) -> None:
        if ordered.thread == self._step_thread:
            self._books.note(ordered.step, cause, begin, end)

    def _needs(self, ordered: _Ordered) -> list[Key]:
        """What must have ended: what the schedule says, and what it need not say."""
        found = [key for key in _needed(ordered.operation, ordered.step) if 0 <= key[1] < len(self._loads)]
        if ordered.operation.name == "prepare":
            found.append(("begin", ordered.number))
        if ordered.operation.name == "begin":
            found.append((self._brings[-1].key, ordered.number))
            if ordered.number >= _AHEAD:
                found.append((self._schedule[-1].key, ordered.number - _AHEAD))
        if ordered.operation.lane == "urgent":  # a lane does one thing at a time
            found += [one[0].key for one in self._travelling.values() if one is not None and one[0].begun]
        return found

    def _thread(self, operation: Operation) -> str:
        if operation in self._brings:
            return "samples"
        return operation.lane if self._cluster.asynchronous or operation.lane == "deferred" else "main"

    def _varied(self, operation: Operation, number: int, task: Task) -> Task:
        """Compute varies and gives way to traffic; now and then data comes late."""
        cluster, seconds = self._cluster, task.seconds
        if operation.name in ("forward", "backward"):
            if number not in self._varies:  # a rank is slower or quicker in a whole step
                self._varies[number] = np.exp(cluster.jitter * self._rng.standard_normal(self._world_size))
            seconds = seconds * self._varies[number] * self._slow * (1.0 + cluster.contention * self._beside)
        elif operation is READ and cluster.stall_share:
            late = self._rng.random(self._world_size) < cluster.stall_share
            seconds = seconds + late * self._rng.exponential(cluster.stall, self._world_size)
        return task._replace(seconds=seconds)


def _needed(operation: Operation, step: int) -> list[Key]:
    return [(key, step + batch) for key, batch in operation.dependencies()]
