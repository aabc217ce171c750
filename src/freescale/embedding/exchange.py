"""The all-to-alls of a step: ids to the owners of their rows, rows back, gradients to the owners.

All ids are one transfer, and so are the rows of all tables of one width. A message to a rank holds the tables in order;
the data of a table holds the ranks in order. Indices of all tables are one tensor, so that the host waits for a device
once per batch for the numbers of ids, and once for those of shared ids.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from freescale.embedding.ids import SharedIds, UniqueIds, pack, packed_sizes, partition, spread, unpack
from freescale.embedding.tables import RowKeys, SortedRequests, Table, as_one, by_dim, join
from freescale.transport.base import Transport

if TYPE_CHECKING:
    from freescale.embedding.host_requests import HostRequests

Counts = list[list[int]]
"""Rows by rank, then by table."""


class AllToAllPlan(NamedTuple):
    """The all-to-all of the rows of a batch, or of a subset of them."""

    tables: list[str]
    requested: Counts
    """Rows that this rank requests of each owner."""
    served: Counts
    """Rows that each rank requests of this one."""
    rows: Tensor
    """The local rows that ranks request, numbered as in the shard: by table, then by rank."""
    places: Tensor
    """The unique id of each row that this rank requests, by table, then by owner.

    Ids are numbered over each run, which is consecutive tables of one width: `first_places` of each table.
    """
    keys: Tensor
    """`rows`, numbered over all tables. None of a subset."""
    largest: list[int]
    """By table: no rank requests more rows of another one. The same on all ranks."""
    first_places: list[int]
    is_ascending: bool = False
    """Whether all unique ids are requested, and the owners have them in ascending order."""
    latest: int = 0
    """Time of the latest event of the batch on any rank, in seconds."""
    exhausted: tuple[int, ...] = ()
    """Ranks without such a batch, the same on all ranks. If there are any, no ids were sent."""
    ids: Tensor | None = None
    """What ranks requested, as `rows`, if some ids are dynamic: several of them may have one row."""
    of_host: "HostRequests | None" = None
    """In a two-level exchange: what this rank requests for its host."""

    @property
    def local_rows(self) -> dict[str, Tensor]:
        """Per table, the local rows that ranks request, by rank."""
        return dict(zip(self.tables, self.rows.split(_by_table_sizes(self.served)), strict=True))

    @property
    def local_keys(self) -> dict[str, Tensor]:
        """Per table, `keys`."""
        return dict(zip(self.tables, self.keys.split(_by_table_sizes(self.served)), strict=True))

    @property
    def local_ids(self) -> dict[str, Tensor]:
        """Per table, `ids`, or `rows` where each id has a row of its own."""
        requests = self.rows if self.ids is None else self.ids
        return dict(zip(self.tables, requests.split(_by_table_sizes(self.served)), strict=True))

    @property
    def index_by_table(self) -> dict[str, Tensor]:
        """Per table, the unique id of each row that this rank requests, by owner."""
        places = self._places
        pairs = zip(places.items(), self.first_places, strict=True)
        return {name: of_table - first if first else of_table for (name, of_table), first in pairs}

    @property
    def _places(self) -> dict[str, Tensor]:
        return dict(zip(self.tables, self.places.split(_by_table_sizes(self.requested)), strict=True))

    def empty(self) -> "AllToAllPlan":
        """Return a plan of the same tables and ranks without rows."""
        requested, served = ([[0] * len(counts) for counts in side] for side in (self.requested, self.served))
        no_rows, zeros = self.rows[:0], [0] * len(self.tables)
        none = AllToAllPlan(self.tables, requested, served, no_rows, no_rows, no_rows, zeros, self.first_places)
        none = none._replace(ids=None if self.ids is None else no_rows)
        return none if self.of_host is None else none._replace(of_host=self.of_host.empty())

    def in_order_of_ids(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return all requested rows, which are by owner, in the ascending order of the unique ids."""
        if self.is_ascending:
            return rows
        index = self.index_by_table
        return {name: torch.empty_like(values).index_copy_(0, index[name], values) for name, values in rows.items()}

    def by_owner(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of the rows that this rank requests, by owner. `values`: of all unique ids."""
        if self.is_ascending:
            return dict(values)
        places, owned = self._places, dict[str, Tensor]()
        for run in runs(self.tables, values):
            index = [places[name] for name in run]
            found = join([values[name] for name in run]).index_select(0, join(index))
            owned |= zip(run, found.split([len(of_table) for of_table in index]), strict=True)
        return owned

    def scatter(self, received: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
        """Write received rows, which are by owner, to `rows` of all unique ids. Those of a run are one allocation."""
        places = self._places
        for run in runs(self.tables, rows):
            whole = as_one([rows[name] for name in run])
            assert whole is not None, "rows of one width are one allocation"
            whole[join([places[name] for name in run])] = join([received[name] for name in run])


class SplitPlan(NamedTuple):
    """The rows of a batch, split by whether another batch has them too."""

    shared: AllToAllPlan
    exclusive: AllToAllPlan


class PendingRows(NamedTuple):
    """Rows of several tables in transfer."""

    finish: Callable[[], dict[str, Tensor]]

    def wait(self) -> dict[str, Tensor]:
        """Return the received rows of each table, ranks in order."""
        return self.finish()


class RequestKeys(Protocol):
    """Sorts requests by the rank that they go to. `RowKeys` sorts them by the owner of the row."""

    @property
    def is_ascending(self) -> bool:
        """Whether requests keep the order of the ids."""

    def sort(self, ids: Sequence[Tensor], /) -> SortedRequests:
        """Return requests of the ascending ids of each table."""

    def count(self, keys: Tensor, /) -> Tensor:
        """Return how many ascending keys go to each rank: [tables, ranks]."""

    def first_places(self, sizes: Sequence[int], /) -> list[int]:
        """Return the place of the first id of each table among those of its run."""

    def first_keys(self, rank: int = 0, /) -> list[int]:
        """Return the first key of a rank in each table."""


class EmbeddingExchange:
    """The transfers of a step, for tables sharded row-wise over all ranks."""

    def __init__(
        self,
        tables: Sequence[Table],
        transport: Transport,
        *,
        first_rows: Mapping[str, int] | None = None,
        keys: "RequestKeys | None" = None,
        by_width: Sequence[Transport] | None = None,
    ) -> None:
        """`first_rows`: the number of the first local row of each table; 0 by default.

        `keys`: which rank a request goes to; the owner of the row by default. `by_width`: the transport of the rows of
        each width.
        """
        self._tables, self._transport = list(tables), transport
        self._rank, self._world_size = transport.peers.rank, transport.peers.world_size
        self._keys = keys or RowKeys(tables, self._world_size)
        self._by_width = by_width or [transport] * len(by_dim(tables))
        firsts, first_keys = first_rows or {}, self._keys.first_keys(self._rank)
        shift = [key - firsts.get(table.name, 0) for key, table in zip(first_keys, tables, strict=True)]
        self._shift = [0 if table.layout else value for value, table in zip(shift, tables, strict=True)]

    def send_ids(
        self,
        requested: Mapping[str, UniqueIds],
        *,
        replicated: Mapping[str, int] | None = None,
        exhausted: bool = False,
        time: int = 0,
    ) -> AllToAllPlan:
        """Request rows of their owners, and receive the requests of other ranks.

        `replicated`: how many of the first ids of a table are not requested. `exhausted`: this rank has no batch. It
        requests nothing; the flag is exchanged with the counts. `time`: the latest event of this rank's batch. Dynamic
        ids come instead of rows: see `embedding.dynamic_tables`.
        """
        names = [table.name for table in self._tables]
        left_out = [(replicated or {}).get(name, 0) for name in names]
        sent_ids = [requested[name].unique[count:] for name, count in zip(names, left_out, strict=True)]
        sorted_ids = self._keys.sort(sent_ids)
        keys, places = sorted_ids.sent, sorted_ids.places
        counts, received = self._send_counts(self._keys.count(sorted_ids.keys), exhausted=exhausted, time=time)
        if ended := tuple(rank for rank, (*_, flag, _) in enumerate(received) if flag):
            return AllToAllPlan([], [], [], keys[:0], keys[:0], keys[:0], [], [], exhausted=ended)
        served = [of_rank[: len(names)] for of_rank in received]
        *largest, _, latest = [max(column) for column in zip(*received, strict=True)][len(names) :]
        by_table = keys.split(_by_table_sizes(counts))
        keys = self._start_transfer(by_table, counts, served, most=sum(largest), name="ids")()
        rows = keys - spread(self._shift, _by_table_sizes(served), keys.device)
        first_places = self._keys.first_places([len(requested[name].unique) for name in names])
        ascending, ids = self._keys.is_ascending, keys if any(table.layout for table in self._tables) else None
        if replicated:  # places are those among all unique ids
            sizes, ascending = [len(of_table) for of_table in sent_ids], False
            triples = zip(first_places, left_out, self._keys.first_places(sizes), strict=True)
            places = places + spread([first + count - sent for first, count, sent in triples], sizes, places.device)
        numbers = rows, places, keys, largest, first_places
        return AllToAllPlan(names, counts, served, *numbers, is_ascending=ascending, latest=latest, ids=ids)

    def _send_counts(self, counts: Tensor, *, exhausted: bool, time: int) -> tuple[Counts, Counts]:
        """Send each rank the number of its rows, the largest such numbers of this rank, its latest time, and whether
        it has no batch.

        `counts`: [tables, ranks]. Returns its transpose, and the numbers that ranks have sent to this one.
        """
        most = counts.amax(1, keepdim=True).expand_as(counts)
        flags = [torch.full_like(counts[:1], value) for value in (int(exhausted), time)]
        message, one_each = torch.cat([counts, most, *flags]).T.contiguous(), [1] * self._world_size
        work = self._transport.all_to_all(message, one_each, one_each, name="id counts", most=1)
        sent, received = torch.stack([message, work.wait_on_host()]).tolist()  # the host waits
        return [of_rank[: len(counts)] for of_rank in sent], received

    def send_split(self, this: AllToAllPlan, following: AllToAllPlan, shared: SharedIds) -> tuple[SplitPlan, SplitPlan]:
        """Send one bit per id: whether both batches have it. `shared`: what the owners found, in the order of keys."""
        plans = this, following
        served = _join_counts(this.served, following.served)
        requested = _join_counts(this.requested, following.requested)
        found = torch.cat(shared)
        send, receive = ([sum(counts) for counts in side] for side in (served, requested))
        bits = pack(_by_rank(found.split(_by_table_sizes(served)), served), send)
        sizes = packed_sizes(send), packed_sizes(receive)
        most = packed_sizes([sum(this.largest) + sum(following.largest)])[0]
        got = self._transport.all_to_all(bits, *sizes, name="shared ids", most=most).wait()
        masks = _by_table(unpack(got, receive), requested)
        ids = [plan.ids for plan in plans if plan.ids is not None]
        values = torch.cat([this.places, following.places, this.rows, following.rows, *ids])
        blocks = [*_by_table_and_rank(requested), *_by_table_and_rank(served) * (2 if ids else 1)]
        divided = partition(values, torch.cat([masks, found, *([found] if ids else [])]), blocks)
        others = [size - count for size, count in zip(blocks, divided.counts, strict=True)]
        shared_plans = _subsets(plans, divided.counts, divided.selected)
        one, other = map(SplitPlan, shared_plans, _subsets(plans, others, divided.others))
        return one, other

    def send_numbers(self, plan: AllToAllPlan, table: str, numbers: Tensor) -> Tensor:
        """Send a number for each requested row of one table; return those of this rank's unique ids."""
        at = plan.tables.index(table)
        served, requested = ([[of_rank[at]] for of_rank in side] for side in (plan.served, plan.requested))
        got = self._start_transfer([numbers], served, requested, most=plan.largest[at], name=f"slots of {table}")()
        return torch.empty_like(got).index_copy_(0, plan.index_by_table[table], got)

    def send_rows(self, plan: AllToAllPlan, rows: Mapping[str, Tensor]) -> PendingRows:
        """Send rows to the ranks that requested them; each rank receives its unique rows, by owner."""
        return self._by_dim(rows, plan.served, plan.requested, plan.largest, name="rows")

    def send_gradients(self, plan: AllToAllPlan, gradients: Mapping[str, Tensor]) -> PendingRows:
        """Send row gradients, which are by owner, to the owners, which receive one per row and requesting rank."""
        return self._by_dim(gradients, plan.requested, plan.served, plan.largest, name="row gradients")

    def _by_dim(
        self, values: Mapping[str, Tensor], send: Counts, receive: Counts, largest: Sequence[int], *, name: str
    ) -> PendingRows:
        transfers = []
        for group, transport in zip(by_dim(self._tables), self._by_width, strict=True):
            place = [self._tables.index(table) for table in group]
            sent, received = ([[counts[i] for i in place] for counts in side] for side in (send, receive))
            parts, most = [values[table.name] for table in group], sum(largest[i] for i in place)
            label = f"{name} of width {group[0].dim}"
            wait = self._start_transfer(parts, sent, received, most=most, name=label, transport=transport)
            transfers.append(([table.name for table in group], _by_table_sizes(received), wait))

        def finish() -> dict[str, Tensor]:
            got: dict[str, Tensor] = {}
            for names, sizes, wait in transfers:
                got |= zip(names, wait().split(sizes), strict=True)
            return got

        return PendingRows(finish)

    def _start_transfer(
        self,
        by_table: Sequence[Tensor],
        send: Counts,
        receive: Counts,
        *,
        most: int,
        name: str,
        transport: Transport | None = None,
    ) -> Callable[[], Tensor]:
        """Start a transfer of data by table. The returned function waits, and returns the received data by table."""
        rows, counts = _by_rank(by_table, send), [[sum(of_rank) for of_rank in side] for side in (send, receive)]
        work = (transport or self._transport).all_to_all(rows, *counts, name=name, most=most)
        return lambda: _by_table(work.wait(), receive)


def _subsets(plans: Sequence[AllToAllPlan], counts: Sequence[int], values: Tensor) -> list[AllToAllPlan]:
    """Return the plans of some ids. `counts`: requested, then served ids, each by plan, table and rank; so `values`.

    Where plans have ids, those of served rows follow.
    """
    names, ranks = plans[0].tables, len(plans[0].requested)
    size = len(names) * ranks
    parts = [counts[begin : begin + size] for begin in range(0, len(counts), size)]
    requested_1, requested_2, served_1, served_2, *ids = values.split([sum(part) for part in parts])
    by_rank = [[list(part[rank::ranks]) for rank in range(ranks)] for part in parts]
    kept = (by_rank[0], by_rank[2], served_1, requested_1), (by_rank[1], by_rank[3], served_2, requested_2)
    return [
        AllToAllPlan(names, *own, values[:0], plan.largest, plan.first_places, ids=of_plan)
        for plan, own, of_plan in zip(plans, kept, ids or (None, None), strict=True)
    ]


def runs(tables: Iterable[str], values: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of consecutive tables of one width."""
    return [list(run) for _, run in groupby(tables, lambda name: values[name].shape[1])]


def _join_counts(these: Counts, those: Counts) -> Counts:
    """Return the counts of the tables of two batches."""
    return [a + b for a, b in zip(these, those, strict=True)]


def _by_table_sizes(counts: Counts) -> list[int]:
    """Return the rows of each table."""
    return [sum(of_table) for of_table in zip(*counts, strict=True)]


def _by_table_and_rank(counts: Counts) -> list[int]:
    """Return the counts by table, then by rank."""
    return [count for of_table in zip(*counts, strict=True) for count in of_table]


def _by_rank(by_table: Sequence[Tensor], counts: Counts) -> Tensor:
    """Reorder data by table into data by rank. A single table is in that order already."""
    if len(by_table) == 1:
        return by_table[0]
    pieces = [subset.split([c[i] for c in counts]) for i, subset in enumerate(by_table)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


def _by_table(by_rank: Tensor, counts: Counts) -> Tensor:
    """Reorder data by rank into data by table."""
    tables = len(counts[0])
    if tables == 1:
        return by_rank
    pieces = by_rank.split([count for of_rank in counts for count in of_rank])
    return torch.cat([piece for table in range(tables) for piece in pieces[table::tables]])
