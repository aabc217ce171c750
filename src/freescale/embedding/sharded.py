"""Sharded tables as a step uses them: the local shard and the exchange of rows.

`PlainShard` holds rows as torch tensors in any precision, with a readable optimizer. It is the reference for the FBGEMM
shard in `fused`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from freescale import deterministic
from freescale.config import RunConfig, TablesConfig
from freescale.embedding.exchange import AllToAllPlan, EmbeddingExchange
from freescale.embedding.ids import UniqueIds, deduplicate
from freescale.embedding.tables import Table
from freescale.log import warning_once
from freescale.transport.base import Transport
from freescale.transport.world import World

_BLOCK_ROWS = 1 << 16


class Shard(Protocol):
    """The local rows of all tables. Threads may use it concurrently, on different rows."""

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows by local index."""

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Sum the gradients of each row and update it once. `lr`: by table."""

    def state(self) -> dict[str, Tensor]:
        """Return weights (`item`) and optimizer state (`item.sum`) of the local rows, without a copy."""


class PlainShard:
    """Rows and their optimizer, in torch. `state` is used in place."""

    def __init__(self, state: Mapping[str, Tensor], config: TablesConfig) -> None:
        self._state, self._config = dict(state), config

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows."""
        return {name: self._state[name].index_select(0, rows) for name, rows in local.items()}

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Update each row once, from the sum of its gradients."""
        for name, gradient in gradients.items():
            weight = self._state[name]
            rows, index = deduplicate(local[name], rows=len(weight))
            total = deterministic.index_add_(weight.new_zeros(len(rows), weight.shape[1]), index, gradient)
            weight.index_add_(0, rows, total.mul_(self._rate(name, rows, total, lr[name])), alpha=-1)

    def _rate(self, name: str, rows: Tensor, total: Tensor, lr: float) -> Tensor | float:
        """Return the factor of a summed gradient, after adding its square to the optimizer state."""
        if self._config.optimizer == "sgd":
            return lr
        square = total.square()
        if self._config.optimizer == "rowwise_adagrad":
            square = square.mean(1, keepdim=True)
        sums = self._state[f"{name}.sum"].view(-1, square.shape[1])
        sums.index_add_(0, rows, square)
        return lr / sums.index_select(0, rows).sqrt_().add_(self._config.eps)

    def state(self) -> dict[str, Tensor]:
        """Return weights and sums of squares."""
        return dict(self._state)


def plain_shard(tables: Sequence[Table], config: TablesConfig, world: World, dtype: torch.dtype) -> PlainShard:
    """Allocate the local rows of tables."""
    allocate = partial(torch.zeros, dtype=dtype, device=world.device)
    owned = {table.name: len(table.owned(world.rank, world.world_size)) for table in tables}
    state = {table.name: allocate(owned[table.name], table.dim) for table in tables}
    if config.optimizer != "sgd":
        width = {table.name: table.dim if config.optimizer == "adagrad" else 1 for table in tables}
        state |= {f"{name}.sum": allocate(rows, width[name]) for name, rows in owned.items()}
    return PlainShard(state, config)


class ShardedTables:
    """The local rows, and an exchange per lane."""

    def __init__(self, tables: Sequence[Table], shard: Shard, transport: Transport) -> None:
        self.tables, self.shard = list(tables), shard
        self.exchanges = {"urgent": EmbeddingExchange(tables, transport)}
        state = shard.state()
        self._rows_like = {table.name: state[table.name][:0] for table in tables}

    def add_lane(self, name: str, transport: Transport) -> None:
        """Add an exchange beside the urgent one."""
        self.exchanges[name] = EmbeddingExchange(self.tables, transport)

    def look_up(self, plan: AllToAllPlan) -> dict[str, Tensor]:
        """Read the local rows that ranks requested."""
        return self.shard.look_up(plan.local_rows)

    def update(self, plan: AllToAllPlan, gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Update those rows."""
        self.shard.update(plan.local_rows, gradients, lr=lr)

    def allocate_rows(self, unique_ids: Mapping[str, UniqueIds]) -> dict[str, Tensor]:
        """Allocate the rows of unique ids."""
        like = self._rows_like
        return {t.name: like[t.name].new_empty(len(unique_ids[t.name].unique), t.dim) for t in self.tables}

    def read(self, unique_ids: Mapping[str, UniqueIds]) -> dict[str, Tensor]:
        """Return the rows of unique ids without an update. Collective."""
        exchange = self.exchanges["urgent"]
        plan = exchange.send_ids(unique_ids)
        return plan.in_order_of_ids(exchange.send_rows(plan, self.look_up(plan)).wait())

    def read_blocks(self, rank: int, world_size: int) -> dict[str, tuple[int, Tensor]]:
        """Return the first row and the rows of this rank's block of each table, in the order of rows. Collective."""
        blocks = [Table(table.name, table.rows, table.dim) for table in self.tables]
        owned = {block.name: block.owned(rank, world_size) for block in blocks}
        pieces: dict[str, list[Tensor]] = {name: [self._rows_like[name]] for name in owned}
        for begin in range(0, max(block.block(world_size) for block in blocks), _BLOCK_ROWS):
            unique_ids = {}
            for name, rows in owned.items():
                some = rows[begin : begin + _BLOCK_ROWS]
                ids = torch.arange(some.start, some.stop, device=self._rows_like[name].device)
                unique_ids[name] = UniqueIds(ids, ids - some.start)
            for name, values in self.read(unique_ids).items():
                pieces[name].append(values)
        return {name: (rows.start, torch.cat(pieces[name])) for name, rows in owned.items()}


def shard_tables(
    tables: Sequence[Table], config: RunConfig, world: World, transport: Transport, dtype: torch.dtype
) -> ShardedTables:
    """Build and initialize the local rows: in FBGEMM, or in plain torch where FBGEMM lacks the precision.

    Torch updates FBGEMM's rows too. On a CPU the same arithmetic takes a seventh of the time. On a GPU a backward pass
    on the deferred thread would wait in autograd's queue behind that of the step.
    """
    if dtype == torch.float32:
        from freescale.embedding.fused import fused_shard  # torchrec takes seconds to import

        fused = fused_shard(tables, config.tables, world.group, world.device)
        shard = PlainShard(fused.state(), config.tables)
    else:
        warning_once(f"tables are plain torch: FBGEMM keeps none in {str(dtype).removeprefix('torch.')}")
        shard = plain_shard(tables, config.tables, world, dtype)
    fill(tables, shard.state(), config, world)
    return ShardedTables(tables, shard, transport)


def fill(tables: Sequence[Table], own: Mapping[str, Tensor], config: RunConfig, world: World) -> None:
    """Initialize the local rows."""
    for table in tables:
        first = table.owned(world.rank, world.world_size).start
        table.fill(own[table.name], first, seed=config.seed, deviation=config.tables.init)


def describe_replicated_tables(tables: Sequence[Table], dtype: torch.dtype) -> list[str]:
    """Return the size of each replicated table, as human-readable lines."""
    sizes = [(t, _mb(t.rows * t.dim * dtype.itemsize)) for t in tables]
    return [f"table {t.name}: {t.rows:,} x {t.dim}, a copy on every rank, {size}" for t, size in sizes]


def describe_sharded_tables(tables: ShardedTables, world_size: int) -> list[str]:
    """Return the size of each sharded table on the largest rank, as human-readable lines."""
    state = tables.shard.state()
    lines = []
    for table in tables.tables:
        rows = table.block(world_size)
        per_row = {name: tensor[:1].nbytes for name, tensor in state.items() if name.split(".")[0] == table.name}
        weights, memory = per_row.pop(table.name) * rows, sum(per_row.values()) * rows
        shape = f"{table.rows:,} x {table.dim} row-wise over {world_size} ranks, up to {rows:,} rows each"
        held = f"{_mb(weights)} of weights and {_mb(memory)} of optimizer state per rank"
        lines.append(f"table {table.name}: {shape}: {held}")
    return lines


def _mb(size: float) -> str:
    return f"{size / 1e6:,.2f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"
