"""The cost of each operation of a schedule: seconds of its lane, and a transfer. Pure.

The names are those of `overlap.schedule`. An unknown name is an error: a schedule that changes must change the
simulation. The speed of a rank comes from the figures of its device, or is fitted to a run (`fit_compute`).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from freescale.balance.placement import Floats
from freescale.bubbles.events import TRAFFIC, RankStep, Span, merge_intervals
from freescale.bubbles.records import StepSample
from freescale.errors import DataError
from freescale.overlap.schedule import Operation, Schedule
from freescale.simulate.cluster import Cluster
from freescale.simulate.network import Topology, TransferCost
from freescale.simulate.workload import ModelCost, RowRequests, StepLoad

_ID_BYTES, _FLOAT_BYTES = 8, 4
_WARM_UP_STEPS = 3
_MIN_VARIATION = 2.0
READ = Operation("read", "deferred", "data", (("prepare", -3),), batch=2)
"""Reads a batch while the two before it are computed."""
BALANCE = (
    READ,
    Operation("gather_lengths", "deferred", "samples", ("read",), batch=2),
    Operation("plan", "deferred", "host", ("gather_lengths",), batch=2),
    Operation("move_samples", "deferred", "samples", ("plan",), batch=2),
)
"""Reads and balances a batch, in a thread of its own."""


def with_host_work(schedule: Schedule) -> tuple[Operation, ...]:
    """Prepend the host's work between two steps, which begins with the fetch of the batch to prepare."""
    ahead = next(operation.batch for operation in schedule.operations if operation.name == "prepare")
    return Operation("begin", "host", "host", (("update_dense", -1 - ahead),), batch=ahead), *schedule.operations


@dataclass(frozen=True)
class DeviceModel:
    """The speed of one rank, in seconds."""

    step: float
    """Both passes, independent of the batch."""
    work: float
    """Both passes, per unit of work."""
    row: float
    """Lookup of a row."""
    update: float
    """Update of a row."""
    event: float
    """Preparation of a batch, per requested row."""
    byte: float
    """Packing, per byte sent."""
    dense: float
    """Dense optimizer step."""
    between: float
    """Host work between two steps."""
    forward: float = 1 / 3
    """Share of the forward pass in both."""

    def compute_seconds(self, model: ModelCost, load: StepLoad) -> Floats:
        """Return the seconds of both passes of a micro-batch, on every rank."""
        return (self.step + self.work * load.work) / model.micro_batches

    @staticmethod
    def from_cluster(cluster: Cluster, model: ModelCost) -> "DeviceModel":
        """Derive the speed from the figures of a device, without a measurement."""
        work, byte = 3 * 2 * model.products / (cluster.flops * cluster.efficiency), 1 / cluster.memory
        width = sum(table.dim * table.looked_up for table in model.tables) / model.looked_up
        row, event, dense = _FLOAT_BYTES * width * byte, _ID_BYTES * byte, 5 * model.dense_bytes * byte
        return DeviceModel(0.0, work, row, 3 * row, event, byte, dense, cluster.host)


class ComputeModel(NamedTuple):
    """The time of both passes, fitted to a run."""

    step: float
    """Seconds, independent of the batch."""
    work: float
    """Seconds per unit of work."""
    forward: float
    """Share of the forward pass."""
    error: float
    """Mean relative error."""

    def apply_to(self, device: DeviceModel) -> DeviceModel:
        """Return a device with this compute time."""
        return replace(device, step=self.step, work=self.work, forward=self.forward)


def fit_compute(samples: Mapping[int, Sequence[StepSample]]) -> ComputeModel:
    """Fit the compute time of ranks to the work of their batches, from the fully recorded steps of a run."""
    steps = [sample.step for number, ranks in samples.items() if number > _WARM_UP_STEPS for sample in ranks]
    forward, backward = np.array([_pass_seconds(step) for step in steps]).reshape(-1, 2).T
    work, seconds = np.array([step.work for step in steps]), forward + backward
    if not len(work) or not work.any() or not seconds.any():
        remedy = f"train for more than {_WARM_UP_STEPS} steps"
        raise DataError("the run kept too few whole steps", remedy=remedy)
    slope, base = float(seconds.sum() / work.sum()), 0.0
    if work.max() > _MIN_VARIATION * work.min():  # else the fixed cost cannot be separated from the cost of the work
        fitted = np.polyfit(work, seconds, 1)
        slope, base = fitted if (fitted >= 0).all() else (slope, base)
    error = np.abs(seconds - (base + slope * work)).mean() / seconds.mean()
    return ComputeModel(float(base), float(slope), float(forward.sum() / seconds.sum()), float(error))


def _pass_seconds(step: RankStep) -> tuple[float, float]:
    """Return the seconds of both passes: backward spans and the forward span before each. Lookups are forward spans."""
    passes = [span for span in step.spans if span.kind in ("forward", "backward")]
    pairs = [(a, b) for a, b in itertools.pairwise(passes) if (a.kind, b.kind) == ("forward", "backward")]
    return sum(busy_seconds(step, a) for a, _ in pairs), sum(busy_seconds(step, b) for _, b in pairs)


def busy_seconds(step: RankStep, span: Span) -> float:
    """Return the seconds of a span without waits for transfers."""
    transfer_waits = [wait for transfer in step.transfers for wait in transfer.waits]
    waits = merge_intervals([*transfer_waits, *((s.begin, s.end) for s in step.spans if s.kind in TRAFFIC)])
    waited = sum(max(0, min(end, span.end) - max(begin, span.begin)) for begin, end in waits)
    return (span.end - span.begin - waited) / 1e9


class OperationCost(NamedTuple):
    """Seconds of a lane with their cause, then an optional transfer of all ranks."""

    seconds: Floats
    cause: str
    transfer: TransferCost | None = None
    early: TransferCost | None = None
    """A part of the transfer that begins during the operation, at `early_from` of its seconds."""
    early_from: float = 0.0


_COMPUTED: dict[str, Callable[[DeviceModel, ModelCost, StepLoad], Floats]] = {
    "read": lambda _, __, load: 0 * load.work,
    "plan": lambda _, __, load: load.planning + 0 * load.work,
    "begin": lambda d, _, load: d.between + 0 * load.work,
    "prepare": lambda d, model, load: d.event * model.looked_up * load.events,
    "split": lambda d, _, load: d.event * _served(load),
    "look_up": lambda d, _, load: d.row * _served(load),
    "look_up_exclusive": lambda d, _, load: d.row * _served(load) * (1 - _requests(load).collisions),
    "look_up_collision": lambda d, _, load: d.row * _served(load) * _requests(load).collisions,
    "forward": lambda d, model, load: d.forward * d.compute_seconds(model, load),
    "backward": lambda d, model, load: (1 - d.forward) * d.compute_seconds(model, load),
    "update_rows": lambda d, _, load: d.update * _served(load),
    "update_urgent": lambda d, _, load: d.update * _served(load) * _requests(load).collisions,
    "update_deferred": lambda d, _, load: d.update * _served(load) * (1 - _requests(load).collisions),
    "read_replicated": lambda d, model, load: d.row * model.replicated_rows + 0 * load.work,  # at most
    "update_replicated": lambda d, model, load: d.update * model.replicated_rows + 0 * load.work,
    "update_dense": lambda d, _, load: d.dense + 0 * load.work,
}
"""Seconds of every rank."""
_TO_OWNERS: dict[str, Callable[[RowRequests], Floats]] = {
    "send_ids": lambda of: _ID_BYTES * of.rows,
    "send_gradients": lambda of: _FLOAT_BYTES * of.width * of.rows,
    "send_urgent_gradients": lambda of: _FLOAT_BYTES * of.width * of.shared,
    "send_deferred_gradients": lambda of: _FLOAT_BYTES * of.width * (of.rows - of.shared),
}
"""Bytes that every rank sends to the owners of its rows."""
_FROM_OWNERS: dict[str, Callable[[RowRequests], Floats]] = {
    "send_split": lambda of: 2 * of.rows / 8,
    "send_rows": lambda of: _FLOAT_BYTES * of.width * of.rows,
    "send_exclusive_rows": lambda of: _FLOAT_BYTES * of.width * (of.rows - of.shared),
    "send_collision_rows": lambda of: _FLOAT_BYTES * of.width * of.shared,
}
"""Bytes that every rank receives from the owners of its rows."""
_ROUNDS = {"send_ids": 2}
"""Ids take two rounds: counts, then ids. All others take one."""
_BY_WIDTH = {name for name in (*_TO_OWNERS, *_FROM_OWNERS) if name not in ("send_ids", "send_split")}
"""Sent once for the tables of each width. Ids and split bits of all tables are one transfer."""


def _requests(load: StepLoad) -> RowRequests:
    """Return the requests that reach the owners: of ranks, or of hosts."""
    return load.requests if load.merged is None else load.merged


def _served(load: StepLoad) -> Floats:
    return _requests(load).served_rows


class OperationCosts:
    """The costs of operations on one cluster. `sm_free`: deferred transfers use no SMs of a device."""

    def __init__(
        self,
        cluster: Cluster,
        device: DeviceModel,
        model: ModelCost,
        *,
        world_size: int,
        sm_free: bool,
        rng: np.random.Generator,
    ) -> None:
        self._topology, self._device, self._model = Topology(cluster, world_size, rng), device, model
        self.cluster, self.world_size, self.sm_free, self.rng = cluster, world_size, sm_free, rng
        self._deferred_efficiency = cluster.sm_free if sm_free else 1.0

    def cost(self, operation: Operation, load: StepLoad) -> OperationCost:
        """Return the cost of an operation in a step with this load."""
        name, deferred = operation.name, operation.lane == "deferred"
        if name in _COMPUTED:
            seconds = _COMPUTED[name](self._device, self._model, load)
            last = name == "backward" and operation.part == self._model.micro_batches - 1
            return self._last_backward(seconds) if last else OperationCost(seconds, operation.cause)
        transfer, size = self._transfer(name, load, chunked=deferred)
        transfer = transfer.at_efficiency(self._deferred_efficiency) if deferred else transfer
        return OperationCost(self._device.byte * size, "host", transfer)

    def _transfer(self, name: str, load: StepLoad, *, chunked: bool) -> tuple[TransferCost, Floats]:
        """Return a transfer and the bytes that each rank packs for it."""
        no_bytes = np.zeros(self.world_size)
        if name == "agree":
            return self._topology.all_reduce(3 * _ID_BYTES), no_bytes  # count, stop, partially applied
        if name == "reduce_replicated":
            size = self._model.replicated_bytes
            return self._topology.all_reduce(size), no_bytes + size
        if name == "gather_lengths":
            return self._gather_lengths(load), no_bytes
        if name == "move_samples":
            return self._move_samples(load, chunked=chunked), load.moved
        for incoming, table in ((False, _TO_OWNERS), (True, _FROM_OWNERS)):
            if name in table:
                rounds = _ROUNDS.get(name, 1) * (self._model.widths if name in _BY_WIDTH else 1)
                size, options = table[name](load.requests), {"incoming": incoming, "chunked": chunked}
                if load.merged is None:
                    transfer = self._topology.all_to_all(size, served=load.requests.served, **options)
                    return replace(transfer, latency=rounds * transfer.latency), size
                merged = table[name](load.merged)
                transfer = self._topology.two_level(
                    merged, passed=size, rounds=rounds, served=load.merged.served, **options
                )
                return transfer, size + merged
        raise NotImplementedError(f"the cost of operation '{name}' is not defined; add it to simulate.operations")

    def _gather_lengths(self, load: StepLoad) -> TransferCost:
        """Return the two rounds in which ranks gather counts, then lengths: all ranks, or those of a group.

        In groups, two rounds precede them: sums of the ranks of a group, then sums of groups.
        """
        ranks, sizes = self.world_size // load.groups, 3 * _ID_BYTES * load.samples / self.world_size
        lengths = self._topology.part(ranks).all_gather(sizes)
        if load.groups == 1:
            return replace(lengths, latency=2 * lengths.latency)
        between = self._topology.part(load.groups).latency
        return replace(lengths, latency=3 * lengths.latency + between, shares=None)

    def _move_samples(self, load: StepLoad, *, chunked: bool) -> TransferCost:
        """Return the transfer of samples. In groups, three rounds between groups precede it: counts, lengths, bytes."""
        transfer = self._topology.all_to_all(load.moved, chunked=chunked)
        if load.groups == 1:
            return transfer
        inside, between = (
            self._topology.part(ranks).latency for ranks in (self.world_size // load.groups, load.groups)
        )
        return replace(transfer, latency=inside + 3 * between)

    def _last_backward(self, seconds: Floats) -> OperationCost:
        """Return the backward pass that all-reduces dense gradients by bucket; nothing overlaps the last bucket."""
        size, last = self._model.dense_bytes, self._model.last_bytes
        early = self._topology.all_reduce(size - last) if last < size else None
        return OperationCost(seconds, "backward", self._topology.all_reduce(last), early, early_from=1.0 - last / size)
