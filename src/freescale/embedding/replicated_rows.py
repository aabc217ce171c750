"""The most popular rows of sharded tables on every rank: they are not requested, and their gradients are all-reduced.

Items are numbered by popularity, so the n most popular rows of a table are its first n. Every rank has a copy of them
and of their optimizer state, and updates it alike from the same sum. A row without a gradient keeps its bits: SGD and
Adagrad add nothing. The owner of a row writes each update back to its shard, so checkpoints, exports and evaluation see
whole tables.

How many are worth it follows from the bytes between hosts. A rank requests a row once per step, however many of its
samples need it. With W ranks on H hosts of L ranks each, a host sends a row L p (H - 1) / H times per step, where p is
the probability that a rank requests it, and its gradient as often. A ring that all-reduces the gradient of a replicated
row sends 2 (W - 1) / W times its bytes out of every host. If hosts request each row once, p is that of the host, and
L = 1: then replication never sends less.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.config import TablesConfig
from freescale.embedding.ids import UniqueIds
from freescale.embedding.sharded import PlainShard, ShardedTables
from freescale.embedding.tables import RowPositions, Table
from freescale.transport.c10d import C10d

Floats = NDArray[np.float64]


class OwnRows(NamedTuple):
    """The replicated rows of a table that this rank owns."""

    rows: Tensor
    local: Tensor
    """Their numbers in the shard."""

    @staticmethod
    def of(table: Table, count: int, rank: int, world_size: int, device: torch.device) -> "OwnRows":
        """Find those of the first `count` rows."""
        rows, owned = torch.arange(count, device=device), table.owned(rank, world_size)
        local = RowPositions(table.order)(rows) - owned.start
        is_own = (local >= 0) & (local < len(owned))
        return OwnRows(rows[is_own], local[is_own])


class ReplicatedRows:
    """The first rows of tables, on this rank. All ranks hold the same."""

    def __init__(self, tables: ShardedTables, counts: Mapping[str, int], config: TablesConfig, transport: C10d) -> None:
        """`counts`: how many rows of each table; tables without any are left out. Collective."""
        self._transport, self._of_shard = transport, tables.shard.state()
        self._tables = {t.name: t for t in tables.tables if min(t.rows, counts.get(t.name, 0)) > 0}
        self.counts = {name: min(table.rows, counts[name]) for name, table in self._tables.items()}
        place = transport.peers.rank, transport.peers.world_size
        self._own = {
            name: OwnRows.of(table, self.counts[name], *place, self._of_shard[name].device)
            for name, table in self._tables.items()
        }
        self._state = {
            name: values.new_zeros(self.counts[table], *values.shape[1:])
            for name, values in self._of_shard.items()
            if (table := name.split(".")[0]) in self.counts
        }
        self._rows = PlainShard(self._state, config)
        self.gather()

    def gather(self) -> None:
        """Copy the rows from their owners, at the start and after a checkpoint was loaded. Collective."""
        for name, values in self._state.items():
            own = self._own[name.split(".")[0]]
            values.zero_()[own.rows] = self._of_shard[name][own.local]
            self._transport.all_reduce(values, name=f"replicated rows of {name}").wait_on_host()

    def count(self, unique_ids: Mapping[str, UniqueIds]) -> dict[str, int]:
        """Return how many ids of a batch have a replicated row, per table. On a device the host waits once."""
        found = [(unique_ids[name].unique < count).sum() for name, count in self.counts.items()]
        return dict(zip(self.counts, torch.stack(found).tolist(), strict=True))

    def read(self, ids: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
        """Copy the rows of these ids to the first of `rows`, which are those of all ids of a batch."""
        for name, values in self._rows.look_up(dict(ids)).items():
            rows[name][: len(values)] = values

    def sum_gradients(
        self, ids: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> Callable[[], dict[str, Tensor]]:
        """Start to sum the gradients of these ids over all ranks; the result waits, and returns one per replicated row.

        `gradients`: of all ids of a batch, these first. Those of all tables are one all-reduce.
        """
        sizes = [self._state[name].numel() for name in self.counts]
        (first, *_) = gradients.values()
        joint = first.new_zeros(sum(sizes))
        parts = {
            name: joint[end - size : end].view(self.counts[name], -1)
            for name, size, end in zip(self.counts, sizes, accumulate(sizes), strict=True)
        }
        for name, part in parts.items():
            part[ids[name]] = gradients[name][: len(ids[name])]
        work = self._transport.all_reduce(joint, name="gradients of replicated rows")

        def finish() -> dict[str, Tensor]:
            work.wait()
            return parts

        return finish

    def update(self, gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Update the rows, as all ranks do, and write those that this rank owns back to its shard."""
        every = {name: torch.arange(len(values), device=values.device) for name, values in gradients.items()}
        self._rows.update(every, gradients, lr=lr)
        for name, values in self._state.items():
            own = self._own[name.split(".")[0]]
            self._of_shard[name][own.local] = values[own.rows]

    def describe(self) -> list[str]:
        """Return what every rank holds, as human-readable lines."""
        lines = []
        for name, count in self.counts.items():
            held = sum(values.nbytes for key, values in self._state.items() if key.split(".")[0] == name)
            lines.append(f"table {name}: the {count:,} most popular rows on every rank, {held / 1e6:,.2f} MB")
        return lines


class Requesters(NamedTuple):
    """Who requests rows in a step: all ranks, or all hosts."""

    hosts: int
    per_host: float
    """Of each host."""
    lookups: float
    """Rows that each of them looks up in a table, before deduplication."""
    world_size: int


class Replication(NamedTuple):
    """The rows of a table that are worth replicating, and what a host sends for the table per step, in rows."""

    rows: int
    sent: float
    """Without replication: rows and gradients, on average over the hosts."""
    saved: float


def choose_replicated(share: Floats, requesters: Requesters, *, drawn: float = 0.0) -> Replication:
    """Return how many of the first rows to replicate. Deterministic.

    `share`: of all lookups, by row. `drawn`: how often every lookup requests each row at random, besides.
    """
    requested = -np.expm1(requesters.lookups * (np.log1p(-np.minimum(share, 1 - 1e-12)) - drawn))
    sent = 2 * requesters.per_host * (1 - 1 / requesters.hosts) * requested
    saved = np.concatenate([[0.0], np.cumsum(sent - 2 * (1 - 1 / requesters.world_size))])
    rows = int(saved.argmax())  # rows that are not sorted by popularity have no such first rows
    return Replication(rows, float(sent.sum()), float(saved[rows]))
