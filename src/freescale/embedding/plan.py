"""What lives where and what it costs, told before the first step. Pure."""

from collections.abc import Sequence

import torch

from freescale.embedding.sharded import ShardedTables
from freescale.embedding.tables import Table


def replicated(tables: Sequence[Table], dtype: torch.dtype) -> list[str]:
    """Every rank holds everything."""
    sizes = [(t, _mb(t.rows * t.dim * dtype.itemsize)) for t in tables]
    return [f"table {t.name}: {t.rows:,} x {t.dim}, a copy on every rank, {size}" for t, size in sizes]


def sharded(tables: ShardedTables, world_size: int) -> list[str]:
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
