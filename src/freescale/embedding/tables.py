"""Embedding tables: the owner of each row, initial values, and small tables that every rank replicates."""

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from freescale.data.order import derive_key, splitmix64

_CHUNK = 1 << 20


class Table(NamedTuple):
    """An embedding table."""

    name: str
    rows: int
    dim: int

    def block(self, world_size: int) -> int:
        """Return the rows per rank; the last ranks may own fewer. Row r belongs to rank r // block."""
        return -(-self.rows // world_size)

    def owned(self, rank: int, world_size: int) -> range:
        """Return the rows of a rank."""
        block = self.block(world_size)
        return range(min(rank * block, self.rows), min((rank + 1) * block, self.rows))

    def cuts(self, unique: Tensor, world_size: int) -> list[int]:
        """Return where ascending ids change their owner: the ids [cuts[r], cuts[r + 1]) belong to rank r."""
        owners = torch.arange(1, world_size, device=unique.device) * self.block(world_size)
        return [0, *torch.searchsorted(unique, owners).tolist(), len(unique)]

    def fill(self, local: Tensor, first: int, *, seed: int, deviation: float) -> None:
        """Initialize rows [first, first + len(local)) with a hash of (seed, table, row), whichever rank owns them."""
        key = derive_key(seed, zlib.crc32(self.name.encode()))
        flat = local.view(-1)
        for begin in range(0, len(flat), _CHUNK):
            end = min(begin + _CHUNK, len(flat))
            number = np.arange(first * self.dim + begin, first * self.dim + end, dtype=np.uint64)
            unit = (splitmix64(number ^ key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            flat[begin:end] = torch.from_numpy((2.0 * unit - 1.0) * deviation * 3.0**0.5)


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
