"""One step, top to bottom.

`overlap.schedule` says in which order the operations of a step run, and on which batch. The methods of `Step` say what
they do, in the order in which a serial step runs them; those on rows stand in `embedding.prioritized`. What one
operation leaves for the next lies in `Flight`.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from freescale.bubbles.recorder import Recorder
from freescale.config import TrainConfig
from freescale.data.batch import Batch
from freescale.embedding.prioritized import Journey, given
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.unique import Wanted
from freescale.overlap.schedule import Operation, Schedule
from freescale.train.lanes import Lanes
from freescale.train.network import Network, backward
from freescale.train.numbers import Judge, are_finite, culprits
from freescale.transport.choose import Chosen
from freescale.transport.world import World


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
    journey: Journey = field(default_factory=Journey)
    """Its rows."""
    rates: Rates = Rates(0.0, 0.0)
    """Of the step that computes it."""
    parts: list[Any] = field(default_factory=list)
    """Inputs of each micro-batch."""
    wanted: list[dict[str, Wanted]] = field(default_factory=list)
    """Of each micro-batch: the distinct ids of the whole batch, and where its own ids stand among them."""
    count: int = 0
    """Terms of the loss: of this rank, and once agreed of all ranks."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's share of the mean loss, by micro-batch."""
    norm: Tensor | None = None
    """Of the dense gradient, the same on all ranks."""
    sound: bool = True
    """Whether the losses of this rank and its gradients of rows are numbers."""
    fault: str = ""
    """What is wrong with the numbers of this step, if anything: the same on all ranks. Then it changes nothing."""
    lacking: bool = False
    """Whether any rank kept back gradients of rows in an earlier step, in which the others learnt from theirs."""

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
        ways: Chosen,
        config: TrainConfig,
    ) -> None:
        self._parallel, self._optimizer, self._world, self._ways = parallel, optimizer, world, ways
        self._network: Network = parallel.module
        self._recorder, self._config, self.judge = recorder, config, Judge(config.spike)
        self.culprits: list[int] = []
        """Samples of this rank that gave what is not a number, until somebody has dealt with them."""
        self.lacking = False
        """Whether this rank has kept back such gradients of rows, though the dense ones were sound."""
        self._lanes: Lanes[Flight] = Lanes(schedule, self, tables, ways, recorder, world.device)
        self.looks_ahead = self._lanes.executor.looks_ahead

    def run(self, batch: Batch, rates: Rates, *, stop: bool = False, following: Batch | None = None) -> Flight:
        """Train on one batch. `stop`: this rank was asked to end; all ranks learn of it in the same step.

        `following`: the batch of the next call; what a schedule fetches ahead is fetched for it.
        """
        flight = self._lanes.executor.expected
        if flight is None or flight.batch is not batch:
            flight = Flight(batch, stop)
        flight.rates, flight.journey.lr = rates, dict.fromkeys(self._network.model.tables, rates.tables)
        after = None if following is None else Flight(following, stop, Journey(before=flight.journey))
        self._lanes.run(flight, after)
        return flight

    def settle(self) -> None:
        """Bring the tables to where they stand after the last step, whatever was put off."""
        self._lanes.executor.settle()

    def forget(self) -> None:
        """Drop what was fetched ahead, and what is known of numbers that were none: somebody goes back."""
        self._lanes.executor.forget()
        self.culprits, self.lacking = [], False

    def report(self) -> list[str]:
        """What travelling behind compute cost, for people."""
        if not self.looks_ahead:
            return []
        ids, rows, gradients = (f"{size / 1e6:,.2f} MB" for size in self._lanes.most_held)
        return [f"rows that travel behind compute held at most {rows}, their gradients {gradients}, ids {ids}"]

    def close(self) -> None:
        """End what runs beside the step."""
        self._lanes.executor.close()

    def prepare(self, flight: Flight, _: Operation) -> None:
        """Lay the batch out and find the distinct ids whose rows it needs."""
        batch = flight.batch.to(self._world.device)
        flight.parts = [self._network.model.prepare(part) for part in batch.parts(self._config.micro_batches)]
        flight.count = sum(part.count for part in flight.parts)
        flight.wanted = self._network.wanted([part.ids for part in flight.parts])
        flight.journey.wanted = flight.wanted[0]

    def agree(self, flight: Flight, operation: Operation) -> None:
        """Add up the terms of the loss over all ranks, and whether anyone wants to stop."""
        numbers = torch.tensor([flight.count, int(flight.stop), int(self.lacking)], device=self._world.device)
        count, stop, lacking = self._ways.of(operation.lane).all_reduce(numbers, name="count").wait().tolist()
        flight.count, flight.stop, flight.lacking = count, stop > 0, lacking > 0

    def forward(self, flight: Flight, operation: Operation) -> None:
        """Sum the losses of a micro-batch and divide by the count of all ranks: where a sample is cannot matter."""
        part, rows = operation.part, flight.journey.rows
        for values in (rows or {}).values():
            values.requires_grad_()
        halves = self._config.precision == "bf16"
        with torch.autocast(self._world.device.type, torch.bfloat16, enabled=halves), self._syncs(part):
            total = self._parallel(flight.parts[part], flight.wanted[part], rows)
        flight.losses.append(total / max(1, flight.count))

    def backward(self, flight: Flight, operation: Operation) -> None:
        """Gradients of rows and of the dense part; DDP adds the latter up over all ranks meanwhile."""
        loss = flight.losses[operation.part]
        with self._syncs(operation.part), self._world.transport.named("dense gradients"):
            if operation.part < self._config.micro_batches - 1:
                loss.backward()
                return
            backward(loss, lambda: self._computed(flight))
        self._judge(flight)

    def update_dense(self, flight: Flight, _: Operation) -> None:
        """Change the dense part, the same on every rank."""
        if self._config.clip:
            torch.nn.utils.clip_grads_with_norm_(self._parallel.parameters(), self._config.clip, given(flight.norm))
        for group in self._optimizer.param_groups:
            group["lr"] = flight.rates.dense
        if not flight.fault:
            self._optimizer.step()
        self._optimizer.zero_grad()

    def _computed(self, flight: Flight) -> contextlib.AbstractContextManager[None]:
        """See that gradients of rows can be sent, and let the urgent ones set out. On a GPU the host waits here.

        Gives what the wait that follows is recorded as: buckets of dense gradients record themselves, and then DDP
        waits for its own word on which parameters were used.
        """
        moved = flight.journey.rows or {}
        of_rows = [values.grad for values in moved.values() if values.grad is not None]
        flight.sound = are_finite([*of_rows, *(loss.detach() for loss in flight.losses)])
        if not flight.sound:
            for gradient in of_rows:  # or every sample with one of these rows would be unsound from here on
                gradient.zero_()
        self._lanes.executor.hasten("send_urgent_gradients")
        return self._recorder.waiting("other traffic")

    def _judge(self, flight: Flight) -> None:
        """See that the gradient can be used, before anything is changed by it."""
        gradients = [weight.grad for weight in self._parallel.parameters() if weight.grad is not None]
        flight.norm = torch.nn.utils.get_total_norm(gradients)
        flight.fault = self.judge.fault(float(flight.norm))
        flight.journey.void = bool(flight.fault)
        if flight.fault or not flight.sound:
            self.culprits += culprits(self._network, flight.batch.to(self._world.device), flight.journey.rows)
            self.lacking = self.lacking or not flight.fault

    def _syncs(self, part: int) -> contextlib.AbstractContextManager[None]:
        """Gradients of micro-batches gather here; only the last one has them added up over the ranks."""
        return contextlib.nullcontext() if part == self._config.micro_batches - 1 else self._parallel.no_sync()
