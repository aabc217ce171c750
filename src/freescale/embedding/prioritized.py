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

from freescale.embedding.exchange import Parts, Route
from freescale.embedding.ids import Shared, Wanted, split
from freescale.embedding.sharded import ShardedTables

T = TypeVar("T")
V = TypeVar("V")


@dataclass
class Journey:
    """The rows of one batch on their way: what one operation leaves for the next."""

    wanted: Mapping[str, Wanted] = field(default_factory=dict)
    """The distinct ids of the batch, per table."""
    before: "Journey | None" = None
    """Of the batch before, until it is known which rows both have."""
    lr: Mapping[str, float] = field(default_factory=dict)
    """Learning rate of each table in the step that computes the batch."""
    exhausted: bool = False
    """Whether this rank has no batch here: its loader ended before the step."""
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
    void: bool = False
    """Whether its gradients must change nothing, wherever they are by now: the same on all ranks."""

    @property
    def canceled(self) -> bool:
        """Whether some rank has no such batch, so that no rank computes it. Known once ids were exchanged."""
        return self.route is not None and bool(self.route.exhausted)

    @property
    def row_gradients(self) -> dict[str, Tensor]:
        """Of all rows that travelled here."""
        rows = given(self.rows)
        return {name: torch.zeros_like(v) if v.grad is None else v.grad for name, v in rows.items()}


class RowOperations:
    """What the operations of a schedule do with the rows of a batch. `lane` names the exchange that moves them."""

    def __init__(self, tables: ShardedTables) -> None:
        self._tables = tables

    def send_ids(self, journey: Journey, lane: str) -> None:
        """Ask the owners of the rows for them."""
        journey.route = self._tables.exchanges[lane].send_ids(journey.wanted, exhausted=journey.exhausted)

    def look_up(self, journey: Journey, _: str) -> None:
        """Read the own rows that all ranks asked for."""
        journey.looked_up = self._tables.look_up(given(journey.route))

    def send_rows(self, journey: Journey, lane: str) -> None:
        """Send them to who asked. What arrives here is where gradients will gather."""
        journey.rows = self._tables.exchanges[lane].send_rows(given(journey.route), _taken(journey.looked_up)).wait()

    def send_gradients(self, journey: Journey, lane: str) -> None:
        """Send the gradients of the rows to their owners."""
        exchange = self._tables.exchanges[lane]
        journey.gradients = exchange.send_gradients(given(journey.route), journey.row_gradients).wait()

    def update_rows(self, journey: Journey, _: str) -> None:
        """Change the own rows, each once."""
        self._update(journey, given(journey.route), journey.gradients)

    def split(self, journey: Journey, _: str) -> None:
        """Find which own rows this batch and the one before have in common. The first one of a run has none before."""
        before = {} if journey.before is None else given(journey.before.route).local
        local = given(journey.route).local
        journey.shared = {name: split(before.get(name, rows[:0]), rows) for name, rows in local.items()}

    def send_split(self, journey: Journey, lane: str) -> None:
        """Tell who asked for rows which of them those are, of both batches."""
        route, before = given(journey.route), journey.before
        there = route.nothing() if before is None else given(before.route)
        leaves, journey.arrives = self._tables.exchanges[lane].send_split(there, route, _taken(journey.shared))
        if before is not None:
            before.leaves = leaves
        journey.before = None
        journey.rows = self._tables.room(journey.wanted)

    def look_up_exclusive(self, journey: Journey, _: str) -> None:
        """Read the rows that the batch before does not touch."""
        journey.looked_up = self._tables.look_up(given(journey.arrives).others)

    def send_exclusive_rows(self, journey: Journey, lane: str) -> None:
        """Send them, behind compute."""
        arrives = given(journey.arrives)
        got = self._tables.exchanges[lane].send_rows(arrives.others, _taken(journey.looked_up)).wait()
        _put(given(journey.rows), got, {name: ~mask for name, mask in arrives.mask.items()})

    def look_up_collision(self, journey: Journey, _: str) -> None:
        """Read the rows that the batch before has just changed."""
        journey.collided = self._tables.look_up(given(journey.arrives).shared)

    def send_collision_rows(self, journey: Journey, lane: str) -> Callable[[], None]:
        """Begin to send them; the next step waits for these."""
        arrives = given(journey.arrives)
        coming = self._tables.exchanges[lane].send_rows(arrives.shared, _taken(journey.collided))
        return lambda: _put(given(journey.rows), coming.wait(), arrives.mask)

    def send_urgent_gradients(self, journey: Journey, lane: str) -> Callable[[], None] | None:
        """Begin to send the gradients of rows that the next batch reads."""
        if journey.leaves is None:
            return None
        some = {name: values[journey.leaves.mask[name]] for name, values in journey.row_gradients.items()}
        coming = self._tables.exchanges[lane].send_gradients(journey.leaves.shared, some)
        return lambda: journey.gradients.update(coming.wait())

    def update_urgent(self, journey: Journey, _: str) -> None:
        """Change those rows."""
        if journey.leaves is not None:
            self._update(journey, journey.leaves.shared, journey.gradients)

    def send_deferred_gradients(self, journey: Journey, lane: str) -> None:
        """Send all other gradients, behind the next step."""
        gradients, route = _used_here(journey.row_gradients), given(journey.route)
        if journey.leaves is not None:
            mask, route = journey.leaves.mask, journey.leaves.others
            gradients = {name: values[~mask[name]] for name, values in gradients.items()}
        journey.rows = None
        journey.put_off = self._tables.exchanges[lane].send_gradients(route, gradients).wait()

    def update_deferred(self, journey: Journey, _: str) -> None:
        """Change the rows that were put off, with the learning rate of their own step."""
        route = given(journey.route) if journey.leaves is None else journey.leaves.others
        self._update(journey, route, journey.put_off)

    def _update(self, journey: Journey, route: Route, gradients: dict[str, Tensor]) -> None:
        found = _taken(gradients)
        if not journey.void:
            self._tables.update(route, found, lr=journey.lr)


class Held(NamedTuple):
    """Bytes that batches under way hold on this rank."""

    ids: int
    rows: int
    gradients: int


def held(journeys: Iterable[Journey]) -> Held:
    """Ids asked for, here and there; rows that came or are about to go; gradients of rows, on their way or arrived."""
    ids = rows = gradients = 0
    for one in journeys:
        ids += _bytes({name: wanted.unique for name, wanted in one.wanted.items()})
        ids += 0 if one.route is None else _bytes(one.route.local)
        came = one.rows or {}  # read once: another thread may be done with them meanwhile
        rows += _bytes(came) + _bytes(one.looked_up) + _bytes(one.collided)
        grown = {name: values.grad for name, values in came.items() if values.grad is not None}
        gradients += _bytes(grown) + _bytes(one.gradients) + _bytes(one.put_off)
    return Held(ids, rows, gradients)


def given(value: T | None) -> T:
    """What an earlier operation left."""
    if value is None:
        raise RuntimeError("an operation ran before the one that it needs; the schedule is wrong")
    return value


def _taken(values: dict[str, V]) -> dict[str, V]:
    """What an earlier operation left, and nobody else needs: it is held no longer than it is used."""
    found = dict(values)
    values.clear()
    return found


def _used_here(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What another stream made, and is dropped before that stream knows that this one has used it."""
    for value in values.values():
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))
    return values


def _put(rows: dict[str, Tensor], some: Mapping[str, Tensor], where: Mapping[str, Tensor]) -> None:
    """Lay rows that arrived to the others of their batch."""
    for name, values in some.items():
        rows[name][where[name]] = values


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in list(tensors.values()))
