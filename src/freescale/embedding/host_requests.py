"""The requests of the ranks of a host, merged: each row is requested once per host, and its gradients are added there.

A row of another host is merged by the rank that leads the traffic with that host, for the tables of this width; a row
of this host is merged by its owner. Pure.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from freescale import deterministic
from freescale.embedding.exchange import AllToAllPlan
from freescale.embedding.ids import UniqueIds, deduplicate_tables, spread
from freescale.embedding.tables import RowKeys, SortedRequests, Table, by_dim, join
from freescale.transport.host_layout import HostLayout


def merging_ranks(tables: Sequence[Table], layout: HostLayout, rank: int) -> Tensor:
    """Return which rank of this host merges the requests of each table to each owner: [tables, owners].

    The ranks of the host count from 0.
    """
    host = layout.host_of[rank]
    first, turns = layout.ranks[host][0], {t.name: turn for turn, of in enumerate(by_dim(tables)) for t in of}
    return torch.tensor(
        [
            [
                (owner if other == host else layout.leader(host, other, turns[table.name])) - first
                for owner, other in enumerate(layout.host_of)
            ]
            for table in tables
        ]
    )


class MergeKeys:
    """Sorts the requests of a rank by table, then by the rank of its host that merges them. It receives ids."""

    is_ascending = False

    def __init__(self, tables: Sequence[Table], layout: HostLayout, rank: int) -> None:
        self._rows = RowKeys(tables, len(layout.host_of))
        self._tables, self._ranks = len(tables), len(layout.ranks[layout.host_of[rank]])
        merging = merging_ranks(tables, layout, rank)
        self._key = (torch.arange(self._tables)[:, None] * self._ranks + merging).flatten()

    def sort(self, ids: Sequence[Tensor]) -> SortedRequests:
        """Return requests of the ascending ids of each table, by merging rank. The tables stay in order."""
        by_owner, sizes = self._rows.sort(ids), [len(of_table) for of_table in ids]
        counts = self._rows.count(by_owner.keys).flatten()
        self._key = self._key.to(counts.device)
        key = self._key.repeat_interleave(counts, output_size=sum(sizes))
        keys, order = key.sort(stable=True)
        places = by_owner.places[order]
        begins = [
            begin - place for begin, place in zip([0, *accumulate(sizes)], self.first_places(sizes), strict=False)
        ]
        return SortedRequests(keys, join(ids)[places + spread(begins, sizes, keys.device)], places)

    def count(self, keys: Tensor) -> Tensor:
        """Return how many ascending keys each rank of the host merges: [tables, ranks]."""
        ends = torch.arange(self._tables * self._ranks + 1, device=keys.device)
        return torch.searchsorted(keys, ends).diff().view(self._tables, -1)

    def first_places(self, sizes: Sequence[int]) -> list[int]:
        """Return the place of the first id of each table among those of its run."""
        return self._rows.first_places(sizes)

    def first_keys(self, rank: int = 0) -> list[int]:  # noqa: ARG002
        """Return 0 for each table: ids are not numbered by rank."""
        return [0] * self._tables


class HostRequests(NamedTuple):
    """What a rank merges for its host."""

    near: AllToAllPlan
    """The requests of the ranks of this host, and this rank's to the ranks that merge them."""
    far: AllToAllPlan
    """The merged requests, to the owners."""
    index: dict[str, Tensor]
    """Per table, the place among the rows that `far` requests, for each request that this rank merges."""

    def empty(self) -> "HostRequests":
        """Return no requests of the same tables and ranks."""
        return HostRequests(self.near.empty(), self.far.empty(), {name: of[:0] for name, of in self.index.items()})

    def for_each_request(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of each request, of the rows that `far` requests."""
        return {name: rows[name].index_select(0, index) for name, index in self.index.items()}

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sum of the gradients of each row that `far` requests, added in the order of the ranks."""
        sizes = dict(zip(self.far.tables, map(sum, zip(*self.far.requested, strict=True)), strict=True))
        return {
            name: deterministic.index_add_(of.new_zeros(sizes[name], *of.shape[1:]), self.index[name], of)
            for name, of in gradients.items()
        }

    def shared(self, subset: AllToAllPlan) -> dict[str, Tensor]:
        """Return for each request whether its row is in a subset of `far`."""
        masks, places, others = {}, self.far.index_by_table, subset.index_by_table
        for name, place in places.items():
            mask = torch.zeros(len(place), dtype=torch.bool, device=place.device)
            mask[others[name]] = True
            masks[name] = mask[place][self.index[name]]
        return masks

    def subset(self, near: AllToAllPlan, far: AllToAllPlan, masks: Mapping[str, Tensor]) -> "HostRequests":
        """Return the selected requests. `near`, `far`: their plans."""
        index, places, others = {}, self.far.index_by_table, far.index_by_table
        for name, place in places.items():
            number = torch.zeros_like(place)
            number[others[name]] = torch.arange(len(others[name]), device=place.device)
            index[name] = number[place][self.index[name][masks[name]]]
        return HostRequests(near, far, index)


def merge(tables: Sequence[Table], requests: AllToAllPlan) -> dict[str, UniqueIds]:
    """Return the distinct ids of the requests that this rank merges, and the place of each request among them."""
    ids = requests.local_keys
    rows = [None if table.layout else table.rows for table in tables]
    found = deduplicate_tables([ids[table.name] for table in tables], rows=rows)
    return {table.name: unique for table, unique in zip(tables, found, strict=True)}


def requested_index(far: AllToAllPlan, merged: Mapping[str, UniqueIds]) -> dict[str, Tensor]:
    """Return for each request the place of its row among those that the merged plan requests, by owner."""
    index = {}
    for name, place in far.index_by_table.items():
        number = torch.empty_like(place).index_copy_(0, place, torch.arange(len(place), device=place.device))
        index[name] = number[merged[name].inverse]
    return index
