"""Sharded tables as a step uses them: the local shard and the exchange of rows.

`PlainShard` holds rows as torch tensors in any precision, with a readable optimizer. It is the reference for the FBGEMM
shard in `fused`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale import deterministic
from freescale.config import RunConfig, TablesConfig
from freescale.data.device_copy import numbers_to_device
from freescale.embedding.dynamic_tables import DynamicTables
from freescale.embedding.exchange import AllToAllPlan, EmbeddingExchange
from freescale.embedding.ids import UniqueIds, deduplicate
from freescale.embedding.tables import Table, by_dim, follows, join
from freescale.embedding.two_level_exchange import TwoLevelExchange
from freescale.kernel_selection import uses_kernels
from freescale.log import warning_once
from freescale.transport.base import Transport
from freescale.transport.host_layout import HostLayout
from freescale.transport.two_level import TwoLevelTransport
from freescale.transport.world import World

if TYPE_CHECKING:
    from freescale.embedding.replicated_rows import ReplicatedRows

_BLOCK_ROWS = 1 << 16
_SUM = ".sum"
"""Ends the name of the optimizer state of a table."""


class Shard(Protocol):
    """The local rows of all tables. Threads may use it concurrently, on different rows."""

    @property
    def first_rows(self) -> Mapping[str, int]:
        """The number of the first local row of each table; 0 by default."""

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows by number."""

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Sum the gradients of each row and update it once. `lr`: by table."""

    def state(self) -> dict[str, Tensor]:
        """Return weights (`item`) and optimizer state (`item.sum`) of the local rows, without a copy."""


class PlainShard:
    """Rows and their optimizer, in torch. `state` is used in place."""

    def __init__(self, state: Mapping[str, Tensor], config: TablesConfig) -> None:
        self._state, self._config = dict(state), config
        on_cpu = all(values.device.type == "cpu" for values in state.values())
        self._joint = [] if on_cpu else JointRows.of(state)
        """On a device: tables that are neighbours in memory, whose rows one kernel reads or writes."""

    @property
    def first_rows(self) -> Mapping[str, int]:
        """The number of the first local row of each table."""
        return {name: first for joint in self._joint for name, first in joint.first.items()}

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows."""
        if not self._joint:
            return {name: self._state[name].index_select(0, rows) for name, rows in local.items()}
        read: dict[str, Tensor] = {}
        for joint in self._joint:
            parts = [local[name] for name in joint.first]
            rows = joint.weights.index_select(0, join(parts))
            read |= zip(joint.first, rows.split([len(part) for part in parts]), strict=True)
        return {name: read[name] for name in local}

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Update each row once, from the sum of its gradients. The host does not wait for a device."""
        for joint in self._joint:
            rows, values = (join([of[name] for name in joint.first]) for of in (local, gradients))
            self._update_on_device(joint, rows, values, lr[next(iter(joint.first))])
        for name, gradient in gradients.items() if not self._joint else ():
            weight = self._state[name]
            rows, index = deduplicate(local[name], rows=len(weight))
            total = deterministic.index_add_(weight.new_zeros(len(rows), weight.shape[1]), index, gradient)
            weight.index_add_(0, rows, total.mul_(self._rate(name, rows, total, lr[name])), alpha=-1)

    def _rate(self, name: str, rows: Tensor, total: Tensor, lr: float) -> Tensor | float:
        """Return the factor of a summed gradient, after adding its square to the optimizer state."""
        if self._config.optimizer == "sgd":
            return lr
        square = self._square(total)
        sums = self._state[f"{name}.sum"].view(-1, square.shape[1])
        sums.index_add_(0, rows, square)
        return lr / sums.index_select(0, rows).sqrt_().add_(self._config.eps)

    def _update_on_device(self, joint: "JointRows", rows: Tensor, gradient: Tensor, lr: float) -> None:
        """Update rows without knowing how many are distinct, by a kernel if there is Triton.

        Torch operators let all entries of a row write the same values. Their arithmetic and its order are the CPU's.
        """
        if uses_kernels(rows, "row update"):
            from freescale.embedding.row_update import update_rows

            options = {"eps": self._config.eps, "optimizer": self._config.optimizer}
            update_rows(joint.weights, joint.sums, rows, gradient, lr=lr, **options)  # type: ignore[arg-type]
            return
        rows, total = deterministic.sum_by_key(rows, gradient)
        rate: Tensor | float = lr
        if joint.sums is not None:
            sums = self._square(total).add_(joint.sums.index_select(0, rows))
            joint.sums[rows] = sums
            rate = lr / sums.sqrt_().add_(self._config.eps)
        joint.weights[rows] = joint.weights.index_select(0, rows).sub_(total.mul_(rate))

    def _square(self, total: Tensor) -> Tensor:
        square = total.square()
        if self._config.optimizer == "rowwise_adagrad":
            square = square.mean(1, keepdim=True)
        return square

    def state(self) -> dict[str, Tensor]:
        """Return weights and sums of squares."""
        return dict(self._state)


class JointRows(NamedTuple):
    """The rows of tables that follow each other in memory, as those of one table. They have one learning rate."""

    first: dict[str, int]
    """The number of the first row of each table."""
    weights: Tensor
    sums: Tensor | None

    @staticmethod
    def of(state: Mapping[str, Tensor]) -> "list[JointRows]":
        """Join the tables of a shard as far as they are neighbours in memory."""
        groups: list[list[str]] = []
        for name in [name for name in state if not name.endswith(_SUM)]:
            last = groups[-1][-1] if groups else name
            is_next = all(follows(state[last + end], state[name + end]) for end in ("", _SUM) if name + end in state)
            if groups and is_next:
                groups[-1].append(name)
            else:
                groups.append([name])
        return [_joint_rows([(name, state[name], state.get(name + _SUM)) for name in group]) for group in groups]


def _joint_rows(tables: Sequence[tuple[str, Tensor, Tensor | None]]) -> JointRows:
    first = dict(zip([name for name, *_ in tables], [0, *accumulate(len(w) for _, w, _ in tables)], strict=False))
    count, weights, sums = sum(len(w) for _, w, _ in tables), tables[0][1], tables[0][2]
    joint = weights.as_strided((count, weights.shape[1]), (weights.shape[1], 1), weights.storage_offset())
    if sums is None:
        return JointRows(first, joint, None)
    width = sums.shape[1] if sums.dim() > 1 else 1
    return JointRows(first, joint, sums.as_strided((count, width), (width, 1), sums.storage_offset()))


def plain_shard(tables: Sequence[Table], config: TablesConfig, world: World, dtype: torch.dtype) -> PlainShard:
    """Allocate the local rows of tables, those of one width together."""
    allocate = partial(torch.zeros, dtype=dtype, device=world.device)
    state: dict[str, Tensor] = {}
    for group in by_dim(tables):
        names, owned = [t.name for t in group], [len(t.owned(world.rank, world.world_size)) for t in group]
        state |= zip(names, allocate(sum(owned), group[0].dim).split(owned), strict=True)
        if config.optimizer != "sgd":
            sums = allocate(sum(owned), group[0].dim if config.optimizer == "adagrad" else 1).split(owned)
            state |= zip([name + _SUM for name in names], sums, strict=True)
    return PlainShard(state, config)


class ShardedTables:
    """The local rows, and an exchange per lane."""

    def __init__(
        self,
        tables: Sequence[Table],
        shard: Shard,
        transport: Transport,
        dynamic: DynamicTables | None = None,
        *,
        layout: HostLayout | None = None,
    ) -> None:
        """`layout`: gradients are added per host first. Without it they are added rank by rank."""
        self.tables, self.shard, self.dynamic, self.layout = list(tables), shard, dynamic, layout
        self.replicated: ReplicatedRows | None = None
        """The rows that every rank has, too, while it trains."""
        self.exchanges: dict[str, EmbeddingExchange | TwoLevelExchange] = {}
        self.add_lane("urgent", transport)
        state = shard.state()
        self._rows_like = {table.name: state[table.name][:0] for table in tables}

    def add_lane(self, name: str, transport: Transport) -> None:
        """Add the exchange of a lane, or replace it."""
        kind = TwoLevelExchange if isinstance(transport, TwoLevelTransport) else EmbeddingExchange
        self.exchanges[name] = kind(self.tables, transport, first_rows=self.shard.first_rows)  # type: ignore[arg-type]

    def look_up(self, plan: AllToAllPlan) -> dict[str, Tensor]:
        """Read the local rows that ranks requested."""
        return self.shard.look_up(plan.local_rows)

    def update(self, plan: AllToAllPlan, gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """Update those rows. Gradients of an id are added in the order of ranks per host, then in that of hosts."""
        rows = plan.local_rows
        if self.layout is not None and self.layout.sums and plan.of_host is None:
            for place, (name, ids) in enumerate(plan.local_ids.items()):
                served = [of_rank[place] for of_rank in plan.served]
                rows[name], gradients[name] = sum_by_host(rows[name], ids, gradients[name], served, self.layout)
        self.shard.update(rows, gradients, lr=lr)

    def allocate_rows(self, unique_ids: Mapping[str, UniqueIds]) -> dict[str, Tensor]:
        """Allocate the rows of unique ids. Those of one width are one allocation."""
        rows: dict[str, Tensor] = {}
        for group in by_dim(self.tables):
            sizes = [len(unique_ids[table.name].unique) for table in group]
            whole = self._rows_like[group[0].name].new_empty(sum(sizes), group[0].dim)
            rows |= {t.name: whole[end - n : end] for t, n, end in zip(group, sizes, accumulate(sizes), strict=True)}
        return {table.name: rows[table.name] for table in self.tables}

    def read(self, unique_ids: Mapping[str, UniqueIds]) -> dict[str, Tensor]:
        """Return the rows of unique ids without an update. Collective."""
        exchange = self.exchanges["urgent"]
        plan = exchange.send_ids(unique_ids)
        plan = plan if self.dynamic is None else self.dynamic.look_up(plan)
        return plan.in_order_of_ids(exchange.send_rows(plan, self.look_up(plan)).wait())

    def identify(self, name: str, requests: Tensor) -> Tensor:
        """Return the number of the slot of each dynamic id, and the id in each slot that is requested by number.

        EMPTY for ids without a slot and slots without an id. Collective.
        """
        assert self.dynamic is not None
        unique_ids = {t.name: UniqueIds(requests[:0], requests[:0]) for t in self.tables}
        unique_ids[name] = deduplicate(requests, rows=None)
        plan = self.exchanges["urgent"].send_ids(unique_ids)
        numbers = self.exchanges["urgent"].send_numbers(plan, name, self.dynamic.identify(plan, name))
        return numbers[unique_ids[name].inverse]

    def read_blocks(self, rank: int, world_size: int) -> dict[str, tuple[int, Tensor]]:
        """Return the first row and the rows of this rank's block of each table, in the order of rows. Collective.

        A dynamic table is in the order of its slots, with the id of each.
        """
        blocks = [Table(table.name, 0 if table.layout else table.rows, table.dim) for table in self.tables]
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
        found = {name: (rows.start, torch.cat(pieces[name])) for name, rows in owned.items()}
        return found if self.dynamic is None else found | self._local_slots(rank, world_size, self.dynamic)

    def _local_slots(self, rank: int, world_size: int, dynamic: DynamicTables) -> dict[str, tuple[int, Tensor]]:
        state, slots = self.shard.state(), dynamic.state()
        found: dict[str, tuple[int, Tensor]] = {}
        for table in self.tables:
            if table.layout is not None:
                first = table.owned(rank, world_size).start
                found |= {
                    table.name: (first, state[table.name]),
                    f"{table.name}.ids": (first, slots[f"{table.name}.ids"].local),
                }
        return found


def sum_by_host(
    rows: Tensor, ids: Tensor, gradients: Tensor, served: Sequence[int], layout: HostLayout
) -> tuple[Tensor, Tensor]:
    """Return the row of each id that a host requests, host by host, and the sum of its gradients over the host's ranks.

    `rows`, `ids`, `gradients`: by rank. `served`: their number by rank. On a device a row may have further entries of
    zeros, so that the host does not wait for the number of rows.
    """
    if not len(rows):
        return rows, gradients
    host, count = numbers_to_device([layout.host_of, served], rows.device)
    number = rows if ids.data_ptr() == rows.data_ptr() else deduplicate(ids, rows=None).inverse
    keys = host.repeat_interleave(count, output_size=len(rows)) * (number.max() + 1) + number
    if rows.device.type == "cpu":
        unique, index = deduplicate(keys, rows=None)
        total = deterministic.index_add_(gradients.new_zeros(len(unique), gradients.shape[1]), index, gradients)
        return torch.empty_like(unique).index_copy_(0, index, rows), total
    order = keys.argsort(stable=True)
    keys, total = deterministic.sum_by_key(keys, gradients)
    is_first = F.pad(keys[1:] != keys[:-1], (1, 0), value=True)
    return rows[order], total * is_first[:, None]


def shard_tables(
    tables: Sequence[Table],
    config: RunConfig,
    world: World,
    transport: Transport,
    dtype: torch.dtype,
    *,
    layout: HostLayout | None = None,
) -> ShardedTables:
    """Build and initialize the local rows: in FBGEMM, or in plain torch where FBGEMM lacks the precision.

    Torch updates FBGEMM's rows too. On a CPU the same arithmetic takes a seventh of the time. On a GPU a backward pass
    on the deferred thread would wait in autograd's queue behind that of the step.
    """
    if dtype == torch.float32:
        from freescale.embedding.fused import fused_shard  # torchrec takes seconds to import

        fused = fused_shard(tables, config.tables, world.group, world.device)
        # TorchRec allocates the same number of rows on every rank. Buckets may be fewer.
        owned = {table.name: len(table.owned(world.rank, world.world_size)) for table in tables}
        state = {name: values[: owned[name.split(".")[0]]] for name, values in fused.state().items()}
        shard = PlainShard(state, config.tables)
    else:
        warning_once(f"tables are plain torch: FBGEMM keeps none in {str(dtype).removeprefix('torch.')}")
        shard = plain_shard(tables, config.tables, world, dtype)
    fill(tables, shard.state(), config, world)
    if not any(table.layout for table in tables):
        return ShardedTables(tables, shard, transport, layout=layout)
    place: Any = {"rank": world.rank, "world_size": world.world_size, "first_rows": shard.first_rows}
    return ShardedTables(tables, shard, transport, DynamicTables(tables, shard.state(), config, **place), layout=layout)


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
