"""The rows of a batch from their owners and their gradients back, one operation at a time: the exact exchange.

`overlap.schedule` says when each operation runs. In a serial step all rows travel at once. In an overlapped one they
travel in two parts. Rows that the batch before has too wait for its update; the others come ahead of it. Gradients of
rows that the next batch has too go first; the others go behind it, and are applied with the learning rate of their own
step. Every row is changed once a step, in the same order of additions: what is learnt is the same to the last bit.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from freescale.embedding.exchange import AllToAllPlan, SplitPlan
from freescale.embedding.ids import SharedIds, UniqueIds, split
from freescale.embedding.sharded import ShardedTables

T = TypeVar("T")
V = TypeVar("V")


@dataclass
class EmbeddingContext:
    """The rows of one batch on their way: what one operation leaves for the next."""

    unique_ids: Mapping[str, UniqueIds] = field(default_factory=dict)
    """The distinct ids of the batch, per table."""
    previous: "EmbeddingContext | None" = None
    """Of the batch before, until it is known which rows both have."""
    lr: Mapping[str, float] = field(default_factory=dict)
    """Learning rate of each table in the step that computes the batch."""
    exhausted: bool = False
    """Whether this rank has no batch here: its loader ended before the step."""
    plan: AllToAllPlan | None = None
    shared: dict[str, SharedIds] = field(default_factory=dict)
    """Of own rows that were asked for: which are in the batch before too, and which of that one's are in this."""
    fetch_split: SplitPlan | None = None
    """How rows come: those that the batch before has too, and the others."""
    gradient_split: SplitPlan | None = None
    """How gradients go: those of rows that the next batch has too, and the others. None without a next one."""
    looked_up_rows: dict[str, Tensor] = field(default_factory=dict)
    """Own rows that are about to be sent."""
    collision_rows: dict[str, Tensor] = field(default_factory=dict)
    """The same, of those that the batch before has too."""
    rows: dict[str, Tensor] | None = None
    """Rows that travelled here. Their gradients gather in them."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of own rows, from all ranks."""
    deferred_grads: dict[str, Tensor] = field(default_factory=dict)
    """The same, of those that came behind the next step."""
    skip_update: bool = False
    """Whether its gradients must change nothing, wherever they are by now: the same on all ranks."""

    @property
    def canceled(self) -> bool:
        """Whether some rank has no such batch, so that no rank computes it. Known once ids were exchanged."""
        return self.plan is not None and bool(self.plan.exhausted)

    @property
    def row_gradients(self) -> dict[str, Tensor]:
        """Of all rows that travelled here."""
        rows = require(self.rows)
        return {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in rows.items()}


class RowOperations:
    """What the operations of a schedule do with the rows of a batch. `lane` names the exchange that moves them."""

    def __init__(self, tables: ShardedTables) -> None:
        self._tables = tables

    def send_ids(self, context: EmbeddingContext, lane: str) -> None:
        """Ask the owners of the rows for them."""
        context.plan = self._tables.exchanges[lane].send_ids(context.unique_ids, exhausted=context.exhausted)

    def look_up(self, context: EmbeddingContext, _: str) -> None:
        """Read the own rows that all ranks asked for."""
        context.looked_up_rows = self._tables.look_up(require(context.plan))

    def send_rows(self, context: EmbeddingContext, lane: str) -> None:
        """Send them to who asked. What arrives here is where gradients will gather."""
        context.rows = (
            self._tables.exchanges[lane].send_rows(require(context.plan), _take(context.looked_up_rows)).wait()
        )

    def send_gradients(self, context: EmbeddingContext, lane: str) -> None:
        """Send the gradients of the rows to their owners."""
        exchange = self._tables.exchanges[lane]
        context.gradients = exchange.send_gradients(require(context.plan), context.row_gradients).wait()

    def update_rows(self, context: EmbeddingContext, _: str) -> None:
        """Change the own rows, each once."""
        self._update(context, require(context.plan), context.gradients)

    def split(self, context: EmbeddingContext, _: str) -> None:
        """Find which own rows this batch and the one before have in common. The first one of a run has none before."""
        previous = {} if context.previous is None else require(context.previous.plan).local_rows
        local_rows = require(context.plan).local_rows
        context.shared = {name: split(previous.get(name, rows[:0]), rows) for name, rows in local_rows.items()}

    def send_split(self, context: EmbeddingContext, lane: str) -> None:
        """Tell who asked for rows which of them those are, of both batches."""
        plan, previous = require(context.plan), context.previous
        previous_plan = plan.empty() if previous is None else require(previous.plan)
        gradient_split, context.fetch_split = self._tables.exchanges[lane].send_split(
            previous_plan, plan, _take(context.shared)
        )
        if previous is not None:
            previous.gradient_split = gradient_split
        context.previous = None
        context.rows = self._tables.allocate_rows(context.unique_ids)

    def look_up_exclusive(self, context: EmbeddingContext, _: str) -> None:
        """Read the rows that the batch before does not touch."""
        context.looked_up_rows = self._tables.look_up(require(context.fetch_split).exclusive)

    def send_exclusive_rows(self, context: EmbeddingContext, lane: str) -> None:
        """Send them, behind compute."""
        fetch_split = require(context.fetch_split)
        got = self._tables.exchanges[lane].send_rows(fetch_split.exclusive, _take(context.looked_up_rows)).wait()
        _scatter_rows(require(context.rows), got, {name: ~mask for name, mask in fetch_split.mask.items()})

    def look_up_collision(self, context: EmbeddingContext, _: str) -> None:
        """Read the rows that the batch before has just changed."""
        context.collision_rows = self._tables.look_up(require(context.fetch_split).shared)

    def send_collision_rows(self, context: EmbeddingContext, lane: str) -> Callable[[], None]:
        """Begin to send them; the next step waits for these."""
        fetch_split = require(context.fetch_split)
        coming = self._tables.exchanges[lane].send_rows(fetch_split.shared, _take(context.collision_rows))
        return lambda: _scatter_rows(require(context.rows), coming.wait(), fetch_split.mask)

    def send_urgent_gradients(self, context: EmbeddingContext, lane: str) -> Callable[[], None] | None:
        """Begin to send the gradients of rows that the next batch reads."""
        if context.gradient_split is None:
            return None
        some = {name: values[context.gradient_split.mask[name]] for name, values in context.row_gradients.items()}
        coming = self._tables.exchanges[lane].send_gradients(context.gradient_split.shared, some)
        return lambda: context.gradients.update(coming.wait())

    def update_urgent(self, context: EmbeddingContext, _: str) -> None:
        """Change those rows."""
        if context.gradient_split is not None:
            self._update(context, context.gradient_split.shared, context.gradients)

    def send_deferred_gradients(self, context: EmbeddingContext, lane: str) -> None:
        """Send all other gradients, behind the next step."""
        gradients, plan = _record_stream(context.row_gradients), require(context.plan)
        if context.gradient_split is not None:
            mask, plan = context.gradient_split.mask, context.gradient_split.exclusive
            gradients = {name: values[~mask[name]] for name, values in gradients.items()}
        context.rows = None
        context.deferred_grads = self._tables.exchanges[lane].send_gradients(plan, gradients).wait()

    def update_deferred(self, context: EmbeddingContext, _: str) -> None:
        """Change the rows that were put off, with the learning rate of their own step."""
        plan = require(context.plan) if context.gradient_split is None else context.gradient_split.exclusive
        self._update(context, plan, context.deferred_grads)

    def _update(self, context: EmbeddingContext, plan: AllToAllPlan, gradients: dict[str, Tensor]) -> None:
        found = _take(gradients)
        if not context.skip_update:
            self._tables.update(plan, found, lr=context.lr)


class EmbeddingMemory(NamedTuple):
    """Bytes that batches under way hold on this rank."""

    ids: int
    rows: int
    gradients: int


def embedding_memory(contexts: Iterable[EmbeddingContext]) -> EmbeddingMemory:
    """Ids asked for, here and there; rows that came or are about to go; gradients of rows, on their way or arrived."""
    ids = rows = gradients = 0
    for one in contexts:
        ids += _bytes({name: unique_ids.unique for name, unique_ids in one.unique_ids.items()})
        ids += 0 if one.plan is None else _bytes(one.plan.local_rows)
        came = one.rows or {}  # read once: another thread may be done with them meanwhile
        rows += _bytes(came) + _bytes(one.looked_up_rows) + _bytes(one.collision_rows)
        grown = {name: values.grad for name, values in came.items() if values.grad is not None}
        gradients += _bytes(grown) + _bytes(one.gradients) + _bytes(one.deferred_grads)
    return EmbeddingMemory(ids, rows, gradients)


def require(value: T | None) -> T:
    """What an earlier operation left."""
    if value is None:
        raise RuntimeError("an operation ran before the one that it needs; the schedule is wrong")
    return value


def _take(values: dict[str, V]) -> dict[str, V]:
    """What an earlier operation left, and nobody else needs: it is held no longer than it is used."""
    found = dict(values)
    values.clear()
    return found


def _record_stream(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What another stream made, and is dropped before that stream knows that this one has used it."""
    for value in values.values():
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))
    return values


def _scatter_rows(rows: dict[str, Tensor], some: Mapping[str, Tensor], where: Mapping[str, Tensor]) -> None:
    """Lay rows that arrived to the others of their batch."""
    for name, values in some.items():
        rows[name][where[name]] = values


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in list(tensors.values()))
