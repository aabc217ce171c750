"""One step, top to bottom.

`overlap.schedule` says in which order the operations of a step run, and on which batch; the methods of `Step` say what
they do. They stand in the order in which a serial step runs them, followed by those for rows that travel part by part.
What one operation leaves for the next lies in `Flight`.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from freescale.bubbles.recorder import Flight as Transfer
from freescale.bubbles.recorder import Recorder
from freescale.data.batch import Batch
from freescale.embedding.exchange import Exchange, Parts, Route
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.split import Shared, split
from freescale.embedding.unique import Wanted
from freescale.overlap.executor import Executor
from freescale.overlap.schedule import Operation, Schedule
from freescale.train.network import Network
from freescale.transport.c10d import C10d
from freescale.transport.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Rates:
    """Learning rates of one step."""

    dense: float
    tables: float


@dataclass
class Flight:
    """One batch on its way, through one step or, where rows travel behind compute, through three."""

    batch: Batch
    stop: bool
    """At first whether this rank was asked to end after the step; once agreed, whether any rank was."""
    before: "Flight | None" = None
    """The batch before, until it is known which rows both have."""
    rates: Rates = Rates(0.0, 0.0)
    """Of the step that computes it."""
    parts: list[Any] = field(default_factory=list)
    """Inputs of each micro-batch."""
    wanted: list[dict[str, Wanted]] = field(default_factory=list)
    """Of each micro-batch: the distinct ids of the whole batch, and where its own ids stand among them."""
    count: int = 0
    """Terms of the loss: of this rank, and once agreed of all ranks."""
    route: Route | None = None
    shared: dict[str, Shared] = field(default_factory=dict)
    """Of own rows that were asked for: which are in the batch before too, and which of that one's are in this."""
    arrives: Parts | None = None
    """How rows come: those that the batch before has too, and the others."""
    leaves: Parts | None = None
    """How gradients go: those of rows that the next batch has too, and the others. None without a next one."""
    looked_up: dict[str, Tensor] = field(default_factory=dict)
    """Own rows that are about to be sent."""
    collided: dict[str, Tensor] = field(default_factory=dict)
    """The same, of those that the batch before has too."""
    rows: dict[str, Tensor] | None = None
    """Rows that travelled here. Their gradients gather in them."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of own rows, from all ranks."""
    put_off: dict[str, Tensor] = field(default_factory=dict)
    """The same, of those that came behind the next step."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's share of the mean loss, by micro-batch."""

    @property
    def loss(self) -> float:
        """This rank's share of the mean loss."""
        return float(torch.stack([loss.detach() for loss in self.losses]).sum())

    @property
    def row_gradients(self) -> dict[str, Tensor]:
        """Of all rows that travelled here."""
        rows = given(self.rows)
        return {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in rows.items()}


class Step:
    """What the operations of a schedule do."""

    def __init__(
        self,
        parallel: DistributedDataParallel,
        tables: ShardedTables | None,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        world: World,
        recorder: Recorder,
        *,
        deferred: C10d | None = None,
        micro_batches: int = 1,
        clip: float = 0.0,
        autocast: bool = False,
        strictly_serial: bool = False,
    ) -> None:
        self._parallel, self._tables, self._optimizer = parallel, tables, optimizer
        self._network: Network = parallel.module
        self._world, self._recorder = world, recorder
        self._micro_batches, self._clip, self._autocast = micro_batches, clip, autocast
        self._transports = {"urgent": world.transport, "deferred": deferred or world.transport}
        self._executor = Executor(schedule, self._do, recorder.waiting, strictly_serial=strictly_serial)
        self._deferred_cause = ""
        if deferred is not None:
            deferred.watcher = self._watch_deferred
            given(tables).add_lane("deferred", deferred)
        self.looks_ahead = any(operation.batch > 0 for operation in schedule.operations)
        self._flights: dict[int, Flight] = {}
        self._number = 0

    def run(self, batch: Batch, rates: Rates, *, stop: bool = False, following: Batch | None = None) -> Flight:
        """Train on one batch. `stop`: this rank was asked to end; all ranks learn of it in the same step.

        `following`: the batch of the next call; what a schedule fetches ahead is fetched for it.
        """
        number = self._number
        if number not in self._flights:
            self.settle()
            self._flights = {number: Flight(batch, stop)}
            self._executor.run(number - 1, lambda known: known == number)
        flight = self._flights[number]
        flight.rates = rates
        if following is not None and self.looks_ahead:
            self._flights[number + 1] = Flight(following, stop, before=flight)
        self._executor.run(number, self._flights.__contains__)
        self._flights.pop(number - 2, None)
        self._number += 1
        return flight

    def settle(self) -> None:
        """Bring the tables to where they stand after the last step, whatever was put off."""
        if self._number - 1 in self._flights:
            self._executor.settle(self._number - 1)

    def close(self) -> None:
        """End what runs beside the step."""
        self._executor.close()

    def _do(self, operation: Operation, number: int) -> None:
        flight, does = self._flights[number], getattr(self, operation.name)
        if operation.lane == "deferred" and self._executor.overlaps:  # another thread: only its traffic is recorded
            self._deferred_cause = operation.cause
            does(flight, operation)
            return
        with self._recorder.during(operation.cause):
            does(flight, operation)

    def _watch_deferred(self, name: str) -> Transfer:
        if not self._executor.overlaps:
            return self._recorder.arrive(name)
        return self._recorder.arrive(name, self._deferred_cause, alone=True)

    def prepare(self, flight: Flight, _: Operation) -> None:
        """Lay the batch out and find the distinct ids whose rows it needs."""
        batch = flight.batch.to(self._world.device)
        flight.parts = [self._network.model.prepare(part) for part in batch.parts(self._micro_batches)]
        flight.count = sum(part.count for part in flight.parts)
        flight.wanted = self._network.wanted([part.ids for part in flight.parts])

    def agree(self, flight: Flight, operation: Operation) -> None:
        """Add up the terms of the loss over all ranks, and whether anyone wants to stop."""
        numbers = torch.tensor([flight.count, int(flight.stop)], device=self._world.device)
        count, stop = self._transports[operation.lane].all_reduce(numbers, name="count").wait().tolist()
        flight.count, flight.stop = count, stop > 0

    def send_ids(self, flight: Flight, operation: Operation) -> None:
        """Ask the owners of the rows for them."""
        flight.route = self._by(operation).send_ids(flight.wanted[0])

    def look_up(self, flight: Flight, _: Operation) -> None:
        """Read the own rows that all ranks asked for."""
        flight.looked_up = self._sharded.look_up(given(flight.route))

    def send_rows(self, flight: Flight, operation: Operation) -> None:
        """Send them to who asked. What arrives here is where gradients will gather."""
        flight.rows = self._by(operation).send_rows(given(flight.route), flight.looked_up)

    def forward(self, flight: Flight, operation: Operation) -> None:
        """Sum the losses of a micro-batch and divide by the count of all ranks: where a sample is cannot matter."""
        part = operation.part
        for values in (flight.rows or {}).values():
            values.requires_grad_()
        with torch.autocast(self._world.device.type, torch.bfloat16, enabled=self._autocast), self._syncs(part):
            total = self._parallel(flight.parts[part], flight.wanted[part], flight.rows)
        flight.losses.append(total / max(1, flight.count))

    def backward(self, flight: Flight, operation: Operation) -> None:
        """Gradients of rows and of the dense part; DDP adds the latter up over all ranks meanwhile."""
        with self._syncs(operation.part), self._world.transport.named("dense gradients"):
            flight.losses[operation.part].backward()

    def send_gradients(self, flight: Flight, operation: Operation) -> None:
        """Send the gradients of the rows to their owners."""
        flight.gradients = self._by(operation).send_gradients(given(flight.route), flight.row_gradients)

    def update_rows(self, flight: Flight, _: Operation) -> None:
        """Change the own rows, each once."""
        self._sharded.update(given(flight.route), flight.gradients, lr=flight.rates.tables)

    def update_dense(self, flight: Flight, _: Operation) -> None:
        """Change the dense part, the same on every rank."""
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._parallel.parameters(), self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = flight.rates.dense
        self._optimizer.step()
        self._optimizer.zero_grad()

    def split(self, flight: Flight, _: Operation) -> None:
        """Find which own rows this batch and the one before have in common. The first one of a run has none before."""
        route = given(flight.route)
        before = {} if flight.before is None else given(flight.before.route).local
        flight.shared = {name: split(before.get(name, rows[:0]), rows) for name, rows in route.local.items()}

    def send_split(self, flight: Flight, operation: Operation) -> None:
        """Tell who asked for rows which of them those are, of both batches."""
        route, before = given(flight.route), flight.before
        there = route.nothing() if before is None else given(before.route)
        leaves, flight.arrives = self._by(operation).send_split(there, route, flight.shared)
        if before is not None:
            before.leaves = leaves
        flight.before = None
        flight.rows = self._sharded.room(flight.wanted[0])

    def look_up_exclusive(self, flight: Flight, _: Operation) -> None:
        """Read the rows that the batch before does not touch."""
        flight.looked_up = self._sharded.look_up(given(flight.arrives).others)

    def send_exclusive_rows(self, flight: Flight, operation: Operation) -> None:
        """Send them, behind compute."""
        arrives = given(flight.arrives)
        got = self._by(operation).send_rows(arrives.others, flight.looked_up)
        _put(given(flight.rows), got, {name: ~mask for name, mask in arrives.mask.items()})

    def look_up_collision(self, flight: Flight, _: Operation) -> None:
        """Read the rows that the batch before has just changed."""
        flight.collided = self._sharded.look_up(given(flight.arrives).shared)

    def send_collision_rows(self, flight: Flight, operation: Operation) -> None:
        """Send them; the next step waits for these."""
        arrives = given(flight.arrives)
        _put(given(flight.rows), self._by(operation).send_rows(arrives.shared, flight.collided), arrives.mask)

    def send_urgent_gradients(self, flight: Flight, operation: Operation) -> None:
        """Send the gradients of rows that the next batch reads."""
        if flight.leaves is not None:
            some = {name: values[flight.leaves.mask[name]] for name, values in flight.row_gradients.items()}
            flight.gradients = self._by(operation).send_gradients(flight.leaves.shared, some)

    def update_urgent(self, flight: Flight, _: Operation) -> None:
        """Change those rows."""
        if flight.leaves is not None:
            self._sharded.update(flight.leaves.shared, flight.gradients, lr=flight.rates.tables)

    def send_deferred_gradients(self, flight: Flight, operation: Operation) -> None:
        """Send all other gradients, behind the next step."""
        gradients, route = flight.row_gradients, given(flight.route)
        if flight.leaves is not None:
            mask, route = flight.leaves.mask, flight.leaves.others
            gradients = {name: values[~mask[name]] for name, values in gradients.items()}
        flight.put_off = self._by(operation).send_gradients(route, gradients)

    def update_deferred(self, flight: Flight, _: Operation) -> None:
        """Change the rows that were put off, with the learning rate of their own step."""
        route = given(flight.route) if flight.leaves is None else flight.leaves.others
        self._sharded.update(route, flight.put_off, lr=flight.rates.tables)

    @property
    def _sharded(self) -> ShardedTables:
        return given(self._tables)

    def _by(self, operation: Operation) -> Exchange:
        """What moves rows on a lane."""
        return self._sharded.exchanges[operation.lane]

    def _syncs(self, part: int) -> contextlib.AbstractContextManager[None]:
        """Gradients of micro-batches gather here; only the last one has them added up over the ranks."""
        return contextlib.nullcontext() if part == self._micro_batches - 1 else self._parallel.no_sync()


def given(value: T | None) -> T:
    """What an earlier operation left."""
    if value is None:
        raise RuntimeError("an operation ran before the one that it needs; the schedule is wrong")
    return value


def _put(rows: dict[str, Tensor], some: Mapping[str, Tensor], where: Mapping[str, Tensor]) -> None:
    """Lay rows that arrived to the others of their batch."""
    for name, values in some.items():
        rows[name][where[name]] = values
