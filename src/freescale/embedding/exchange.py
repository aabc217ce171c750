"""Ids to the owners of their rows, rows back, gradients to the owners again.

Everything that travels together is one transfer: all ids, and the rows of all tables of one width. What a rank sends to
another holds the tables in order; what it keeps holds, per table, the ranks in order.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.embedding.ids import SharedIds, UniqueIds, pack, packed_sizes, unpack
from freescale.embedding.tables import Table, by_dim
from freescale.transport.base import Transport

Counts = list[list[int]]
"""Rows by rank, then by table."""
Masks = dict[str, Tensor]
"""Per table, which of some ids are meant."""


class AllToAllPlan(NamedTuple):
    """Which rows of a batch, or of a part of it, come from where."""

    requested: Counts
    """What this rank wants of each owner."""
    served: Counts
    """What each rank asks of this one."""
    local_rows: dict[str, Tensor]
    """Per table, the own rows that the others ask for, by rank; counted from the first own row."""
    exhausted: tuple[int, ...] = ()
    """Ranks that have no such batch. If there are any, all ranks know, and no ids were sent."""

    def empty(self) -> "AllToAllPlan":
        """A route of the same tables and ranks without any rows."""
        none = [[0] * len(counts) for counts in self.requested]
        return AllToAllPlan(none, none, {name: rows[:0] for name, rows in self.local_rows.items()})

    def subset(self, requested: Masks, served: Masks) -> "AllToAllPlan":
        """The route of some of the ids: `wanted` of those that this rank wants, `asked` of those asked of it."""
        counts = (
            _count_selected([*requested.values()], self.requested),
            _count_selected([*served.values()], self.served),
        )
        return AllToAllPlan(*counts, {name: rows[served[name]] for name, rows in self.local_rows.items()})


class SplitPlan(NamedTuple):
    """A batch, divided by which of its rows another batch has too."""

    shared: AllToAllPlan
    exclusive: AllToAllPlan
    mask: Masks
    """Of the ids that this rank wants: which are shared."""


class PendingRows(NamedTuple):
    """Rows of several tables on their way here, one transfer per width."""

    transfers: list[tuple[list[str], Callable[[], list[Tensor]]]]

    def wait(self) -> dict[str, Tensor]:
        """Per table, what arrived from the ranks, in order."""
        return {name: subset for names, waited in self.transfers for name, subset in zip(names, waited(), strict=True)}


class EmbeddingExchange:
    """The three transfers of a step, for tables whose rows are dealt over all ranks."""

    def __init__(self, tables: Sequence[Table], transport: Transport) -> None:
        self._tables, self._transport = list(tables), transport
        self._rank, self._world_size = transport.peers.rank, transport.peers.world_size

    def send_ids(self, requested: Mapping[str, UniqueIds], *, exhausted: bool = False) -> AllToAllPlan:
        """Ask the owners for rows, and learn what the others want.

        `exhausted`: this rank has no batch. It wants nothing, and tells the others in the exchange of counts.
        """
        uniques = [requested[table.name].unique for table in self._tables]
        cuts = [table.cuts(unique, self._world_size) for table, unique in zip(self._tables, uniques, strict=True)]
        counts = [[cut[rank + 1] - cut[rank] for cut in cuts] for rank in range(self._world_size)]
        one_each = [1] * self._world_size
        message = torch.tensor([[*count, int(exhausted)] for count in counts], device=uniques[0].device)
        received = self._transport.all_to_all(message, one_each, one_each, name="id counts").wait().tolist()
        if ended := tuple(rank for rank, (*_, flag) in enumerate(received) if flag):
            return AllToAllPlan([], [], {}, ended)
        served = [count for *count, _ in received]
        ids = self._start_transfer(uniques, counts, served, name="ids")()
        first = [table.owned(self._rank, self._world_size).start for table in self._tables]
        local_rows = {t.name: ids[i] - first[i] for i, t in enumerate(self._tables)}
        return AllToAllPlan(counts, served, local_rows)

    def send_split(
        self, this: AllToAllPlan, following: AllToAllPlan, shared: Mapping[str, SharedIds]
    ) -> tuple[SplitPlan, SplitPlan]:
        """Owners say which ids of two batches are in both, one bit each. `shared`: what they found, per table."""
        names = [table.name for table in self._tables]
        found = [{name: shared[name].in_next for name in names}, {name: shared[name].in_this for name in names}]
        served = [a + b for a, b in zip(this.served, following.served, strict=True)]
        requested = [a + b for a, b in zip(this.requested, following.requested, strict=True)]
        bits = _by_rank([mask for of_batch in found for mask in of_batch.values()], served)
        send, receive = ([sum(counts) for counts in side] for side in (served, requested))
        sizes = packed_sizes(send), packed_sizes(receive)
        got = self._transport.all_to_all(pack(bits, send), *sizes, name="shared ids").wait()
        masks = _by_table(unpack(got, receive), requested)
        mine = [dict(zip(names, masks[: len(names)], strict=True)), dict(zip(names, masks[len(names) :], strict=True))]
        routes = zip((this, following), mine, found, strict=True)
        one, other = (SplitPlan(r.subset(m, f), r.subset(_invert(m), _invert(f)), m) for r, m, f in routes)
        return one, other

    def send_rows(self, plan: AllToAllPlan, rows: Mapping[str, Tensor]) -> PendingRows:
        """Owners give what they were asked for; each rank gets its distinct rows, ascending by id."""
        return self._by_dim(rows, plan.served, plan.requested, name="rows")

    def send_gradients(self, plan: AllToAllPlan, gradients: Mapping[str, Tensor]) -> PendingRows:
        """Gradients of the rows go to their owners, who get one per row and rank that asked for it."""
        return self._by_dim(gradients, plan.requested, plan.served, name="row gradients")

    def _by_dim(self, values: Mapping[str, Tensor], send: Counts, receive: Counts, *, name: str) -> PendingRows:
        coming = []
        for group in by_dim(self._tables):
            place = [self._tables.index(table) for table in group]
            mine, theirs = ([[counts[i] for i in place] for counts in side] for side in (send, receive))
            parts = [values[table.name] for table in group]
            one = self._start_transfer(parts, mine, theirs, name=f"{name} of width {group[0].dim}")
            coming.append(([table.name for table in group], one))
        return PendingRows(coming)

    def _start_transfer(
        self, by_table: list[Tensor], send: Counts, receive: Counts, *, name: str
    ) -> Callable[[], list[Tensor]]:
        """Send each table's part, ranks in order; what is called to wait for it gives what arrives in the same form."""
        rows, counts = _by_rank(by_table, send), [[sum(of_rank) for of_rank in side] for side in (send, receive)]
        work = self._transport.all_to_all(rows, *counts, name=name)
        return lambda: _by_table(work.wait(), receive)


def _count_selected(masks: list[Tensor], counts: Counts) -> Counts:
    """How many of the ids that masks mean go to each rank, by rank and table."""
    found = []
    for place, mask in enumerate(masks):
        ends = torch.tensor([0, *itertools.accumulate(c[place] for c in counts)], device=mask.device)
        found.append(torch.cat([mask.new_zeros(1), mask]).cumsum(0)[ends].diff().tolist())
    return [list(of_rank) for of_rank in zip(*found, strict=True)]


def _invert(masks: Masks) -> Masks:
    return {name: ~mask for name, mask in masks.items()}


def _by_rank(by_table: list[Tensor], counts: Counts) -> Tensor:
    """Lay the parts of each table end to end, rank by rank. A table that travels alone lies so already."""
    if len(by_table) == 1:
        return by_table[0]
    pieces = [subset.split([c[i] for c in counts]) for i, subset in enumerate(by_table)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


def _by_table(by_rank: Tensor, counts: Counts) -> list[Tensor]:
    """The other way round."""
    tables = len(counts[0])
    if tables == 1:
        return [by_rank]
    pieces = by_rank.split([count for of_rank in counts for count in of_rank])
    return [torch.cat(pieces[i::tables]) for i in range(tables)]
