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
import torch.nn.functional as F  # noqa: N812  the usual name
import triton
from torch import Tensor

from freescale.models.attention import triton_kernels
from freescale.models.attention.reference import AttentionGradients, AttentionInputs
from freescale.models.jagged import PerBatchCache, time_bucket_table

TIME_PADDED = 256
_WIDTHS = (16, 32, 64, 128, 256)
_LAUNCH = {
    **{("forward", False, padded): (4, 1) for padded in _WIDTHS},
    **{("backward_columns", True, padded): (4, 1) for padded in _WIDTHS},
    ("backward_columns", False, 16): (8, 1),
    ("backward_columns", False, 32): (8, 1),
}
"""Warps and stages by kernel, whether the dtype has 16 bits, and padded width; (8, 2) for all others."""
_PROGRAMS_PER_SM = 2
_INTERPRETER_PROGRAMS = 8  # for Triton's interpreter on a CPU: several programs of each kind
_PARTS_PER_PROGRAM = 4  # a part is at most a fourth of the work of a program


class KernelConfig(NamedTuple):
    """The compile-time parameters of a kernel."""

    heads: int
    width: int
    half: bool
    """Whether the dtype has 16 bits; tensor cores then compute the products."""

    @staticmethod
    def from_queries(q: Tensor) -> "KernelConfig":
        """Return the configuration for queries [tokens, heads, width]."""
        _, heads, width = q.shape
        return KernelConfig(heads, width, q.element_size() == 2)

    @property
    def padded(self) -> int:
        """The width rounded up to a power of 2."""
        return max(16, triton.next_power_of_2(self.width))

    @property
    def block(self) -> int:
        """Queries and keys of a tile: fewer for wide rows, so that they fit into registers."""
        return 32 if self.padded <= (128 if self.half else 64) else 16

    def launch(self, kernel: str) -> dict[str, int]:
        """Return the warps and stages of a program that compile without spills (see benchmarks/kernels.py)."""
        warps, stages = _LAUNCH.get((kernel, self.half, self.padded), (8, 2))
        return {"num_warps": warps, "num_stages": stages}

    def constants(self, kernel: str) -> dict[str, Any]:
        """Return the constexpr arguments of a kernel. Products of fp32 are fp32, not TF32."""
        constants = {"HEADS": self.heads, "WIDTH": self.width, "PADDED": self.padded, "BLOCK": self.block}
        constants |= {} if kernel == "join" else {"PRECISION": "ieee"}
        return constants | ({"BUCKETS": TIME_PADDED} if kernel == "backward_rows" else {})


def forward(x: AttentionInputs) -> Tensor:
    """Return the output of HSTU attention."""
    if not len(x.q):
        return _empty_like(x.v)
    x = _contiguous(x)
    q, k, v = map(_contiguous_heads, (x.q, x.k, x.v))
    out, schedule = _empty_like(v), _schedule(x).rows
    with _joined_parts(x, schedule, [out]) as parts:
        _run("forward", x, schedule.items, (q, k, v, out, *parts), (x.position.float(), _time_by_cell(x)))
    return out


def backward(x: AttentionInputs, d_out: Tensor) -> AttentionGradients:
    """Return the gradients of HSTU attention."""
    if not len(x.q):
        return AttentionGradients(*map(torch.zeros_like, (x.q, x.k, x.v, x.position, x.time)))
    x = _contiguous(x)
    operands = (*map(_contiguous_heads, (x.q, x.k, x.v)), d_out.contiguous())
    d_q, d_k, d_v = map(_empty_like, operands[:3])
    (rows, columns), position = _schedule(x), x.position.float()
    programs = len(rows.items) * x.q.shape[1]
    d_position = torch.zeros(programs, len(position), device=d_q.device)
    d_time = torch.empty(programs, TIME_PADDED, device=d_q.device)
    with _joined_parts(x, rows, [d_q]) as parts:
        tables = (position, x.time.float(), time_bucket_table(d_q.device))
        _run("backward_rows", x, rows.items, (*operands, d_q, *parts, d_position, d_time), tables, len(position))
    with _joined_parts(x, columns, [d_k, d_v]) as parts:
        _run("backward_columns", x, columns.items, (*operands, d_k, d_v, *parts), (position, _time_by_cell(x)))
    d_time = d_time.sum(0)[: len(x.time)]
    return AttentionGradients(d_q, d_k, d_v, d_position.sum(0).to(x.position.dtype), d_time.to(x.time.dtype))


def _run(
    name: str, x: AttentionInputs, items: Tensor, tensors: Sequence[Tensor], tables: Sequence[Tensor], *sizes: int
) -> None:
    config, strides = KernelConfig.from_queries(x.q), [tensor.stride(0) for tensor in tensors[:3]]
    getattr(triton_kernels, name)[len(items), config.heads](
        *tensors, x.spans, x.limits, x.query_time, x.event_time, *tables, items, *strides, items.shape[1], *sizes,
        1.0 / x.scale, **config.constants(name), **config.launch(name),
    )  # fmt: skip


@contextmanager
def _joined_parts(x: AttentionInputs, schedule: "TileSchedule", outputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buffers for the parts of split blocks, then join them into `outputs`."""
    config, slots = KernelConfig.from_queries(x.q), len(schedule.joins)
    shape = (slots, config.heads, config.block, config.padded)
    buffers = [torch.empty(shape, device=x.q.device) for _ in outputs]
    yield buffers
    settings: dict[str, Any] = config.constants("join") | config.launch("join")
    for buffer, out in zip(buffers, outputs, strict=True):
        triton_kernels.join[slots, config.heads](buffer, out, x.spans, schedule.joins, **settings)


def _schedule(x: AttentionInputs) -> "AttentionSchedule":
    programs = max(1, _programs(x.q.device) // x.q.shape[1])
    return attention_schedule(x.spans, x.limits, KernelConfig.from_queries(x.q).block, programs)


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
    return x._replace(**{name: getattr(x, name).contiguous() for name in names})


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
    jump)], the last two as in `BlockTiles`"""
    joins: Tensor
    """[slots, (sample or -1, block of the sample, number of slots from this one on with its parts)]"""


class AttentionSchedule(NamedTuple):
    """The schedules of a batch."""

    rows: TileSchedule
    """Blocks of queries, by the keys that they attend to."""
    columns: TileSchedule
    """Blocks of keys, by the queries that attend to them."""


class BlockTiles(NamedTuple):
    """The tiles that each block visits: `near` tiles in a row, then others behind a gap of `jump` tiles."""

    count: Tensor
    """All tiles of a block; 0 for padding."""
    near: Tensor
    jump: Tensor


class TokenBlocks(NamedTuple):
    """The blocks of all samples, padded to the largest number that the tokens allow."""

    sample: Tensor
    block: Tensor
    """Index of the block in its sample."""
    rows: BlockTiles
    """Tiles of keys that its queries attend to, from the first of the sample on."""
    columns: BlockTiles
    """Tiles of queries that attend to its keys, from its own on."""


def split_into_blocks(spans: Tensor, limits: Tensor, *, block_size: int) -> TokenBlocks:
    """Divide samples [first token, length, history] with the limits of their tokens into blocks."""
    first, length, history = spans.unbind(1)
    blocks, history_blocks = -(-length // block_size), -(-history // block_size)
    sample, block, valid = _repeat_index(blocks, len(limits) // block_size + len(spans))
    place = block[:, None] * block_size + torch.arange(block_size, device=spans.device)
    token = torch.where(place < length[sample, None], first[sample, None] + place, len(limits))
    reach = F.pad(limits, (0, 1))[token].amax(1)  # the largest limit of the block
    seen = -(-reach // block_size)
    rows = BlockTiles((seen + (block >= seen)) * valid, seen, block - seen)  # the last one is its own
    near = history_blocks[sample] - block
    candidate_reach = torch.where(near > 0, 0, reach)  # of blocks without history
    reached_from = _first_reaching(block * block_size, candidate_reach, sample, block, valid)
    count = torch.where(near > 0, near + blocks[sample] - reached_from, 1)
    columns = BlockTiles(count * valid, near, torch.where(near > 0, reached_from - history_blocks[sample], 0))
    return TokenBlocks(sample, block, rows, columns)


def _first_reaching(key: Tensor, reach: Tensor, sample: Tensor, block: Tensor, valid: Tensor) -> Tensor:
    """Return, for the first key of each block, the first block of the sample that reaches it, or their number.

    Anchors ascend, so all blocks of candidates after it reach it, too. If they do not ascend, the running maximum costs
    tiles without visible pairs, but loses none.
    """
    first_block = torch.arange(len(block), device=block.device) - block
    base = torch.where(valid, sample, len(sample)) * (key.max() + reach.max() + 1)  # samples one after the other
    return torch.searchsorted((base + reach).cummax(0).values, base + key, right=True) - first_block


def schedule_tiles(blocks: TokenBlocks, visited: BlockTiles, *, programs: int) -> TileSchedule:
    """Assign the tiles of all blocks to programs."""
    tiles = visited.count
    limit = (-(-tiles.sum() // (_PARTS_PER_PROGRAM * programs))).clamp(min=1)
    parts = -(-tiles // limit)
    index, part, valid = _repeat_index(parts, len(tiles) + _PARTS_PER_PROGRAM * programs)
    begin, end = (edge * tiles[index] // parts[index].clamp(min=1) for edge in (part, part + 1))
    is_split = valid & (parts[index] > 1)
    slot = torch.where(is_split, is_split.cumsum(0) - 1, -1)
    sample, block = torch.where(valid, blocks.sample[index], -1), blocks.block[index]
    items = torch.stack([sample, block, begin, end, slot, visited.near[index], visited.jump[index]], dim=1)
    first, slots = is_split & (part == 0), 2 * _PARTS_PER_PROGRAM * programs
    return TileSchedule(
        _snake_order(items, (end - begin) * valid, programs),
        _joins(torch.stack([sample, block, parts[index]], dim=1), slot, first, slots),
    )


def _repeat_index(counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat each index as often as its count, padded to `size`; return index, repetition and validity."""
    end = counts.cumsum(0)
    place = torch.arange(size, device=counts.device)
    index = torch.searchsorted(end, place, right=True)
    valid = index < len(counts)
    index = index.clamp(max=len(counts) - 1)
    return index, place - (end - counts)[index], valid


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


def _attention_schedule(spans: Tensor, limits: Tensor, block_size: int, programs: int) -> AttentionSchedule:
    blocks = split_into_blocks(spans, limits, block_size=block_size)
    sides = blocks.rows, blocks.columns
    return AttentionSchedule(*(schedule_tiles(blocks, side, programs=programs) for side in sides))


attention_schedule = PerBatchCache(_attention_schedule)
"""The schedule of a batch, by limits, block size and number of programs."""
