"""The transfers of a step in two levels: between the ranks of a host, and between hosts.

Two exchanges follow each other. In the near one the ranks of a host request rows of the ranks that merge requests; in
the far one these request each row once of its owner. Rows come back through both. Gradients are added per host before
they leave it. The flat exchange adds in the same order (`embedding.sharded`), so both give bitwise the same result.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from freescale.embedding.exchange import AllToAllPlan, EmbeddingExchange, PendingRows, SplitPlan
from freescale.embedding.host_requests import HostRequests, MergeKeys, merge, requested_index
from freescale.embedding.ids import SharedIds, UniqueIds
from freescale.embedding.tables import Table, by_dim
from freescale.transport.two_level import TwoLevelTransport


class TwoLevelExchange:
    """An exchange with the interface of `EmbeddingExchange`, in which hosts request each row once."""

    def __init__(
        self, tables: Sequence[Table], transport: TwoLevelTransport, *, first_rows: Mapping[str, int] | None = None
    ) -> None:
        """`first_rows`: the number of the first local row of each table; 0 by default."""
        self._tables = list(tables)
        keys = MergeKeys(tables, transport.layout, transport.peers.rank)
        self._near = EmbeddingExchange(tables, transport.near, keys=keys)
        by_width = [transport.rotated(turn) for turn in range(len(by_dim(tables)))]
        self._far = EmbeddingExchange(tables, transport, first_rows=first_rows, by_width=by_width)

    def send_ids(
        self,
        requested: Mapping[str, UniqueIds],
        *,
        replicated: Mapping[str, int] | None = None,
        exhausted: bool = False,
        time: int = 0,
    ) -> AllToAllPlan:
        """Request rows of their owners, and receive the requests of other hosts: see `EmbeddingExchange`."""
        near = self._near.send_ids(requested, replicated=replicated, exhausted=exhausted, time=time)
        if near.exhausted:  # this host requests nothing, and a rank of it tells the others
            return self._far.send_ids({t.name: _no_ids(requested) for t in self._tables}, exhausted=exhausted)
        merged = merge(self._tables, near)
        far = self._far.send_ids(merged, exhausted=exhausted, time=time)
        if far.exhausted:
            return far
        return _plan(HostRequests(near, far, requested_index(far, merged)))

    def send_split(self, this: AllToAllPlan, following: AllToAllPlan, shared: SharedIds) -> tuple[SplitPlan, SplitPlan]:
        """Send one bit per id: whether both batches have it. `shared`: what the owners found, in the order of keys."""
        requests = [_requests(this), _requests(following)]
        # Dynamic ids were replaced by rows in these plans since then.
        merged = requests[0].far._replace(rows=this.rows), requests[1].far._replace(rows=following.rows)
        far = self._far.send_split(*merged, shared)
        masks = [of_batch.shared(split.shared) for of_batch, split in zip(requests, far, strict=True)]
        found = SharedIds(*(torch.cat([*of_batch.values()]) for of_batch in masks))
        near = self._near.send_split(requests[0].near, requests[1].near, found)
        one, other = (
            SplitPlan(
                _plan(of_batch.subset(of_near.shared, of_far.shared, mask)),
                _plan(of_batch.subset(of_near.exclusive, of_far.exclusive, {name: ~m for name, m in mask.items()})),
            )
            for of_batch, of_near, of_far, mask in zip(requests, near, far, masks, strict=True)
        )
        return one, other

    def send_numbers(self, plan: AllToAllPlan, table: str, numbers: Tensor) -> Tensor:
        """Send a number for each requested row of one table; return those of this rank's unique ids."""
        requests = _requests(plan)
        got = self._far.send_numbers(requests.far, table, numbers)
        by_owner = got[requests.far.index_by_table[table]]
        return self._near.send_numbers(requests.near, table, by_owner[requests.index[table]])

    def send_rows(self, plan: AllToAllPlan, rows: Mapping[str, Tensor]) -> PendingRows:
        """Send rows to the hosts that requested them; each rank receives its unique rows, by merging rank."""
        requests = _requests(plan)
        coming = self._far.send_rows(requests.far, rows)
        return PendingRows(lambda: self._near.send_rows(requests.near, requests.for_each_request(coming.wait())).wait())

    def send_gradients(self, plan: AllToAllPlan, gradients: Mapping[str, Tensor]) -> PendingRows:
        """Add row gradients per host and send them to the owners, which receive one per row and host."""
        requests = _requests(plan)
        added = requests.add_gradients(self._near.send_gradients(requests.near, gradients).wait())
        return self._far.send_gradients(requests.far, added)


def _requests(plan: AllToAllPlan) -> HostRequests:
    assert plan.of_host is not None, "a plan of a flat exchange"
    return plan.of_host


def _no_ids(requested: Mapping[str, UniqueIds]) -> UniqueIds:
    ids = next(iter(requested.values())).unique[:0]
    return UniqueIds(ids, ids)


def _plan(requests: HostRequests) -> AllToAllPlan:
    """Return a plan with the requests of this rank and the rows that it owns."""
    near, far = requests.near, requests.far
    own = far.rows, near.places, far.keys, far.largest, near.first_places
    return AllToAllPlan(far.tables, near.requested, far.served, *own, latest=far.latest, of_host=requests)
