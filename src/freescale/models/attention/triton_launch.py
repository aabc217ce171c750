"""Launches the Triton kernels of HSTU attention: kernel configurations, the tile schedule, and sums over programs.

A block of history attends to as many tiles of keys as precede it, so blocks differ in cost as much as histories do. A
block of candidates attends to the tiles up to its largest limit, and to its own. The schedule counts the tiles of all
blocks, splits long blocks, and assigns the parts to programs in snake order, largest first. The parts of a split block
are joined afterwards, in order; their number is bounded by a few per program. All shapes depend on the numbers of
tokens and samples only, so the host never waits for the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from freescale.models.attention import triton_kernels
from freescale.models.attention.reference import AttentionGradients, AttentionInputs
from freescale.models.attention.tiles import Operands, Tile, TileKey, select_tile
from freescale.models.attention.visited_tiles import BlockTiles, TokenBlocks, repeat_index, split_into_blocks
from freescale.models.jagged import PerBatchCache, time_bucket_table
from freescale.visibility import FarKeys

TIME_PADDED = 256
JOIN_WARPS = 8
_PROGRAMS_PER_SM = 2
_INTERPRETER_PROGRAMS = 8  # for Triton's interpreter on a CPU: several programs of each kind
_PARTS_PER_PROGRAM = 4  # a part is at most a fourth of the work of a program


class KernelConfig(NamedTuple):
    """The compile-time parameters of a kernel."""

    kernel: str
    heads: int
    width: int
    operands: Operands
    tile: Tile

    @staticmethod
    def for_queries(kernel: str, q: Tensor, tile: Tile | None = None) -> "KernelConfig":
        """Return the configuration for queries [tokens, heads, width]; `tile`: by default that of the device."""
        _, heads, width = q.shape
        operands = _operands(q)
        tile = tile or select_tile(TileKey(kernel, operands, padded_width(width)), q.device)
        return KernelConfig(kernel, heads, width, operands, tile)

    @property
    def launch(self) -> dict[str, int]:
        """The warps and stages of a program."""
        return {"num_warps": self.tile.warps, "num_stages": self.tile.stages}

    @property
    def constants(self) -> dict[str, Any]:
        """The constexpr arguments. Products of fp32 are fp32 unless torch's setting allows TF32."""
        constants = self.sizes | {"TILE": self.tile.tile, "PRECISION": "tf32" if self.operands == "tf32" else "ieee"}
        return constants | ({"BUCKETS": TIME_PADDED} if self.kernel == "backward_rows" else {})

    @property
    def sizes(self) -> dict[str, int]:
        """The constexpr arguments of `join`, which adds the parts of this kernel."""
        padded = padded_width(self.width)
        return {"HEADS": self.heads, "WIDTH": self.width, "PADDED": padded, "BLOCK": self.tile.block}


def padded_width(width: int) -> int:
    """Return the width of a head rounded up to a power of 2."""
    return max(16, triton.next_power_of_2(width))


def _operands(q: Tensor) -> Operands:
    if q.element_size() == 2:
        return "16-bit"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"


def forward(x: AttentionInputs, tile: Tile | None = None) -> Tensor:
    """Return the output of HSTU attention."""
    if not len(x.q):
        return _empty_like(x.v)
    x, config = _contiguous(x), KernelConfig.for_queries("forward", x.q, tile)
    q, k, v = map(_contiguous_heads, (x.q, x.k, x.v))
    out, schedule = _empty_like(v), _schedule(x, config).rows
    with _joined_parts(x, config, schedule, [out]) as parts:
        _run(config, x, schedule, (q, k, v, out, *parts), (x.position.float(), _time_by_cell(x)))
    return out


def backward(x: AttentionInputs, d_out: Tensor) -> AttentionGradients:
    """Return the gradients of HSTU attention."""
    if not len(x.q):
        return AttentionGradients(*map(torch.zeros_like, (x.q, x.k, x.v, x.position, x.time)))
    d_q, d_position, d_time = backward_rows(x, d_out)
    return AttentionGradients(d_q, *backward_columns(x, d_out), d_position, d_time)


def backward_rows(x: AttentionInputs, d_out: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, position and time."""
    x, config = _contiguous(x), KernelConfig.for_queries("backward_rows", x.q, tile)
    operands = (*map(_contiguous_heads, (x.q, x.k, x.v)), d_out.contiguous())
    d_q, schedule, position = _empty_like(operands[0]), _schedule(x, config).rows, x.position.float()
    programs = len(schedule.items) * config.heads
    d_position = torch.zeros(programs, len(position), device=d_q.device)
    d_time = torch.empty(programs, TIME_PADDED, device=d_q.device)
    with _joined_parts(x, config, schedule, [d_q]) as parts:
        tables = (position, x.time.float(), time_bucket_table(d_q.device))
        _run(config, x, schedule, (*operands, d_q, *parts, d_position, d_time), tables, len(position))
    d_time = d_time.sum(0)[: len(x.time)]
    return d_q, d_position.sum(0).to(x.position.dtype), d_time.to(x.time.dtype)


def backward_columns(x: AttentionInputs, d_out: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v."""
    x, config = _contiguous(x), KernelConfig.for_queries("backward_columns", x.q, tile)
    operands = (*map(_contiguous_heads, (x.q, x.k, x.v)), d_out.contiguous())
    d_k, d_v, schedule = _empty_like(operands[1]), _empty_like(operands[2]), _schedule(x, config).columns
    with _joined_parts(x, config, schedule, [d_k, d_v]) as parts:
        _run(config, x, schedule, (*operands, d_k, d_v, *parts), (x.position.float(), _time_by_cell(x)))
    return d_k, d_v


def _run(
    config: KernelConfig,
    x: AttentionInputs,
    schedule: "TileSchedule",
    tensors: Sequence[Tensor],
    tables: Sequence[Tensor],
    *sizes: int,
) -> None:
    strides, items = [tensor.stride(0) for tensor in tensors[:3]], schedule.items
    far_tiles = () if config.kernel == "backward_columns" else (schedule.far_tiles,)
    begins, far = (x.limits, FarKeys(0, 1, 1)) if x.begins is None or x.far is None else (x.begins, x.far)
    getattr(triton_kernels, config.kernel)[len(items), config.heads](
        *tensors, x.spans, x.limits, begins, x.query_time, x.event_time, *tables, items, *far_tiles, *strides,
        items.shape[1], *sizes, 1.0 / x.scale, *far, RULE=x.far is not None, **config.constants, **config.launch,
    )  # fmt: skip


@contextmanager
def _joined_parts(
    x: AttentionInputs, config: KernelConfig, schedule: "TileSchedule", outputs: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    """Yield buffers for the parts of split blocks, then join them into `outputs`."""
    slots = len(schedule.joins)
    shape = (slots, config.heads, config.tile.block, padded_width(config.width))
    buffers = [torch.empty(shape, device=x.q.device) for _ in outputs]
    yield buffers
    settings: dict[str, Any] = config.sizes | {"num_warps": JOIN_WARPS}
    for buffer, out in zip(buffers, outputs, strict=True):
        triton_kernels.join[slots, config.heads](buffer, out, x.spans, schedule.joins, **settings)


def _schedule(x: AttentionInputs, config: KernelConfig) -> "AttentionSchedule":
    programs = max(1, _programs(x.q.device) // config.heads)
    return attention_schedule(x.spans, x.limits, config.tile.block, config.tile.tile, programs, x.begins, x.far)


@lru_cache
def _programs(device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETER_PROGRAMS
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def _time_by_cell(x: AttentionInputs) -> Tensor:
    return x.time.float().index_select(0, time_bucket_table(x.q.device))


def _contiguous(x: AttentionInputs) -> AttentionInputs:
    """Make the operands contiguous for which kernels take no strides."""
    names = ("limits", "query_time", "event_time", "position", "time")
    begins = None if x.begins is None else x.begins.contiguous()
    return x._replace(begins=begins, **{name: getattr(x, name).contiguous() for name in names})


def _contiguous_heads(x: Tensor) -> Tensor:
    """Make the heads of a token contiguous. Tokens may have any stride."""
    packed = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return x if packed else x.contiguous()


def _empty_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


class TileSchedule(NamedTuple):
    """The work of the programs of one kernel."""

    items: Tensor
    """[programs, turns, (sample or -1, block of the sample, first tile, last tile + 1, slot of the part or -1, near,
    jump, far, shift)], the last four as in `BlockTiles`"""
    joins: Tensor
    """[slots, (sample or -1, block of the sample, number of slots from this one on with its parts)]"""
    far_tiles: Tensor
    """The tiles of a sample that hold far keys, ascending, then the others."""


class AttentionSchedule(NamedTuple):
    """The schedules of a batch."""

    rows: TileSchedule
    """Blocks of queries, by the keys that they attend to."""
    columns: TileSchedule
    """Blocks of keys, by the queries that attend to them."""


def schedule_tiles(blocks: TokenBlocks, visited: BlockTiles, *, programs: int) -> TileSchedule:
    """Assign the tiles of all blocks to programs."""
    tiles = visited.count
    limit = (-(-tiles.sum() // (_PARTS_PER_PROGRAM * programs))).clamp(min=1)
    parts = -(-tiles // limit)
    index, part, valid = repeat_index(parts, len(tiles) + _PARTS_PER_PROGRAM * programs)
    begin, end = (edge * tiles[index] // parts[index].clamp(min=1) for edge in (part, part + 1))
    is_split = valid & (parts[index] > 1)
    slot = torch.where(is_split, is_split.cumsum(0) - 1, -1)
    sample, block = torch.where(valid, blocks.sample[index], -1), blocks.block[index]
    items = torch.stack([sample, block, begin, end, slot, *(x[index] for x in visited[1:])], dim=1)
    first, slots = is_split & (part == 0), 2 * _PARTS_PER_PROGRAM * programs
    return TileSchedule(
        _snake_order(items, (end - begin) * valid, programs),
        _joins(torch.stack([sample, block, parts[index]], dim=1), slot, first, slots),
        blocks.far_tiles,
    )


def _snake_order(items: Tensor, weight: Tensor, programs: int) -> Tensor:
    """Assign items largest first, in alternating direction of programs."""
    order = weight.argsort(descending=True, stable=True)
    turns = -(-len(order) // programs)
    padding = items.new_full((turns * programs - len(order), items.shape[1]), -1)
    by_turn = torch.cat([items[order], padding]).view(turns, programs, -1)
    by_turn[1::2] = by_turn[1::2].flip(1)
    return by_turn.transpose(0, 1).contiguous().int()


def _joins(entries: Tensor, slot: Tensor, first: Tensor, slots: int) -> Tensor:
    """Return the block of the part at each slot, if the part is the first of its block.

    Split blocks have at most twice as many parts as needed, which bounds the slots.
    """
    joins = entries.new_full((slots + 1, entries.shape[1]), -1)
    joins[torch.where(first, slot, slots)] = torch.where(first[:, None], entries, -1)
    return joins[:slots].int()


def _attention_schedule(
    spans: Tensor,
    limits: Tensor,
    block: int,
    tile: int,
    programs: int,
    begins: Tensor | None = None,
    far: FarKeys | None = None,
) -> AttentionSchedule:
    blocks = split_into_blocks(spans, limits, block=block, tile=tile, begins=begins, far=far)
    sides = blocks.rows, blocks.columns
    return AttentionSchedule(*(schedule_tiles(blocks, side, programs=programs) for side in sides))


attention_schedule = PerBatchCache(_attention_schedule)
"""The schedule of a batch, by limits, sizes of blocks and tiles, and number of programs."""
