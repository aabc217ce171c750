"""The all-to-alls of a step: ids to the owners of their rows, rows back, gradients to the owners.

All ids are one transfer, and so are the rows of all tables of one width. A message to a rank holds the tables in order;
the data of a table holds the ranks in order.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.embedding.ids import SharedIds, UniqueIds, pack, packed_sizes, unpack
from freescale.embedding.tables import RowPositions, Table, by_dim
from freescale.transport.base import Transport

Counts = list[list[int]]
"""Rows by rank, then by table."""
Masks = dict[str, Tensor]
"""Per table, a mask over ids."""


class AllToAllPlan(NamedTuple):
    """The all-to-all of the rows of a batch, or of a subset of them."""

    requested: Counts
    """Rows that this rank requests of each owner."""
    served: Counts
    """Rows that each rank requests of this one."""
    local_rows: dict[str, Tensor]
    """Per table, the local rows that ranks request, by rank; numbered from the first local row."""
    index: dict[str, Tensor]
    """Per table, the unique id of each row that this rank requests, by owner. Without an entry: all, ascending."""
    exhausted: tuple[int, ...] = ()
    """Ranks without such a batch, the same on all ranks. If there are any, no ids were sent."""

    def empty(self) -> "AllToAllPlan":
        """Return a plan of the same tables and ranks without rows."""
        none = [[0] * len(counts) for counts in self.requested]
        return AllToAllPlan(none, none, {name: rows[:0] for name, rows in self.local_rows.items()}, {})

    def subset(self, requested: Masks, served: Masks) -> "AllToAllPlan":
        """Return the plan of some ids: masks over those that this rank requests and those that it serves."""
        counts = (
            _count_selected([*requested.values()], self.requested),
            _count_selected([*served.values()], self.served),
        )
        index = {
            name: self.index[name][mask] if name in self.index else mask.nonzero()[:, 0]
            for name, mask in requested.items()
        }
        return AllToAllPlan(*counts, {name: rows[served[name]] for name, rows in self.local_rows.items()}, index)

    def in_order_of_ids(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return all requested rows, which are by owner, in the ascending order of the unique ids."""
        return {
            name: torch.empty_like(values).index_copy_(0, self.index[name], values) if name in self.index else values
            for name, values in rows.items()
        }

    def by_owner(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of the rows that this rank requests, by owner. `values`: of all unique ids."""
        return {
            name: of_ids.index_select(0, self.index[name]) if name in self.index else of_ids
            for name, of_ids in values.items()
        }


class SplitPlan(NamedTuple):
    """The rows of a batch, split by whether another batch has them too."""

    shared: AllToAllPlan
    exclusive: AllToAllPlan


class PendingRows(NamedTuple):
    """Rows of several tables in transfer, one transfer per width."""

    transfers: list[tuple[list[str], Callable[[], list[Tensor]]]]

    def wait(self) -> dict[str, Tensor]:
        """Return the received rows of each table, ranks in order."""
        return {name: subset for names, waited in self.transfers for name, subset in zip(names, waited(), strict=True)}


class EmbeddingExchange:
    """The transfers of a step, for tables sharded row-wise over all ranks."""

    def __init__(self, tables: Sequence[Table], transport: Transport) -> None:
        self._tables, self._transport = list(tables), transport
        self._positions = [RowPositions(table.order) for table in tables]
        self._rank, self._world_size = transport.peers.rank, transport.peers.world_size

    def send_ids(self, requested: Mapping[str, UniqueIds], *, exhausted: bool = False) -> AllToAllPlan:
        """Request rows of their owners, and receive the requests of other ranks.

        `exhausted`: this rank has no batch. It requests nothing; the flag is exchanged with the counts.
        """
        index, uniques = {}, [requested[table.name].unique for table in self._tables]
        for place, (table, position) in enumerate(zip(self._tables, self._positions, strict=True)):
            if position.order.shards > 1:
                uniques[place], index[table.name] = position(uniques[place]).sort()
        cuts = [table.cuts(unique, self._world_size) for table, unique in zip(self._tables, uniques, strict=True)]
        counts = [[cut[rank + 1] - cut[rank] for cut in cuts] for rank in range(self._world_size)]
        one_each = [1] * self._world_size
        message = torch.tensor([[*count, int(exhausted)] for count in counts], device=uniques[0].device)
        received = self._transport.all_to_all(message, one_each, one_each, name="id counts").wait_on_host().tolist()
        if ended := tuple(rank for rank, (*_, flag) in enumerate(received) if flag):
            return AllToAllPlan([], [], {}, {}, ended)
        served = [count for *count, _ in received]
        ids = self._start_transfer(uniques, counts, served, name="ids")()
        first = [table.owned(self._rank, self._world_size).start for table in self._tables]
        local_rows = {t.name: ids[i] - first[i] for i, t in enumerate(self._tables)}
        return AllToAllPlan(counts, served, local_rows, index)

    def send_split(
        self, this: AllToAllPlan, following: AllToAllPlan, shared: Mapping[str, SharedIds]
    ) -> tuple[SplitPlan, SplitPlan]:
        """Send one bit per id: whether both batches have it. `shared`: what the owners found, per table."""
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
        one, other = (SplitPlan(r.subset(m, f), r.subset(_invert(m), _invert(f))) for r, m, f in routes)
        return one, other

    def send_rows(self, plan: AllToAllPlan, rows: Mapping[str, Tensor]) -> PendingRows:
        """Send rows to the ranks that requested them; each rank receives its unique rows, by owner."""
        return self._by_dim(rows, plan.served, plan.requested, name="rows")

    def send_gradients(self, plan: AllToAllPlan, gradients: Mapping[str, Tensor]) -> PendingRows:
        """Send row gradients, which are by owner, to the owners, which receive one per row and requesting rank."""
        return self._by_dim(gradients, plan.requested, plan.served, name="row gradients")

    def _by_dim(self, values: Mapping[str, Tensor], send: Counts, receive: Counts, *, name: str) -> PendingRows:
        transfers = []
        for group in by_dim(self._tables):
            place = [self._tables.index(table) for table in group]
            sent, received = ([[counts[i] for i in place] for counts in side] for side in (send, receive))
            parts = [values[table.name] for table in group]
            wait = self._start_transfer(parts, sent, received, name=f"{name} of width {group[0].dim}")
            transfers.append(([table.name for table in group], wait))
        return PendingRows(transfers)

    def _start_transfer(
        self, by_table: list[Tensor], send: Counts, receive: Counts, *, name: str
    ) -> Callable[[], list[Tensor]]:
        """Start a transfer of data by table. The returned function waits, and returns the received data by table."""
        rows, counts = _by_rank(by_table, send), [[sum(of_rank) for of_rank in side] for side in (send, receive)]
        work = self._transport.all_to_all(rows, *counts, name=name)
        return lambda: _by_table(work.wait(), receive)


def _count_selected(masks: list[Tensor], counts: Counts) -> Counts:
    """Return the number of selected ids by rank and table."""
    found = []
    for place, mask in enumerate(masks):
        ends = torch.tensor([0, *itertools.accumulate(c[place] for c in counts)], device=mask.device)
        found.append(torch.cat([mask.new_zeros(1), mask]).cumsum(0)[ends].diff().tolist())
    return [list(of_rank) for of_rank in zip(*found, strict=True)]


def _invert(masks: Masks) -> Masks:
    return {name: ~mask for name, mask in masks.items()}


def _by_rank(by_table: list[Tensor], counts: Counts) -> Tensor:
    """Reorder data by table into data by rank. A single table is in that order already."""
    if len(by_table) == 1:
        return by_table[0]
    pieces = [subset.split([c[i] for c in counts]) for i, subset in enumerate(by_table)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


def _by_table(by_rank: Tensor, counts: Counts) -> list[Tensor]:
    """Reorder data by rank into data by table."""
    tables = len(counts[0])
    if tables == 1:
        return [by_rank]
    pieces = by_rank.split([count for of_rank in counts for count in of_rank])
    return [torch.cat(pieces[i::tables]) for i in range(tables)]
