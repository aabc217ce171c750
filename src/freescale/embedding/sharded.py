"""What the owner of rows does with them, whatever keeps them: look up, and update from gradients."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from freescale.config import RunConfig, TablesConfig
from freescale.embedding.exchange import AllToAllPlan, EmbeddingExchange
from freescale.embedding.ids import UniqueIds, deduplicate
from freescale.embedding.tables import Table
from freescale.log import warning_once
from freescale.transport.base import Transport
from freescale.transport.world import World


class Shard(Protocol):
    """The rows of all tables that this rank owns. Several threads may use it, on different rows."""

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows, one per local number."""

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Add up the gradients of each row, then let the optimizer change it once. `lr`: by table."""

    def state(self) -> dict[str, Tensor]:
        """Weights (`item`) and optimizer state (`item.sum`), as they live: the own rows of each, first dimension."""


class PlainShard:
    """Rows and their optimizer, in torch. `state`: as it lives; whoever made it may keep it elsewhere too."""

    def __init__(self, state: Mapping[str, Tensor], config: TablesConfig) -> None:
        self._state, self._config = dict(state), config

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows."""
        return {name: self._state[name].index_select(0, rows) for name, rows in local.items()}

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """One change per row, from the sum of its gradients."""
        for name, gradient in gradients.items():
            weight = self._state[name]
            rows, index = deduplicate(local[name], rows=len(weight))
            total = weight.new_zeros(len(rows), weight.shape[1]).index_add_(0, index, gradient)
            weight.index_add_(0, rows, total.mul_(self._rate(name, rows, total, lr[name])), alpha=-1)

    def _rate(self, name: str, rows: Tensor, total: Tensor, lr: float) -> Tensor | float:
        """By what each number of a change is multiplied, after its square was counted."""
        if self._config.optimizer == "sgd":
            return lr
        square = total.square()
        if self._config.optimizer == "rowwise_adagrad":
            square = square.mean(1, keepdim=True)
        sums = self._state[f"{name}.sum"].view(-1, square.shape[1])
        sums.index_add_(0, rows, square)
        return lr / sums.index_select(0, rows).sqrt_().add_(self._config.eps)

    def state(self) -> dict[str, Tensor]:
        """Weights and sums of squares."""
        return dict(self._state)


def plain_shard(
    tables: Sequence[Table], config: TablesConfig, *, rank: int, world_size: int, dtype: torch.dtype
) -> PlainShard:
    """Allocate the own rows of tables."""
    owned = {table.name: len(table.owned(rank, world_size)) for table in tables}
    state = {table.name: torch.zeros(owned[table.name], table.dim, dtype=dtype) for table in tables}
    if config.optimizer != "sgd":
        width = {table.name: table.dim if config.optimizer == "adagrad" else 1 for table in tables}
        state |= {f"{name}.sum": torch.zeros(rows, width[name], dtype=dtype) for name, rows in owned.items()}
    return PlainShard(state, config)


class ShardedTables:
    """The own rows, and what moves rows: an exchange per lane."""

    def __init__(self, tables: Sequence[Table], shard: Shard, transport: Transport) -> None:
        self.tables, self.shard = list(tables), shard
        self.exchanges = {"urgent": EmbeddingExchange(tables, transport)}
        state = shard.state()
        self._rows_like = {table.name: state[table.name][:0] for table in tables}

    def add_lane(self, name: str, transport: Transport) -> None:
        """Let rows travel apart from what is urgent."""
        self.exchanges[name] = EmbeddingExchange(self.tables, transport)

    def look_up(self, plan: AllToAllPlan) -> dict[str, Tensor]:
        """Read the rows that all ranks asked this one for."""
        return self.shard.look_up(plan.local_rows)

    def update(self, plan: AllToAllPlan, gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Change those rows."""
        self.shard.update(plan.local_rows, gradients, lr=lr)

    def allocate_rows(self, unique_ids: Mapping[str, UniqueIds]) -> dict[str, Tensor]:
        """Where rows of distinct ids will lie."""
        like = self._rows_like
        return {t.name: like[t.name].new_empty(len(unique_ids[t.name].unique), t.dim) for t in self.tables}

    def read(self, unique_ids: Mapping[str, UniqueIds]) -> dict[str, Tensor]:
        """Rows of distinct ids, when nothing will be updated. Every rank must take part."""
        exchange = self.exchanges["urgent"]
        plan = exchange.send_ids(unique_ids)
        return exchange.send_rows(plan, self.look_up(plan)).wait()


def shard_tables(
    tables: Sequence[Table], config: RunConfig, world: World, transport: Transport, dtype: torch.dtype
) -> ShardedTables:
    """Build the own rows and fill them: in FBGEMM, or as plain torch where FBGEMM has no such precision.

    On a CPU, FBGEMM's rows are changed by torch too: the same arithmetic, in a seventh of the time.
    """
    if dtype == torch.float32:
        from freescale.embedding.fused import fused_shard  # torchrec takes seconds to import

        shard: Shard = fused_shard(tables, config.tables, world.group, world.device)
        if world.device.type == "cpu":
            shard = PlainShard(shard.state(), config.tables)
    else:
        warning_once(f"tables are plain torch: FBGEMM keeps none in {str(dtype).removeprefix('torch.')}")
        shard = plain_shard(tables, config.tables, rank=world.rank, world_size=world.world_size, dtype=dtype)
    fill(tables, shard.state(), config, world)
    return ShardedTables(tables, shard, transport)


def fill(tables: Sequence[Table], own: Mapping[str, Tensor], config: RunConfig, world: World) -> None:
    """Give this rank's rows what they begin as."""
    for table in tables:
        first = table.owned(world.rank, world.world_size).start
        table.fill(own[table.name], first, seed=config.seed, deviation=config.tables.init)


def describe_replicated_tables(tables: Sequence[Table], dtype: torch.dtype) -> list[str]:
    """Every rank holds everything."""
    sizes = [(t, _mb(t.rows * t.dim * dtype.itemsize)) for t in tables]
    return [f"table {t.name}: {t.rows:,} x {t.dim}, a copy on every rank, {size}" for t, size in sizes]


def describe_sharded_tables(tables: ShardedTables, world_size: int) -> list[str]:
    """Rows dealt over the ranks; memory is that of the rank with the most rows."""
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
