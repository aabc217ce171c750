"""What each operation of a schedule takes: seconds of its lane, and a transfer. Pure.

The names are those of `overlap.schedule`. One that is not known here is an error: a schedule that changed must change
what is simulated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from freescale.balance.placement import Floats
from freescale.overlap.schedule import Operation, Schedule
from freescale.simulate.cluster import Cluster
from freescale.simulate.network import Demand, Topology
from freescale.simulate.workload import Load, Model

_ID, _NUMBER = 8, 4
READ = Operation("read", "deferred", "data", (("prepare", -3),), batch=2)
"""A batch is read while the two before it are computed."""
BALANCE = (
    READ,
    Operation("gather_lengths", "deferred", "samples", ("read",), batch=2),
    Operation("plan", "deferred", "host", ("gather_lengths",), batch=2),
    Operation("move_samples", "deferred", "samples", ("plan",), batch=2),
)
"""And then dealt, in a thread of its own."""


def begun(schedule: Schedule) -> tuple[Operation, ...]:
    """A schedule behind what its host does between two steps, beginning with a look for the batch to prepare."""
    ahead = next(operation.batch for operation in schedule.operations if operation.name == "prepare")
    return Operation("begin", "host", "host", (("update_dense", -1 - ahead),), batch=ahead), *schedule.operations


@dataclass(frozen=True)
class Machine:
    """How quick one rank is. Seconds."""

    step: float
    """Of both passes, whatever a batch holds."""
    work: float
    """Per unit of work, of both passes."""
    row: float
    """To look a row up."""
    update: float
    """To change a row."""
    event: float
    """To lay a batch out, per row that it asks for."""
    byte: float
    """To pack what is sent, per byte."""
    dense: float
    """To change the dense part."""
    between: float
    """Between two steps."""
    forward: float = 1 / 3
    """Share of the forward pass in both."""

    def computes(self, model: Model, load: Load) -> Floats:
        """Both passes of a micro-batch, on every rank."""
        return (self.step + self.work * load.work) / model.micro_batches

    @staticmethod
    def of(cluster: Cluster, model: Model) -> "Machine":
        """From the figures of a device: nothing was measured there."""
        work, byte = 3 * 2 * model.products / (cluster.flops * cluster.efficiency), 1 / cluster.memory
        row, event, dense = _NUMBER * model.dim * byte, _ID * byte, 5 * model.dense_bytes * byte
        return Machine(0.0, work, row, 3 * row, event, byte, dense, cluster.host)


class Task(NamedTuple):
    """Seconds of a lane under some cause, then a transfer that all ranks take part in; either may be missing."""

    seconds: Floats
    cause: str
    demand: Demand | None = None
    early: Demand | None = None
    """A part of the transfer that begins on the way, at `from_share` of the seconds."""
    from_share: float = 0.0


_COMPUTED: dict[str, Callable[[Machine, Model, Load], Floats]] = {
    "read": lambda _, __, load: 0 * load.work,
    "plan": lambda _, __, load: load.planning + 0 * load.work,
    "begin": lambda m, _, load: m.between + 0 * load.work,
    "prepare": lambda m, model, load: m.event * model.looked_up * load.events,
    "split": lambda m, _, load: m.event * load.rows,
    "look_up": lambda m, _, load: m.row * load.rows,
    "look_up_exclusive": lambda m, _, load: m.row * (load.rows - load.shared),
    "look_up_collision": lambda m, _, load: m.row * load.shared,
    "forward": lambda m, model, load: m.forward * m.computes(model, load),
    "backward": lambda m, model, load: (1 - m.forward) * m.computes(model, load),
    "update_rows": lambda m, _, load: m.update * load.rows,
    "update_urgent": lambda m, _, load: m.update * load.shared,
    "update_deferred": lambda m, _, load: m.update * (load.rows - load.shared),
    "update_dense": lambda m, _, load: m.dense + 0 * load.work,
}
"""Seconds of every rank."""
_TO_OWNERS: dict[str, Callable[[Model, Load], Floats]] = {
    "send_ids": lambda _, load: _ID * load.rows,
    "send_gradients": lambda model, load: _NUMBER * model.dim * load.rows,
    "send_urgent_gradients": lambda model, load: _NUMBER * model.dim * load.shared,
    "send_deferred_gradients": lambda model, load: _NUMBER * model.dim * (load.rows - load.shared),
    "move_samples": lambda _, load: load.moved,
}
"""Bytes that every rank sends, to all others alike."""
_FROM_OWNERS: dict[str, Callable[[Model, Load], Floats]] = {
    "send_split": lambda _, load: 2 * load.rows / 8,
    "send_rows": lambda model, load: _NUMBER * model.dim * load.rows,
    "send_exclusive_rows": lambda model, load: _NUMBER * model.dim * (load.rows - load.shared),
    "send_collision_rows": lambda model, load: _NUMBER * model.dim * load.shared,
}
"""Bytes that come to every rank, from all others alike."""


class Operations:
    """What operations take on one cluster. `sm_free`: whether what is deferred spares the cores of a device."""

    def __init__(
        self,
        cluster: Cluster,
        machine: Machine,
        model: Model,
        *,
        world_size: int,
        sm_free: bool,
        rng: np.random.Generator,
    ) -> None:
        self._topology, self._machine, self._model = Topology(cluster, world_size, rng), machine, model
        self.cluster, self.world_size, self.sm_free, self.rng = cluster, world_size, sm_free, rng
        self._share = cluster.sm_free if sm_free else 1.0

    def task(self, operation: Operation, load: Load) -> Task:
        """What an operation takes in a step with this load."""
        name, deferred = operation.name, operation.lane == "deferred"
        if name in _COMPUTED:
            seconds = _COMPUTED[name](self._machine, self._model, load)
            last = name == "backward" and operation.part == self._model.micro_batches - 1
            return self._adds_up(seconds) if last else Task(seconds, operation.cause)
        demand, size = self._demand(name, load, whole=not deferred)
        return Task(self._machine.byte * size, "host", demand.slower(self._share) if deferred else demand)

    def _demand(self, name: str, load: Load, *, whole: bool) -> tuple[Demand, Floats]:
        """A transfer, and the bytes that each rank packs for it."""
        nothing = np.zeros(self.world_size)
        if name == "agree":
            return self._topology.all_reduce(3 * _ID), nothing  # count, stop, partially applied
        if name == "gather_lengths":
            told = self._topology.all_gather(3 * _ID * load.samples / self.world_size)
            return replace(told, latency=2 * told.latency), nothing  # first how many samples, then their lengths
        for comes, table in ((False, _TO_OWNERS), (True, _FROM_OWNERS)):
            if name in table:
                size = table[name](self._model, load)
                demand = self._topology.all_to_all(size, comes=comes, whole=whole)
                # Ids go in two rounds: how many, then which.
                return (replace(demand, latency=2 * demand.latency) if name == "send_ids" else demand), size
        raise NotImplementedError(f"nobody has said what '{name}' takes; do so in simulate.operations")

    def _adds_up(self, seconds: Floats) -> Task:
        """Gradients of the dense part are added up bucket by bucket, the last one when all is computed."""
        size, last = self._model.dense_bytes, self._model.last_bytes
        early = self._topology.all_reduce(size - last) if last < size else None
        return Task(seconds, "backward", self._topology.all_reduce(last), early, from_share=1.0 - last / size)
