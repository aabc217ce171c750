"""One step, top to bottom.

`operation_table` lists every operation of a step and the function that performs it. `Step` holds the functions for the
batch and the dense model; `embedding.prioritized.RowOperations` holds those for embedding rows. `overlap.schedule` says
on which lane and for which batch each operation runs. `StepState` carries results from one operation to the next.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from freescale.balance.assign import assign
from freescale.balance.cost import Cost
from freescale.bubbles.recorder import Recorder
from freescale.config import TrainConfig
from freescale.data.batch import Batch
from freescale.data.device_copy import numbers_to_device
from freescale.embedding.ids import UniqueIds
from freescale.embedding.prioritized import EmbeddingContext, RowOperations, require
from freescale.embedding.sharded import ShardedTables
from freescale.overlap.executor import Completion
from freescale.overlap.schedule import Operation, Schedule
from freescale.train.nonfinite import (
    GradientCheck,
    GradNormMonitor,
    are_finite,
    nonfinite_samples,
    withhold_nonfinite,
)
from freescale.train.schedule_runner import Perform, S, ScheduleRunner
from freescale.train.sharded_model import SequenceModule, backward
from freescale.transport.base import Transport
from freescale.transport.selection import TransportSelection
from freescale.transport.world import World


def operation_table(step: "StepOperations[S]", tables: ShardedTables | None) -> dict[str, Perform[S]]:
    """Return what each operation does, in the order in which a schedule issues them.

    A serial step uses the rows marked "serial", an overlapped one (prioritized embedding communication, PEC) those
    marked "overlapped", and both use the others. Without sharded `tables` no schedule has an operation on rows.
    """
    rows = None if tables is None else RowOperations(tables)

    def on_rows(operation: Callable[[RowOperations, EmbeddingContext, str], Completion | None]) -> Perform[S]:
        return lambda state, issued: operation(require(rows), state.embedding, issued.lane)

    return {
        "prepare": step.prepare,
        "agree": step.agree,
        "send_ids": on_rows(RowOperations.send_ids),
        "assign_slots": on_rows(RowOperations.assign_slots),  # with dynamic ids
        "send_slots": on_rows(RowOperations.send_slots),  # with dynamic items as negatives
        "look_up": on_rows(RowOperations.look_up),  # serial
        "send_rows": on_rows(RowOperations.send_rows),  # serial
        "split": on_rows(RowOperations.split),  # overlapped
        "send_split": on_rows(RowOperations.send_split),  # overlapped
        "look_up_exclusive": on_rows(RowOperations.look_up_exclusive),  # overlapped
        "send_exclusive_rows": on_rows(RowOperations.send_exclusive_rows),  # overlapped
        "read_replicated": on_rows(RowOperations.read_replicated),  # with replicated rows
        "forward": step.forward,
        "backward": step.backward,
        "reduce_replicated": on_rows(RowOperations.reduce_replicated),  # with replicated rows
        "send_gradients": on_rows(RowOperations.send_gradients),  # serial
        "update_rows": on_rows(RowOperations.update_rows),  # serial
        "send_urgent_gradients": on_rows(RowOperations.send_urgent_gradients),  # overlapped
        "update_urgent": on_rows(RowOperations.update_urgent),  # overlapped
        "look_up_collision": on_rows(RowOperations.look_up_collision),  # overlapped
        "send_collision_rows": on_rows(RowOperations.send_collision_rows),  # overlapped
        "update_replicated": on_rows(RowOperations.update_replicated),  # with replicated rows
        "update_dense": step.update_dense,
        "send_deferred_gradients": on_rows(RowOperations.send_deferred_gradients),  # overlapped
        "update_deferred": on_rows(RowOperations.update_deferred),  # overlapped
    }


class StepOperations(Protocol[S]):
    """The operations that depend on the trainer; `Step` performs them in FreeScale's own one."""

    def prepare(self, state: S, operation: Operation, /) -> None:
        """Lay out the batch and find its distinct ids."""

    def agree(self, state: S, operation: Operation, /) -> None:
        """Exchange what all ranks need to know about the batch."""

    def forward(self, state: S, operation: Operation, /) -> None:
        """Compute the loss."""

    def backward(self, state: S, operation: Operation, /) -> None:
        """Compute the gradients."""

    def update_dense(self, state: S, operation: Operation, /) -> None:
        """Apply the gradients of the dense model."""


@dataclass(frozen=True)
class LearningRates:
    """Learning rates of one step."""

    dense: float
    tables: float


@dataclass
class StepState:
    """One batch and what the operations computed for it, during one step or, with overlap, three."""

    batch: Batch
    stop: bool
    """Before `agree`: whether this rank received a stop request. After it: whether any rank did."""
    embedding: EmbeddingContext = field(default_factory=EmbeddingContext)
    """The embedding rows of the batch."""
    rates: LearningRates = LearningRates(0.0, 0.0)
    inputs: list[Any] = field(default_factory=list)
    """Model inputs of each micro-batch."""
    unique_ids: list[dict[str, UniqueIds]] = field(default_factory=list)
    """Per micro-batch: the distinct ids of the whole batch, and the position of the micro-batch's ids among them."""
    loss_terms: int = 0
    """Number of terms of the loss: of this rank, and after `agree` of all ranks."""
    losses: list[Tensor] = field(default_factory=list)
    """This rank's share of the mean loss, by micro-batch."""
    grad_norm: Tensor | None = None
    """Norm of the dense gradient, the same on all ranks."""
    finite: bool | Tensor = True
    """Whether this rank's losses and row gradients are finite. On a GPU a tensor until the end of the step."""
    check: GradientCheck | None = None
    """On a GPU: the check of the gradient, until the host reads it at the end of the step."""
    fault: str = ""
    """Why the dense gradient cannot be used, the same on all ranks. A step with a fault updates nothing."""
    partially_applied: bool = False
    """Whether some rank withheld its row gradients in an earlier step in which the other ranks applied theirs."""

    @property
    def loss(self) -> float:
        """This rank's share of the mean loss."""
        return float(torch.stack([loss.detach() for loss in self.losses]).sum())


def split_by_cost(batch: Batch, count: int, cost: Cost) -> list[Batch]:
    """Split a batch into `count` micro-batches of about equal cost. Some may be empty.

    Peak memory is that of the largest micro-batch. The samples of each one keep their order. The split depends on the
    lengths alone, so repeated runs add in the same order.
    """
    if count == 1:
        return [batch]
    candidates = 0 if batch.candidates is None else batch.candidates.lengths
    costs = cost.of(batch.history.lengths, candidates, batch.visible_events(cost.visibility))
    part = assign(costs, np.zeros(len(batch)), world_size=count, strategy="lpt").rank
    return [batch.select(torch.from_numpy(np.flatnonzero(part == index))) for index in range(count)]


class Step:
    """Trains on one batch at a time. Its public operations stand in the order of a serial step."""

    def __init__(
        self,
        parallel: DistributedDataParallel,
        tables: ShardedTables | None,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        world: World,
        recorder: Recorder,
        transports: TransportSelection,
        config: TrainConfig,
        cost: Cost,
    ) -> None:
        self._parallel, self._optimizer, self._world, self._transports = parallel, optimizer, world, transports
        self._module: SequenceModule = parallel.module
        self._recorder, self._config, self._cost = recorder, config, cost
        self.grad_norm_monitor = GradNormMonitor(config.spike)
        self.nonfinite_samples: list[int] = []
        """Samples of this rank with a NaN or infinite loss or gradient, until the trainer has handled them."""
        self.done = 0
        """Steps done."""
        self.partially_applied = False
        """Whether this rank withheld row gradients in a step whose dense gradient was finite."""
        operations = operation_table(self, tables)
        self._runner = ScheduleRunner(schedule, operations, tables, transports, recorder, world.device)

    @property
    def looks_ahead(self) -> bool:
        """Whether a step prefetches rows of the next batch."""
        return self._runner.executor.prefetches

    def switch(self, schedule: Schedule, urgent: Transport, deferred: Transport | None) -> None:
        """Continue with another schedule and transports of its lanes. The training result does not change."""
        self._transports = self._transports._replace(urgent=urgent, deferred=deferred)
        self._runner.switch(schedule, urgent, deferred)

    def run(
        self, batch: Batch, rates: LearningRates, *, stop: bool = False, following: Batch | None = None
    ) -> StepState:
        """Train on one batch. `stop`: this rank received a stop request; all ranks see it in the same step.

        `following`: the batch of the next call. An overlapped schedule fetches its rows during this step.
        """
        state = self._runner.executor.prefetched
        if state is None or state.batch is not batch:
            state = StepState(batch, stop, EmbeddingContext(step=self.done))
        state.rates, state.embedding.lr = rates, dict.fromkeys(self._module.model.tables, rates.tables)
        after = None
        if following is not None:
            after = StepState(following, stop, EmbeddingContext(previous=state.embedding, step=self.done + 1))
        self._runner.run(state, after)
        self.done += 1
        if state.check is not None:
            self._read_check(state, state.check)
        return state

    def prepare(self, state: StepState, _: Operation) -> None:
        """Lay out the batch and find the distinct ids whose rows it needs."""
        parts = split_by_cost(state.batch, self._config.micro_batches, self._cost)
        state.inputs = [self._module.model.prepare(part.to(self._world.device)) for part in parts]
        state.loss_terms = sum(inputs.count for inputs in state.inputs)
        state.unique_ids = self._module.unique_ids([inputs.ids for inputs in state.inputs])
        state.embedding.unique_ids = state.unique_ids[0]
        if self._module.dynamic_tables:
            state.embedding.time = state.batch.on_host.latest_time

    def agree(self, state: StepState, operation: Operation) -> None:
        """Sum over all ranks: terms of the loss, stop requests, withheld row gradients."""
        values = [state.loss_terms, int(state.stop), int(self.partially_applied)]
        transport = self._transports.for_lane(operation.lane)
        (counts,) = numbers_to_device([values], self._world.device)
        count, stop, partially_applied = transport.all_reduce(counts, name="count").wait_on_host().tolist()
        state.loss_terms, state.stop, state.partially_applied = count, stop > 0, partially_applied > 0

    def forward(self, state: StepState, operation: Operation) -> None:
        """Sum the losses of a micro-batch and divide by the global count, which makes placement irrelevant."""
        part, rows = operation.part, state.embedding.rows
        for values in (rows or {}).values():
            values.requires_grad_()
        bf16 = self._config.precision == "bf16"
        with torch.autocast(self._world.device.type, torch.bfloat16, enabled=bf16), self._gradient_sync(part):
            total = self._parallel(state.inputs[part], state.embedding.merge(state.unique_ids[part]), rows)
        state.losses.append(total / max(1, state.loss_terms))

    def backward(self, state: StepState, operation: Operation) -> None:
        """Compute the gradients of rows and of the dense model. DDP sums the latter over all ranks meanwhile."""
        loss = state.losses[operation.part]
        with self._gradient_sync(operation.part), self._world.transport.guard("dense gradients"):
            if operation.part < self._config.micro_batches - 1:
                loss.backward()
                return
            backward(loss, lambda: self._after_local_backward(state))
        self._check_gradient(state)

    def update_dense(self, state: StepState, _: Operation) -> None:
        """Update the dense model, identically on every rank."""
        if self._config.clip:
            norm = require(state.grad_norm)
            torch.nn.utils.clip_grads_with_norm_(self._parallel.parameters(), self._config.clip, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = state.rates.dense
        if state.check is not None:
            self._optimizer.found_inf = 1.0 - state.check.usable.float()  # type: ignore[attr-defined]  # 1: skips
        if not state.fault:
            self._optimizer.step()
        self._optimizer.zero_grad()

    def synchronize(self) -> None:
        """Wait until the tables contain the updates of all steps."""
        self._runner.executor.synchronize()

    def discard_prefetched(self) -> None:
        """Drop prefetched rows and records of non-finite values, before the trainer goes back to a checkpoint."""
        self._runner.executor.discard_prefetched()
        self.nonfinite_samples, self.partially_applied = [], False

    def report(self) -> list[str]:
        """Return how much memory overlapped transfers took, as human-readable lines."""
        if not any(self._runner.peak_bytes):
            return []
        ids, rows, gradients = (f"{size / 1e6:,.2f} MB" for size in self._runner.peak_bytes)
        return [f"overlapped transfers held at most {rows} of rows, {gradients} of row gradients, {ids} of ids"]

    def close(self) -> None:
        """End the thread of the deferred lane."""
        self._runner.executor.close()

    def _after_local_backward(self, state: StepState) -> contextlib.AbstractContextManager[None]:
        """Check the row gradients and send the urgent ones. On a GPU the host does not wait.

        The result surrounds the wait of DDP that follows: it records what the buckets of dense gradients do not record
        themselves, which is DDP's exchange of used parameters.
        """
        gradients = state.embedding.join_gradients()
        state.finite = are_finite([*gradients, *(loss.detach() for loss in state.losses)])
        withhold_nonfinite(gradients, state.finite)  # else NaN would spread to every sample that uses these rows
        for operation in ("reduce_replicated", "send_urgent_gradients"):  # in the same order on all ranks
            self._runner.executor.issue_early(operation)
        return self._recorder.record_wait("other traffic")

    def _check_gradient(self, state: StepState) -> None:
        """Decide whether the dense gradient can be used, before any update. On a GPU the host does not wait."""
        gradients = [weight.grad for weight in self._parallel.parameters() if weight.grad is not None]
        state.grad_norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(state.finite, Tensor):
            largest, rows = self.grad_norm_monitor.largest, state.embedding.rows or {}
            state.check = GradientCheck(state.grad_norm, state.finite, largest=largest, rows=rows)
            state.embedding.usable = state.check.usable
        else:
            self._judge(state, float(state.grad_norm), state.finite, state.embedding.rows)

    def _read_check(self, state: StepState, check: GradientCheck) -> None:
        """Learn whether the updates of this step were made. The host waits, while the device makes them."""
        self._world.transport.synchronize("dense gradients")
        norm, state.finite = check.read()
        self._judge(state, norm, state.finite, None if state.embedding.plan is None else check.rows)
        state.check = None

    def _judge(self, state: StepState, norm: float, finite: bool, rows: Mapping[str, Tensor] | None) -> None:
        """Record a fault, and the samples of this rank that cause it."""
        state.fault = self.grad_norm_monitor.fault(norm)
        state.embedding.skip_update = bool(state.fault)
        if state.fault or not finite:
            self.nonfinite_samples += nonfinite_samples(self._module, state.batch, rows, device=self._world.device)
            self.partially_applied = self.partially_applied or not state.fault

    def _gradient_sync(self, part: int) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients locally until the last micro-batch, in which DDP sums them over the ranks."""
        return contextlib.nullcontext() if part == self._config.micro_batches - 1 else self._parallel.no_sync()
