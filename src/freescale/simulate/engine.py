"""Runs a schedule on a simulated clock: all ranks together, lane by lane, transfer by transfer.

It follows `overlap.executor`. On a CPU, one thread runs the host, compute and urgent lanes; a device has streams, so
every lane runs independently. A transfer begins when its last rank arrives. Time advances from the end of one transfer
to the next; operations that wait for no transfer run immediately, for all ranks together.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from freescale.balance.placement import Floats
from freescale.bubbles.events import TRAFFIC
from freescale.bubbles.records import IntervalRecord
from freescale.overlap.schedule import Operation, Schedule
from freescale.simulate.network import Flow, NetworkModel
from freescale.simulate.operations import BALANCE, READ, OperationCost, OperationCosts, with_host_work
from freescale.simulate.timeline import SimulatedTransfer, Timeline
from freescale.simulate.workload import StepLoad

Key = tuple[str, int]
"""An operation and the number of its batch."""
_PREFETCHED_STEPS = 2
"""A host runs at most this many steps ahead. The report omits as many: the first steps have no predecessor."""


class _IssuedOperation(NamedTuple):
    """An operation in the queue of a thread."""

    operation: Operation
    number: int
    """Number of its batch."""
    step: int
    thread: str
    nonblocking: bool
    """Whether its thread continues during the transfer."""
    issued_after: Key | None
    """The last operation of the step thread when this one was issued to another thread."""

    @property
    def key(self) -> Key:
        return self.operation.key, self.number


class Engine:
    """Simulates the steps of the ranks of a cluster, once."""

    def __init__(self, schedule: Schedule, costs: OperationCosts, loads: Sequence[StepLoad], *, balanced: bool) -> None:
        self._costs, self._loads, self._world_size = costs, loads, costs.world_size
        cluster = self._cluster = costs.cluster
        self._rng = costs.rng
        self._input_operations = BALANCE if balanced else (READ,)
        """The operations that read and balance a batch."""
        self._schedule = with_host_work(schedule)
        self._step_thread = "compute" if cluster.asynchronous else "main"
        """The thread whose time is attributed."""
        self._network, self._timeline = NetworkModel(), Timeline(self._world_size)
        self._lanes: dict[str, deque[_IssuedOperation]] = {}
        self._free: dict[str, Floats] = {}
        """The time at which each thread becomes free."""
        self._ends: dict[Key, Floats] = {}
        self._begun: dict[Key, Floats] = {}
        self._last_executed: dict[str, Key] = {}
        """The last operation of each thread."""
        self._last_issued: Key | None = None
        """The last operation issued to the step thread."""
        self._released: dict[Key, Floats] = {}
        """The time at which a nonblocking operation released its thread."""
        self._blocked_by: dict[Key, Key] = {}
        """The last dependency that delayed an operation, else its predecessor on the thread."""
        self._active: dict[Flow, tuple[_IssuedOperation, SimulatedTransfer] | None] = {}
        self._transfers: dict[Key, SimulatedTransfer] = {}
        self._jitter: dict[int, Floats] = {}
        self._overlapped_share = 0.0
        """The share of the previous step's compute that overlapped with traffic."""
        on_host = min(self._world_size, cluster.ranks_per_host)
        self._grace = cluster.in_flight * on_host / cluster.far
        """Seconds of chunks in flight when an urgent transfer begins."""
        self._slowdown = 1.0 + cluster.slow_by * (self._rng.random(self._world_size) < cluster.slow_share)

    def run(self) -> list[IntervalRecord]:
        """Simulate all steps and return their time by cause."""
        for step in range(-_PREFETCHED_STEPS, len(self._loads)):
            self._issue(step)
            self._run_step_thread()
            if step >= 0:
                self._timeline.ends[step] = self._free[self._step_thread]
                self._overlapped_share = self._timeline.overlapped_share(step, self._network.now)
        while self._active:
            self._complete_transfer()
        return [self._timeline.attribute(step) for step in range(_PREFETCHED_STEPS, len(self._loads) - 1)]

    def _issue(self, step: int) -> None:
        """Issue the operations of a step to their threads."""
        operations = (*self._input_operations, *self._schedule)
        for place, operation in enumerate(operations):
            number, thread = step + operation.batch, self._thread(operation)
            if 0 <= number < len(self._loads):
                following, key = operations[place + 1 :], (operation.key, number)
                awaited = any(key in _scheduled_dependencies(later, step) for later in following)
                nonblocking = thread == "main" and operation.lane in ("urgent", "dense") and not awaited
                lane = self._lanes.setdefault(thread, deque())
                issued_after = self._last_issued if thread == "deferred" else None
                lane.append(_IssuedOperation(operation, number, step, thread, nonblocking, issued_after))
                if thread == self._step_thread:
                    self._last_issued = operation.key, number

    def _run_step_thread(self) -> None:
        """Advance until the step thread has no operations left. Other threads may still have some."""
        self._run_ready()
        while self._lanes.get(self._step_thread):
            self._complete_transfer()
            self._run_ready()

    def _run_ready(self) -> None:
        """Execute all operations that wait for no transfer."""
        progressed = True
        while progressed:
            progressed = False
            for lane in self._lanes.values():
                while lane and self._can_begin(lane[0]):
                    self._execute(lane.popleft())
                    progressed = True

    def _can_begin(self, issued: _IssuedOperation) -> bool:
        active = (entry[0] for entry in self._active.values() if entry is not None)
        blocked = any(entry.thread == issued.thread and not entry.nonblocking for entry in active)
        after = issued.issued_after
        is_issued = after is None or after in self._released or after in self._ends
        return not blocked and is_issued and all(key in self._ends for key in self._dependencies(issued))

    def _execute(self, issued: _IssuedOperation) -> None:
        operation, number = issued.operation, issued.number
        cost = self._with_variation(operation, number, self._costs.cost(operation, self._loads[number]))
        start = self._begun[issued.key] = self._start(issued)
        end = start + cost.seconds
        self._add_span(issued, cost.cause, start, end)
        self._free[issued.thread] = end
        if issued.nonblocking:
            self._released[issued.key] = end
        if cost.transfer is None:
            self._ends[issued.key] = end
        else:
            self._send(issued, cost, start, end)

    def _send(self, issued: _IssuedOperation, cost: OperationCost, start: Floats, end: Floats) -> None:
        """Begin a transfer, after its early part if it has one."""
        operation, deferred = issued.operation, issued.operation.lane == "deferred"
        kind = operation.cause if operation.cause in TRAFFIC else "dense gradients"
        name, uses_sms = f"{issued.number}/{operation.key}", not (deferred and self._costs.sm_free)
        transfer = SimulatedTransfer(kind, name, end, deferred, uses_sms)
        self._timeline.transfers.append(transfer)
        self._transfers[issued.key] = transfer
        assert cost.transfer is not None
        yields = deferred and issued.thread != "samples"
        flow = Flow(cost.transfer, transfer.last_arrival, yields, not deferred, grace=self._grace)
        if cost.early is not None:
            ahead = float((start + cost.early_from * cost.seconds).max())
            flow.after = Flow(cost.early, ahead, yields, not deferred)
            self._active[flow.after] = None
            self._network.add(flow.after)
        self._active[flow] = issued, transfer
        self._network.add(flow)

    def _complete_transfer(self) -> None:
        """Advance to the end of the next transfer."""
        flow = self._network.next_end()
        entry = self._active.pop(flow)
        if entry is None:
            return
        issued, transfer = entry
        done = transfer.done = flow.cost.ends(flow.begin, self._network.now, self._world_size)
        self._ends[issued.key] = done
        if not issued.nonblocking:
            if issued.thread == self._step_thread:
                transfer.waits.append((self._free[issued.thread], done))
            self._free[issued.thread] = done

    def _start(self, issued: _IssuedOperation) -> Floats:
        """Return the start of an operation. Records the waits of the step thread."""
        now = self._free.get(issued.thread, np.zeros(self._world_size))
        if issued.thread in self._last_executed:
            self._blocked_by[issued.key] = self._last_executed[issued.thread]
        self._last_executed[issued.thread] = issued.key
        if issued.issued_after is not None:
            now = np.maximum(now, self._released.get(issued.issued_after, self._ends.get(issued.issued_after, now)))
        # In the order of the executor: urgent transfers first, then deferred ones.
        is_last = lambda key: key not in self._transfers or self._transfers[key].alone  # noqa: E731
        for key in sorted(self._dependencies(issued), key=is_last):
            available = np.maximum(now, self._ends[key])
            if (available > now).any():
                self._blocked_by[issued.key] = key
                if issued.thread == self._step_thread:
                    self._record_wait(issued, key, now, available)
            now = available
        return now

    def _record_wait(self, issued: _IssuedOperation, key: Key, since: Floats, until: Floats) -> None:
        """Record the wait of a step for an operation, and for what delayed the start of that operation."""
        transfer = self._transfers.get(key)
        if key[0] == self._input_operations[-1].key:
            self._add_span(issued, "data", since, until)
            return
        arrived = np.clip(self._begun[key] if transfer is None else transfer.arrived, since, until)
        if transfer is not None and not transfer.alone:
            transfer.waits.append((arrived, until))
        else:
            # A host that waits for its own thread cannot see what delays that thread.
            arrived = arrived if transfer is None or self._cluster.asynchronous else since
            self._add_span(issued, "host" if transfer is None else transfer.kind, arrived, until)
        if (arrived > since).any() and key in self._blocked_by:
            self._record_wait(issued, self._blocked_by[key], since, arrived)

    def _add_span(self, issued: _IssuedOperation, cause: str, begin: Floats, end: Floats) -> None:
        if issued.thread == self._step_thread:
            self._timeline.add_span(issued.step, cause, begin, end)

    def _dependencies(self, issued: _IssuedOperation) -> list[Key]:
        """Return the operations that must have ended: those of the schedule and the implicit ones."""
        scheduled = _scheduled_dependencies(issued.operation, issued.step)
        dependencies = [key for key in scheduled if 0 <= key[1] < len(self._loads)]
        if issued.operation.name == "prepare":
            dependencies.append(("begin", issued.number))
        if issued.operation.name == "begin":
            dependencies.append((self._input_operations[-1].key, issued.number))
            if issued.number >= _PREFETCHED_STEPS:
                dependencies.append((self._schedule[-1].key, issued.number - _PREFETCHED_STEPS))
        if (lane := issued.operation.lane) in ("urgent", "dense"):  # a lane runs one operation at a time
            active = (entry[0] for entry in self._active.values() if entry is not None)
            dependencies += [other.key for other in active if other.nonblocking and other.operation.lane == lane]
        return dependencies

    def _thread(self, operation: Operation) -> str:
        if operation in self._input_operations:
            return "samples"
        return operation.lane if self._cluster.asynchronous or operation.lane == "deferred" else "main"

    def _with_variation(self, operation: Operation, number: int, cost: OperationCost) -> OperationCost:
        """Apply jitter, slow ranks, contention and data stalls."""
        cluster, seconds = self._cluster, cost.seconds
        if operation.name in ("forward", "backward"):
            if number not in self._jitter:  # a rank keeps its jitter for a whole step
                self._jitter[number] = np.exp(cluster.jitter * self._rng.standard_normal(self._world_size))
            contention = 1.0 + cluster.contention * self._overlapped_share
            seconds = seconds * self._jitter[number] * self._slowdown * contention
        elif operation is READ and cluster.stall_share:
            late = self._rng.random(self._world_size) < cluster.stall_share
            seconds = seconds + late * self._rng.exponential(cluster.stall, self._world_size)
        return cost._replace(seconds=seconds)


def _scheduled_dependencies(operation: Operation, step: int) -> list[Key]:
    return [(key, step + batch) for key, batch in operation.dependencies()]
