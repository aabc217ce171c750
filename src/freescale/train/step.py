"""One step, top to bottom.

`overlap.schedule` says in which order the operations of a step run; the methods of `Step` say what they do, and stand
in the order in which a serial step runs them. What one operation leaves for the next lies in `Flight`.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from freescale.bubbles.recorder import Recorder
from freescale.data.batch import Batch
from freescale.embedding.exchange import Route
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.unique import Wanted
from freescale.overlap.schedule import Schedule
from freescale.train.network import Network
from freescale.transport.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Rates:
    """Learning rates of one step."""

    dense: float
    tables: float


@dataclass
class Flight:
    """One batch on its way through a step."""

    batch: Batch
    rates: Rates
    stop: bool
    """At first whether this rank was asked to end after the step; once agreed, whether any rank was."""
    parts: list[Any] = field(default_factory=list)
    """Inputs of each micro-batch."""
    wanted: list[dict[str, Wanted]] = field(default_factory=list)
    """Of each micro-batch: the distinct ids of the whole batch, and where its own ids stand among them."""
    count: int = 0
    """Terms of the loss: of this rank, and once agreed of all ranks."""
    route: Route | None = None
    looked_up: dict[str, Tensor] | None = None
    """Own rows that all ranks asked for."""
    rows: dict[str, Tensor] | None = None
    """Rows that travelled here. Their gradients gather in them."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of own rows, from all ranks."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's share of the mean loss, by micro-batch."""

    @property
    def loss(self) -> float:
        """This rank's share of the mean loss."""
        return float(torch.stack([loss.detach() for loss in self.losses]).sum())


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
        micro_batches: int = 1,
        clip: float = 0.0,
        autocast: bool = False,
    ) -> None:
        self._parallel, self._tables, self._optimizer = parallel, tables, optimizer
        self._network: Network = parallel.module
        self._schedule, self._world, self._recorder = schedule, world, recorder
        self._micro_batches, self._clip, self._autocast = micro_batches, clip, autocast

    def run(self, batch: Batch, rates: Rates, *, stop: bool = False) -> Flight:
        """Train on one batch. `stop`: this rank was asked to end; all ranks learn of it in the same step."""
        flight = Flight(batch, rates, stop)
        for operation in self._schedule.operations:
            with self._recorder.during(operation.cause):
                getattr(self, operation.name)(flight, operation.part)
        return flight

    def prepare(self, flight: Flight, _part: int) -> None:
        """Lay the batch out and find the distinct ids whose rows it needs."""
        batch = flight.batch.to(self._world.device)
        flight.parts = [self._network.model.prepare(part) for part in batch.parts(self._micro_batches)]
        flight.count = sum(part.count for part in flight.parts)
        flight.wanted = self._network.wanted([part.ids for part in flight.parts])

    def agree(self, flight: Flight, _part: int) -> None:
        """Add up the terms of the loss over all ranks, and whether anyone wants to stop."""
        numbers = torch.tensor([flight.count, int(flight.stop)], device=self._world.device)
        count, stop = self._world.transport.all_reduce(numbers, name="count").wait().tolist()
        flight.count, flight.stop = count, stop > 0

    def send_ids(self, flight: Flight, _part: int) -> None:
        """Ask the owners of the rows for them."""
        flight.route = self._sharded.send_ids(flight.wanted[0])

    def look_up(self, flight: Flight, _part: int) -> None:
        """Read the own rows that all ranks asked for."""
        flight.looked_up = self._sharded.look_up(given(flight.route))

    def send_rows(self, flight: Flight, _part: int) -> None:
        """Send them to who asked. What arrives here is where gradients will gather."""
        rows = self._sharded.send_rows(given(flight.route), given(flight.looked_up))
        flight.rows = {name: values.requires_grad_() for name, values in rows.items()}

    def forward(self, flight: Flight, part: int) -> None:
        """Sum the losses of a micro-batch and divide by the count of all ranks: where a sample is cannot matter."""
        with torch.autocast(self._world.device.type, torch.bfloat16, enabled=self._autocast), self._syncs(part):
            total = self._parallel(flight.parts[part], flight.wanted[part], flight.rows)
        flight.losses.append(total / max(1, flight.count))

    def backward(self, flight: Flight, part: int) -> None:
        """Gradients of rows and of the dense part; DDP adds the latter up over all ranks meanwhile."""
        with self._syncs(part), self._world.transport.named("dense gradients"):
            flight.losses[part].backward()

    def send_gradients(self, flight: Flight, _part: int) -> None:
        """Send the gradients of the rows to their owners."""
        rows = given(flight.rows)
        gradients = {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in rows.items()}
        flight.gradients = self._sharded.send_gradients(given(flight.route), gradients)

    def update_rows(self, flight: Flight, _part: int) -> None:
        """Change the own rows, each once."""
        self._sharded.update(given(flight.route), flight.gradients, lr=flight.rates.tables)

    def update_dense(self, flight: Flight, _part: int) -> None:
        """Change the dense part, the same on every rank."""
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._parallel.parameters(), self._clip)
        for group in self._optimizer.param_groups:
            group["lr"] = flight.rates.dense
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def _sharded(self) -> ShardedTables:
        return given(self._tables)

    def _syncs(self, part: int) -> contextlib.AbstractContextManager[None]:
        """Gradients of micro-batches gather here; only the last one has them added up over the ranks."""
        return contextlib.nullcontext() if part == self._micro_batches - 1 else self._parallel.no_sync()


def given(value: T | None) -> T:
    """What an earlier operation left."""
    if value is None:
        raise RuntimeError("an operation ran before the one that it needs; the schedule is wrong")
    return value
