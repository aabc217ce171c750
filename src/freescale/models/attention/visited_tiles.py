"""Which tiles the blocks of the attention kernels visit: those that hold visible pairs.

A block of queries visits the tiles of its near keys and its own, and before them the tiles that hold far keys. A block
of keys visits the tiles of queries that see it: those of its neighbourhood, of all later tokens if it holds far keys,
and of the candidates that reach it. All shapes depend on the numbers of tokens and samples only, so the host never
waits for the device.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale.visibility import FarKeys


class BlockTiles(NamedTuple):
    """The tiles that each block visits: `near` tiles in a row, then others behind a gap of `jump` tiles.

    With a rule of visibility, the first `far` of the near ones are those of `far_tiles`, and `shift` is added to the
    places of the others.
    """

    count: Tensor
    """All tiles of a block; 0 for padding."""
    near: Tensor
    jump: Tensor
    far: Tensor
    shift: Tensor


class TokenBlocks(NamedTuple):
    """The blocks of all samples, padded to the largest number that the tokens allow."""

    sample: Tensor
    block: Tensor
    """Index of the block in its sample."""
    rows: BlockTiles
    """Tiles of keys that its queries attend to, counted from the first of the sample."""
    columns: BlockTiles
    """Tiles of queries that attend to its keys, counted from its own first one."""
    far_tiles: Tensor
    """The tiles of a sample that hold far keys, ascending, then the others; empty without a rule of visibility."""


def split_into_blocks(
    spans: Tensor,
    limits: Tensor,
    *,
    block: int,
    tile: int,
    begins: Tensor | None = None,
    far: FarKeys | None = None,
) -> TokenBlocks:
    """Divide samples [first token, length, history] with the limits of their tokens into blocks of whole tiles."""
    blocks = _divide(spans, limits, block)
    tiles = blocks if tile == block else _divide(spans, limits, tile)
    length, history = spans[blocks.sample, 1], spans[blocks.sample, 2]
    own = blocks.place * (block // tile)  # the first of its own tiles
    own_end = torch.minimum(own + block // tile, -(-length // tile))
    seen = torch.minimum(-(-blocks.reach // tile), own)
    has_history = blocks.place * block < history
    history_end = torch.where(has_history, torch.maximum(-(-history // tile), own_end), own_end)
    nothing = torch.zeros_like(own)
    if begins is None or far is None:
        rows = BlockTiles((seen + own_end - own) * blocks.valid, seen, own - seen, nothing, nothing)
        near_end, reached_to, far_tiles = history_end, -(-length // tile), nothing[:0].int()
        reach = torch.where(tiles.place * tile < spans[tiles.sample, 2], 0, tiles.reach)  # of tiles without history
    else:
        holds = holds_far(far, blocks.tokens, tile, begins.device)
        far_tiles = (~holds).int().argsort(stable=True).int()
        rows = _narrow_rows(blocks, begins, holds, own=own, own_end=own_end, seen=seen, tile=tile)
        near_end, reached_to = _last_queries(spans, blocks, tiles, begins, far, block=block, tile=tile)
        near_end = torch.where(has_history, near_end.clamp(max=history_end).clamp(min=own_end), own_end)
        reach = tiles.reduce(torch.where(_of_candidates(spans, tiles), limits[tiles.token_or_last], 0), largest=True)
    reached_from = torch.maximum(_first_reaching(spans, blocks, tiles, reach, block=block, tile=tile), near_end)
    beyond = torch.where(has_history, (reached_to - reached_from).clamp(min=0), 0)
    jump = (reached_from - near_end) * has_history
    columns = BlockTiles((near_end - own + beyond) * blocks.valid, near_end - own, jump, nothing, nothing)
    return TokenBlocks(blocks.sample, blocks.place, rows, columns, far_tiles)


class _Division(NamedTuple):
    """The blocks of all samples, padded to the largest number that the tokens allow."""

    sample: Tensor
    place: Tensor
    """Index of the block in its sample."""
    valid: Tensor
    reach: Tensor
    """The largest limit of its tokens."""
    token: Tensor
    """The tokens of each block; the number of all tokens behind the end of its sample."""
    tokens: int

    @property
    def token_or_last(self) -> Tensor:
        """The tokens of each block; the last one of all behind the end of its sample."""
        return self.token.clamp(max=self.tokens - 1)

    def reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """Return the least or the largest value of the tokens of each block; `values`: in the shape of `token`."""
        inside = self.token < self.tokens
        if largest:
            return torch.where(inside, values, 0).amax(1)
        return torch.where(inside, values, self.tokens).amin(1)


def _divide(spans: Tensor, limits: Tensor, size: int) -> _Division:
    first, length, _ = spans.unbind(1)
    sample, place, valid = repeat_index(-(-length // size), len(limits) // size + len(spans))
    within = place[:, None] * size + torch.arange(size, device=spans.device)
    token = torch.where(within < length[sample, None], first[sample, None] + within, len(limits))
    return _Division(sample, place, valid, F.pad(limits, (0, 1))[token].amax(1), token, len(limits))


def _of_candidates(spans: Tensor, division: _Division) -> Tensor:
    """Return which tokens of blocks are candidates."""
    first, _, history = spans[division.sample].unbind(1)
    return division.token >= (first + history)[:, None]


def holds_far(far: FarKeys, tokens: int, tile: int, device: torch.device) -> Tensor:
    """Return which tiles of a sample hold far keys: [tiles of a sample of all tokens]."""
    edge = torch.arange(-(-tokens // tile) + 1, device=device) * tile
    return far.count_before(edge).diff() > 0


def _narrow_rows(
    blocks: _Division, begins: Tensor, holds: Tensor, *, own: Tensor, own_end: Tensor, seen: Tensor, tile: int
) -> BlockTiles:
    """Return the tiles of keys: those with far keys before the first near key, near ones, and the own ones."""
    earliest = blocks.reduce(begins[blocks.token_or_last])
    skipped = torch.minimum(earliest // tile, seen)
    count = F.pad(holds.cumsum(0), (1, 0))[skipped.clamp(max=len(holds))]
    near = count + seen - skipped
    return BlockTiles((near + own_end - own) * blocks.valid, near, own - seen, count, skipped - count)


def _last_queries(
    spans: Tensor, blocks: _Division, tiles: _Division, begins: Tensor, far: FarKeys, *, block: int, tile: int
) -> tuple[Tensor, Tensor]:
    """Return the ends of the tiles of history and of candidates that see keys of each block."""
    key = blocks.place * block
    last_key = key + block - 1
    begin, candidate = begins[tiles.token_or_last], _of_candidates(spans, tiles)
    ends = []
    for least in (torch.where(candidate, tiles.tokens, begin), torch.where(candidate, begin, tiles.tokens)):
        # A tile without such tokens ends the histories, but comes before the candidates.
        value = tiles.reduce(least)
        if ends:
            value = torch.where((value == tiles.tokens) & (tiles.place * tile < spans[tiles.sample, 2]), 0, value)
        ends.append(_first_above(spans, blocks, tiles, value, last_key, tile=tile))
    has_far = far.count_before(key + block) > far.count_before(key)
    history, length = spans[blocks.sample, 2], spans[blocks.sample, 1]
    return (
        torch.where(has_far, -(-history // tile), ends[0]),
        torch.where(has_far, -(-length // tile), ends[1]),
    )


def _first_above(
    spans: Tensor, blocks: _Division, tiles: _Division, value: Tensor, key: Tensor, *, tile: int
) -> Tensor:
    """Return the first tile of the sample of each block from which on all values are above its key."""
    step = tiles.tokens + value.max() + key.max() + 1  # samples one after the other
    base = torch.where(tiles.valid, tiles.sample, len(spans)) * step
    least_from_here = (base + value).flip(0).cummin(0).values.flip(0)
    above = torch.searchsorted(least_from_here, blocks.sample * step + key, right=True)
    return above - _first_tiles(spans, tile)[blocks.sample]


def _first_tiles(spans: Tensor, tile: int) -> Tensor:
    """Return the first tile of each sample."""
    counts = -(-spans[:, 1] // tile)
    return counts.cumsum(0) - counts


def _first_reaching(
    spans: Tensor, blocks: _Division, tiles: _Division, reach: Tensor, *, block: int, tile: int
) -> Tensor:
    """Return, for the first key of each block, the first tile of candidates that reaches it, or the number of tiles.

    `reach`: of the candidates of each tile. Anchors ascend, so all tiles of candidates after it reach it, too. If they
    do not ascend, the running maximum costs tiles without visible pairs, but loses none.
    """
    key = blocks.place * block
    step = key.max() + reach.max() + 1  # samples one after the other
    base = torch.where(tiles.valid, tiles.sample, len(spans)) * step
    reaching = torch.searchsorted((base + reach).cummax(0).values, blocks.sample * step + key, right=True)
    return reaching - _first_tiles(spans, tile)[blocks.sample]


def repeat_index(counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat each index as often as its count, padded to `size`; return index, repetition and validity."""
    end = counts.cumsum(0)
    place = torch.arange(size, device=counts.device)
    index = torch.searchsorted(end, place, right=True)
    valid = index < len(counts)
    index = index.clamp(max=len(counts) - 1)
    return index, place - (end - counts)[index], valid
