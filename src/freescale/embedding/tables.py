"""Embedding tables: which rank owns each row, initial values, and small tables that every rank replicates."""

import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from freescale.data.device_copy import numbers_to_device, to_device
from freescale.data.order import derive_key, splitmix64
from freescale.data.vocabulary import FIRST_SLOT
from freescale.embedding.row_order import Owners, RowOrder, bit_reversal
from freescale.embedding.zero_collision_layout import BucketLayout

_CHUNK = 1 << 20


class Table(NamedTuple):
    """An embedding table."""

    name: str
    rows: int
    dim: int
    owners: Owners = "block"
    layout: BucketLayout | None = None
    """Of dynamic ids: the buckets that their rows are in. Ranks own whole buckets."""
    sampled: bool = False
    """Whether slots of dynamic ids are requested by number, too: the negatives of retrieval."""

    @property
    def order(self) -> RowOrder:
        """The positions of its rows."""
        return RowOrder.of(self.rows, "block" if self.layout else self.owners)

    def block(self, world_size: int) -> int:
        """Return the most positions of a rank. Without a layout, position p belongs to rank p // block."""
        if self.layout is not None:
            return -(-self.layout.buckets // world_size) * self.layout.stride
        return -(-self.order.positions // world_size)

    def allocated(self, world_size: int) -> int:
        """Return the rows to allocate over all ranks, the same number on each, except for fewer on the last ones."""
        return self.order.positions if self.layout is None else world_size * self.block(world_size)

    def owned(self, rank: int, world_size: int) -> range:
        """Return the positions of a rank."""
        if self.layout is not None:
            buckets, stride = self.layout.owned(rank, world_size), self.layout.stride
            return range(buckets.start * stride, buckets.stop * stride)
        block, positions = self.block(world_size), self.order.positions
        return range(min(rank * block, positions), min((rank + 1) * block, positions))

    def first_positions(self, world_size: int) -> list[int]:
        """Return the first position of each rank, and the number of all positions."""
        return [self.owned(rank, world_size).start for rank in range(world_size)] + [self.order.positions]

    def bucket_row(self, requests: Tensor) -> Tensor:
        """Return the first row of the bucket of each requested dynamic id or slot."""
        assert self.layout is not None
        bucket = self.layout.bucket_of(requests)
        if self.sampled:
            bucket = torch.where(requests <= FIRST_SLOT, (FIRST_SLOT - requests) % self.layout.buckets, bucket)
        return bucket * self.layout.stride

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


class SortedRequests(NamedTuple):
    """The rows that a rank requests, by table, then by owner."""

    keys: Tensor
    """Ascending."""
    sent: Tensor
    """What the owner receives: the key, or a dynamic id."""
    places: Tensor
    """The place of each among the ids of all tables of its run: see `first_places`."""


class RowKeys:
    """Numbers the rows of several tables: by table, then by position. The rows of an owner in a table are a range."""

    def __init__(self, tables: Sequence[Table], world_size: int) -> None:
        orders = [table.order for table in tables]
        firsts = [0, *accumulate(order.positions for order in orders)][:-1]
        self._owned = [
            [first + p for p in t.first_positions(world_size)] for t, first in zip(tables, firsts, strict=True)
        ]
        self._tables = list(tables)
        self._has_dynamic = any(table.layout is not None for table in tables)
        self.is_ascending = all(order.shards == 1 for order in orders) and not self._has_dynamic
        """Whether keys ascend with the ids of a table."""
        reversals = [torch.from_numpy(bit_reversal(order.shards)) for order in orders]
        begins = [0, *accumulate(map(len, reversals))][:-1]
        self._parameters = [
            (order.shards - 1, begin, order.positions // order.shards, order.shards.bit_length() - 1, first)
            for order, begin, first in zip(orders, begins, firsts, strict=True)
        ]
        parameters, owned = torch.tensor(self._parameters).T.contiguous(), torch.tensor(self._owned).flatten()
        self._constants = parameters, torch.cat(reversals), owned

    def sort(self, ids: Sequence[Tensor]) -> "SortedRequests":
        """Return requests of the ascending ids of each table, by owner. Dynamic ids are in the order of their buckets.

        The tables stay in order.
        """
        device, sizes = ids[0].device, [len(of_table) for of_table in ids]
        if self._constants[0].device != device:
            self._constants = to_device(self._constants, device)
        parameters, reversal, _ = self._constants
        rows = raw = join(ids)
        if self._has_dynamic:
            pairs = zip(ids, self._tables, strict=True)
            rows = join([x if table.layout is None else table.bucket_row(x) for x, table in pairs])
        if len(ids) == 1:
            begin: Tensor | int = 0
            mask, begin_of_reversal, per_shard, shift, first = self._parameters[0]
        else:
            begins_of_runs = [
                begin - place for begin, place in zip([0, *accumulate(sizes)], self.first_places(sizes), strict=False)
            ]
            numbers, counts, begins = numbers_to_device([range(len(ids)), sizes, begins_of_runs], device)
            table = numbers.repeat_interleave(counts, output_size=sum(sizes))
            mask, begin_of_reversal, per_shard, shift, first = parameters.index_select(1, table).unbind()
            begin = begins.index_select(0, table)
        if self.is_ascending:
            return SortedRequests(rows + first, rows + first, torch.arange(len(rows), device=device) - begin)
        shard = reversal[((rows ^ (rows >> 1)) & mask) + begin_of_reversal]
        keys, order = (shard * per_shard + (rows >> shift) + first).sort(stable=self._has_dynamic)
        sent = keys
        if self._has_dynamic:
            dynamic = [
                keys.new_full((size,), table.layout is not None, dtype=torch.bool)
                for size, table in zip(sizes, self._tables, strict=True)
            ]
            sent = torch.where(join(dynamic), raw[order], keys)
        return SortedRequests(keys, sent, order - begin)

    def first_places(self, sizes: Sequence[int]) -> list[int]:
        """Return the place of the first id of each table among those of its run: the tables of its width around it.

        `sizes`: ids of each table.
        """
        pairs, places = zip(self._tables, sizes, strict=True), list[int]()
        for _, run in groupby(pairs, lambda pair: pair[0].dim):
            places += [0, *accumulate(size for _, size in run)][:-1]
        return places

    def count(self, keys: Tensor) -> Tensor:
        """Return how many ascending keys each rank owns: [tables, ranks]."""
        return torch.searchsorted(keys, self._constants[2]).view(len(self._owned), -1).diff()

    def first_keys(self, rank: int = 0) -> list[int]:
        """Return the key of the first row of a rank in each table."""
        return [of_table[rank] for of_table in self._owned]


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors. They are not copied if each follows the previous one in memory."""
    joint = as_one(parts)
    return torch.cat([*parts]) if joint is None else joint


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that follow each other in memory as one, which shares it; None if they do not."""
    first = parts[0]
    if len(parts) == 1:
        return first
    filled = [part for part in parts if part.numel()] or [first]
    if not all(follows(before, after) for before, after in pairwise(filled)) or not filled[0].is_contiguous():
        return None
    size = sum(len(part) for part in parts), *first.shape[1:]
    return filled[0].detach().as_strided(size, filled[0].stride(), filled[0].storage_offset())


def follows(before: Tensor, after: Tensor) -> bool:
    """Return whether contiguous rows of one width follow others in memory."""
    one_storage = before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    alike = before.dtype == after.dtype and before.shape[1:] == after.shape[1:] and after.is_contiguous()
    return one_storage and alike and int(before.storage_offset()) + before.numel() == after.storage_offset()


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
