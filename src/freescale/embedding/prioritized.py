"""Prioritized embedding communication (PEC), exact: the operations of a step on the rows of a batch.

`overlap.schedule` defines when each operation runs. A serial step moves all rows at once. An overlapped step moves them
in two parts. Rows that the previous batch has too wait for its update; the others are fetched early. Gradients of rows
that the next batch has too are sent first; the others are overlapped with the next step, and applied with the learning
rate of their own step. Every row is updated once per step, in the same order of additions, so the training result is
bitwise that of the serial step.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from freescale.embedding.exchange import AllToAllPlan, SplitPlan, runs
from freescale.embedding.ids import SharedIds, UniqueIds, is_in, split
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.tables import join

T = TypeVar("T")
V = TypeVar("V")


@dataclass
class EmbeddingContext:
    """The rows of one batch in flight: what one operation leaves for the next ones."""

    unique_ids: Mapping[str, UniqueIds] = field(default_factory=dict)
    """The unique ids of the batch, per table."""
    replicated: Mapping[str, int] = field(default_factory=dict)
    """How many of the first ones have a replicated row, for tables with such rows."""
    previous: "EmbeddingContext | None" = None
    """The previous batch, until the shared rows are known."""
    lr: Mapping[str, float] = field(default_factory=dict)
    """Learning rate of each table in the step that computes the batch."""
    exhausted: bool = False
    """Whether this rank has no batch: its loader has ended."""
    step: int = 0
    """Number of the step that computes the batch, and the time of the batch's latest event: dynamic ids record both."""
    time: int = 0
    plan: AllToAllPlan | None = None
    evicted: Mapping[str, Tensor] = field(default_factory=dict)
    """Local rows that the next batch has assigned to other ids. Serial updates of this batch would be overwritten."""
    merged: dict[str, Tensor] = field(default_factory=dict)
    """Of tables whose slots are sampled: the first unique id with the same row, for each unique id."""
    shared: SharedIds | None = None
    """Which requested local rows this batch and the previous one share, in the order of the keys of their plans."""
    fetch_split: SplitPlan | None = None
    """How rows are fetched: those that the previous batch has too, and the others."""
    gradient_split: SplitPlan | None = None
    """How gradients are sent: of rows that the next batch has too, and the others. None without a next batch."""
    looked_up_rows: dict[str, Tensor] = field(default_factory=dict)
    """Local rows to send."""
    collision_rows: dict[str, Tensor] = field(default_factory=dict)
    """Local rows to send that the previous batch has too."""
    rows: dict[str, Tensor] | None = None
    """Received rows, which accumulate gradients."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of local rows, from all ranks."""
    replicated_grads: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of all replicated rows, from all ranks."""
    deferred_grads: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of local rows that were overlapped with the next step."""
    skip_update: bool = False
    """Whether to drop the gradients of the batch; the same on all ranks."""
    usable: Tensor | None = None
    """On a GPU, where the host does not know yet whether to drop them: 1, or 0 to drop them."""

    @property
    def canceled(self) -> bool:
        """Whether some rank has no such batch, so that no rank computes it. Defined after the exchange of ids."""
        return self.plan is not None and bool(self.plan.exhausted)

    def merge(self, ids: Mapping[str, UniqueIds]) -> dict[str, UniqueIds]:
        """Return ids of the batch with one position for all that have the same row."""
        return {
            name: one._replace(inverse=self.merged[name][one.inverse]) if name in self.merged else one
            for name, one in ids.items()
        }

    @property
    def replicated_ids(self) -> dict[str, Tensor]:
        """The ids of the batch with a replicated row: ids ascend, so these are the first ones of a table."""
        return {name: self.unique_ids[name].unique[:count] for name, count in self.replicated.items()}

    @property
    def served_rows(self) -> int:
        """Rows that this rank sends for the batch. Defined after the exchange of ids."""
        return 0 if self.plan is None else sum(map(sum, self.plan.served))

    @property
    def row_gradients(self) -> dict[str, Tensor]:
        """Gradients of all received rows."""
        rows = require(self.rows)
        return {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in rows.items()}

    def join_gradients(self) -> list[Tensor]:
        """Let the row gradients of consecutive tables of one width follow each other in memory; return each run."""
        if self.rows is None:
            return []
        gradients, joint = self.row_gradients, []
        for run in runs(gradients, gradients):
            joint.append(join([gradients[name] for name in run]))
            for name, part in zip(run, joint[-1].split([len(gradients[name]) for name in run]), strict=True):
                self.rows[name].grad = part
        return joint


class RowOperations:
    """The operations of a schedule on rows. `lane` selects the exchange that moves them."""

    def __init__(self, tables: ShardedTables) -> None:
        self._tables = tables

    def send_ids(self, context: EmbeddingContext, lane: str) -> None:
        """Request rows of their owners. Replicated rows are not requested."""
        exchange = self._tables.exchanges[lane]
        if self._tables.replicated is not None:
            context.replicated = self._tables.replicated.count(context.unique_ids)
        options: dict[str, Any] = {"exhausted": context.exhausted, "time": context.time}
        context.plan = exchange.send_ids(context.unique_ids, replicated=context.replicated, **options)

    def assign_slots(self, context: EmbeddingContext, _: str) -> None:
        """Give rows to new dynamic ids. The previous batch may have sampled these rows: it no longer updates them."""
        context.plan, evicted = require(self._tables.dynamic).assign(require(context.plan), step=context.step)
        if context.previous is not None:
            context.previous.evicted = evicted

    def send_slots(self, context: EmbeddingContext, lane: str) -> None:
        """Send the ranks the rows of their items and negatives, so that they know which are the same."""
        plan = require(context.plan)
        for table in self._tables.tables:
            if table.sampled:
                rows = self._tables.exchanges[lane].send_numbers(plan, table.name, plan.local_keys[table.name])
                context.merged[table.name] = _first_places(rows)

    def look_up(self, context: EmbeddingContext, _: str) -> None:
        """Read the local rows that ranks requested."""
        context.looked_up_rows = self._tables.look_up(require(context.plan))

    def send_rows(self, context: EmbeddingContext, lane: str) -> None:
        """Send rows to the ranks that requested them. The received rows accumulate gradients."""
        plan = require(context.plan)
        got = self._tables.exchanges[lane].send_rows(plan, _take(context.looked_up_rows)).wait()
        if self._tables.replicated is None:
            context.rows = plan.in_order_of_ids(got)
            return
        context.rows = self._tables.allocate_rows(context.unique_ids)
        plan.scatter(got, context.rows)

    def read_replicated(self, context: EmbeddingContext, _: str) -> None:
        """Copy the replicated rows of the batch, which have the updates of the previous one."""
        require(self._tables.replicated).read(context.replicated_ids, require(context.rows))

    def reduce_replicated(self, context: EmbeddingContext, _: str) -> Callable[[], None]:
        """Start to sum the gradients of replicated rows over all ranks."""
        replicated = require(self._tables.replicated)
        finish = replicated.sum_gradients(context.replicated_ids, context.row_gradients)
        return lambda: context.replicated_grads.update(finish())

    def update_replicated(self, context: EmbeddingContext, _: str) -> None:
        """Update the replicated rows, alike on all ranks."""
        gradients = _take(context.replicated_grads)
        if context.usable is not None:
            torch._foreach_mul_([*gradients.values()], context.usable)
        if not context.skip_update:
            require(self._tables.replicated).update(gradients, lr=context.lr)

    def send_gradients(self, context: EmbeddingContext, lane: str) -> None:
        """Send row gradients to the owners."""
        exchange, plan = self._tables.exchanges[lane], require(context.plan)
        context.gradients = exchange.send_gradients(plan, plan.by_owner(context.row_gradients)).wait()

    def update_rows(self, context: EmbeddingContext, _: str) -> None:
        """Update local rows, each once."""
        self._update(context, require(context.plan), context.gradients)

    def split(self, context: EmbeddingContext, _: str) -> None:
        """Find the local rows that this batch and the previous one share. The first batch shares none."""
        keys = require(context.plan).keys
        previous = keys[:0] if context.previous is None else require(context.previous.plan).keys
        context.shared = split(previous, keys)

    def send_split(self, context: EmbeddingContext, lane: str) -> None:
        """Send the ranks which of their requested rows, of both batches, are shared."""
        plan, previous = require(context.plan), context.previous
        previous_plan = plan.empty() if previous is None else require(previous.plan)
        gradient_split, context.fetch_split = self._tables.exchanges[lane].send_split(
            previous_plan, plan, require(context.shared)
        )
        context.shared = None
        if previous is not None:
            previous.gradient_split = gradient_split
        context.previous = None
        context.rows = self._tables.allocate_rows(context.unique_ids)

    def look_up_exclusive(self, context: EmbeddingContext, _: str) -> None:
        """Read the rows that the previous batch does not have."""
        context.looked_up_rows = self._tables.look_up(require(context.fetch_split).exclusive)

    def send_exclusive_rows(self, context: EmbeddingContext, lane: str) -> None:
        """Send them, overlapped with compute."""
        plan = require(context.fetch_split).exclusive
        got = self._tables.exchanges[lane].send_rows(plan, _take(context.looked_up_rows)).wait()
        plan.scatter(got, require(context.rows))

    def look_up_collision(self, context: EmbeddingContext, _: str) -> None:
        """Read the rows that the previous batch has just updated."""
        context.collision_rows = self._tables.look_up(require(context.fetch_split).shared)

    def send_collision_rows(self, context: EmbeddingContext, lane: str) -> Callable[[], None]:
        """Start to send them; the next step waits for them."""
        plan = require(context.fetch_split).shared
        coming = self._tables.exchanges[lane].send_rows(plan, _take(context.collision_rows))
        return lambda: plan.scatter(coming.wait(), require(context.rows))

    def send_urgent_gradients(self, context: EmbeddingContext, lane: str) -> Callable[[], None] | None:
        """Start to send the gradients of rows that the next batch reads."""
        if context.gradient_split is None:
            return None
        plan = context.gradient_split.shared
        coming = self._tables.exchanges[lane].send_gradients(plan, plan.by_owner(context.row_gradients))
        return lambda: context.gradients.update(coming.wait())

    def update_urgent(self, context: EmbeddingContext, _: str) -> None:
        """Update those rows."""
        if context.gradient_split is not None:
            self._update(context, context.gradient_split.shared, context.gradients)

    def send_deferred_gradients(self, context: EmbeddingContext, lane: str) -> None:
        """Send all other gradients, overlapped with the next step."""
        gradients, plan = _record_stream(context.row_gradients), require(context.plan)
        if context.gradient_split is not None:
            plan = context.gradient_split.exclusive
        context.rows = None
        context.deferred_grads = self._tables.exchanges[lane].send_gradients(plan, plan.by_owner(gradients)).wait()

    def update_deferred(self, context: EmbeddingContext, _: str) -> None:
        """Update the deferred rows with the learning rate of their own step."""
        plan = require(context.plan) if context.gradient_split is None else context.gradient_split.exclusive
        self._update(context, plan, context.deferred_grads)

    def _update(self, context: EmbeddingContext, plan: AllToAllPlan, gradients: dict[str, Tensor]) -> None:
        taken = _take(gradients)
        for name, rows in context.evicted.items():
            taken[name].masked_fill_(is_in(plan.local_rows[name], rows)[:, None], 0.0)
        if context.usable is not None:
            torch._foreach_mul_([*taken.values()], context.usable)  # ranks send finite row gradients only
        if not context.skip_update:
            self._tables.update(plan, taken, lr=context.lr)


class EmbeddingMemory(NamedTuple):
    """Bytes that unfinished batches hold on this rank."""

    ids: int
    rows: int
    gradients: int


def embedding_memory(contexts: Iterable[EmbeddingContext]) -> EmbeddingMemory:
    """Return the bytes of requested and served ids, of rows received or to send, and of row gradients."""
    ids = rows = gradients = 0
    for one in contexts:
        ids += _bytes({name: unique_ids.unique for name, unique_ids in one.unique_ids.items()})
        ids += 0 if one.plan is None else one.plan.rows.nbytes + one.plan.keys.nbytes
        came = one.rows or {}  # read once: another thread may be done with them meanwhile
        rows += _bytes(came) + _bytes(one.looked_up_rows) + _bytes(one.collision_rows)
        grown = {name: values.grad for name, values in came.items() if values.grad is not None}
        gradients += _bytes(grown) + _bytes(one.gradients) + _bytes(one.deferred_grads)
    return EmbeddingMemory(ids, rows, gradients)


def require(value: T | None) -> T:
    """Return what an earlier operation left. Raise if it is missing."""
    if value is None:
        raise RuntimeError("an operation ran before the one that it needs; the schedule is wrong")
    return value


def _take(values: dict[str, V]) -> dict[str, V]:
    """Return the entries and clear the source, so that memory is freed after use."""
    taken = dict(values)
    values.clear()
    return taken


def _record_stream(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Mark tensors of another stream as used by this one, since they are freed before that stream waits for it."""
    for value in values.values():
        if value.device.type != "cpu":
            value.record_stream(torch.accelerator.current_stream(value.device))
    return values


def _first_places(values: Tensor) -> Tensor:
    """Return for each value the place of the first equal one."""
    ordered, order = values.sort(stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    first = torch.where(is_first, torch.arange(len(values), device=values.device), 0).cummax(0).values
    return torch.empty_like(order).index_copy_(0, order, order[first])


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in list(tensors.values()))
