"""Embedding tables: which rank owns each row, initial values, and small tables that every rank replicates."""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from freescale.data.order import derive_key, splitmix64
from freescale.embedding.row_order import Owners, RowOrder, bit_reversal

_CHUNK = 1 << 20


class Table(NamedTuple):
    """An embedding table."""

    name: str
    rows: int
    dim: int
    owners: Owners = "block"

    @property
    def order(self) -> RowOrder:
        """The positions of its rows."""
        return RowOrder.of(self.rows, self.owners)

    def block(self, world_size: int) -> int:
        """Return the positions per rank; the last ranks may own fewer. Position p belongs to rank p // block."""
        return -(-self.order.positions // world_size)

    def owned(self, rank: int, world_size: int) -> range:
        """Return the positions of a rank."""
        block, positions = self.block(world_size), self.order.positions
        return range(min(rank * block, positions), min((rank + 1) * block, positions))

    def cuts(self, unique: Tensor, world_size: int) -> list[int]:
        """Return where ascending positions change their owner: [cuts[r], cuts[r + 1]) belong to rank r."""
        owners = torch.arange(1, world_size, device=unique.device) * self.block(world_size)
        return [0, *torch.searchsorted(unique, owners).tolist(), len(unique)]

    def fill(self, local: Tensor, first: int, *, seed: int, deviation: float) -> None:
        """Initialize rows at positions [first, first + len(local)) with a hash of (seed, table, row)."""
        key, column = derive_key(seed, zlib.crc32(self.name.encode())), np.arange(self.dim)
        step = max(1, _CHUNK // self.dim)
        for begin in range(0, len(local), step):
            chunk = local[begin : begin + step]
            rows = self.order.rows_at(np.arange(first + begin, first + begin + len(chunk)))
            number = (rows[:, None] * self.dim + column).astype(np.uint64)
            unit = (splitmix64(number ^ key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            chunk.copy_(torch.from_numpy((2.0 * unit - 1.0) * deviation * 3.0**0.5))


class RowPositions:
    """Computes the positions of rows of one table, on the device of the rows."""

    def __init__(self, order: RowOrder) -> None:
        self.order = order
        self._reversal = torch.from_numpy(bit_reversal(order.shards))

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the positions of rows."""
        if self._reversal.device != rows.device:
            self._reversal = self._reversal.to(rows.device)
        return self.order.position(rows, self._reversal)


def by_dim(tables: Sequence[Table]) -> list[list[Table]]:
    """Group tables by width: those of one width share transfers and a collection."""
    return [[t for t in tables if t.dim == dim] for dim in sorted({t.dim for t in tables})]


class ReplicatedTables(nn.Module):
    """Whole tables as parameters of every rank, trained with the dense model."""

    def __init__(self, tables: Sequence[Table], *, seed: int, deviation: float) -> None:
        super().__init__()
        self.weights = nn.ParameterDict()
        for table in tables:
            weight = torch.empty(table.rows, table.dim)
            table.fill(weight, 0, seed=seed, deviation=deviation)
            self.weights[table.name] = nn.Parameter(weight)

    def forward(self, unique: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of unique ids."""
        return {name: self.weights[name][ids] for name, ids in unique.items()}
