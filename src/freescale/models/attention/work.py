"""Which program of a kernel computes which part of which sample, so that none has more to do than another.

A block of queries meets as many tiles of keys as lie before it, so blocks differ by as much as histories do. Here they
are counted, the long ones cut, and all dealt to and fro, largest first. Parts of a block that was cut are joined
afterwards, in order; there are never more of them than a few per program, however long a sample is. Every shape follows
from the number of tokens and of samples alone, so no device has to be waited for.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from freescale.models.sequence import Remembered

_FINE = 4  # parts are at most a fourth of what a program does


class Dealt(NamedTuple):
    """The work of one kernel."""

    items: Tensor
    """[programs, turns, (sample or -1, block of it, first tile, last tile + 1, slot of the part or -1)]"""
    joins: Tensor
    """[slots, (sample or -1, block of it, how many slots from this one on hold its parts)]"""


class Work(NamedTuple):
    """The work of a batch."""

    rows: Dealt
    """Blocks of queries, by the keys that they see."""
    columns: Dealt
    """Blocks of keys, by the queries that see them."""


class Blocks(NamedTuple):
    """The blocks of all samples, and some that are of none: there may be as many as the tokens allow."""

    sample: Tensor
    place: Tensor
    """Which block of its sample."""
    row_tiles: Tensor
    """Tiles of keys that its queries see; 0 if it is of no sample."""
    column_tiles: Tensor
    """Tiles of queries that see its keys."""


def blocks_of(spans: Tensor, *, tokens: int, block: int) -> Blocks:
    """Divide samples [first token, length, history] into blocks."""
    _, length, history = spans.unbind(1)
    count = -(-length // block)
    sample, place, real = _spread(count, tokens // block + len(spans))
    seen = -(-torch.minimum(history[sample], (place + 1) * block) // block)
    rows = seen + (place >= seen)  # candidates see themselves beside the history
    columns = torch.where(place * block < history[sample], count[sample] - place, 1)
    return Blocks(sample, place, rows * real, columns * real)


def deal(blocks: Blocks, tiles: Tensor, *, programs: int) -> Dealt:
    """Deal blocks with so many tiles each to programs."""
    limit = (-(-tiles.sum() // (_FINE * programs))).clamp(min=1)
    parts = -(-tiles // limit)
    block, part, real = _spread(parts, len(tiles) + _FINE * programs)
    begin, end = (of * tiles[block] // parts[block].clamp(min=1) for of in (part, part + 1))
    cut = real & (parts[block] > 1)
    slot = torch.where(cut, cut.cumsum(0) - 1, -1)
    sample, place = torch.where(real, blocks.sample[block], -1), blocks.place[block]
    items = torch.stack([sample, place, begin, end, slot], dim=1)
    return Dealt(
        _to_and_fro(items, (end - begin) * real, programs),
        _joins(torch.stack([sample, place, parts[block]], dim=1), slot, cut & (part == 0), 2 * _FINE * programs),
    )


def _spread(counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay things end to end, each so many times: which one stands at each place, for which time, and if any does."""
    end = counts.cumsum(0)
    index = torch.arange(size, device=counts.device)
    which = torch.searchsorted(end, index, right=True)
    real = which < len(counts)
    which = which.clamp(max=len(counts) - 1)
    return which, index - (end - counts)[which], real


def _to_and_fro(items: Tensor, weight: Tensor, programs: int) -> Tensor:
    """Largest first; who got the larger of one turn gets the smaller of the next."""
    order = weight.argsort(descending=True, stable=True)
    turns = -(-len(order) // programs)
    nothing = items.new_full((turns * programs - len(order), items.shape[1]), -1)
    hands = torch.cat([items[order], nothing]).view(turns, programs, -1)
    hands[1::2] = hands[1::2].flip(1)
    return hands.transpose(0, 1).contiguous().int()


def _joins(entries: Tensor, slot: Tensor, first: Tensor, slots: int) -> Tensor:
    """At the slot of each first part: what it is a part of. Cut blocks have at most twice as many parts as needed."""
    joins = entries.new_full((slots + 1, entries.shape[1]), -1)
    joins[torch.where(first, slot, slots)] = torch.where(first[:, None], entries, -1)
    return joins[:slots].int()


def _work_of(spans: Tensor, tokens: int, block: int, programs: int) -> Work:
    blocks = blocks_of(spans, tokens=tokens, block=block)
    return Work(*(deal(blocks, tiles, programs=programs) for tiles in (blocks.row_tiles, blocks.column_tiles)))


work_of = Remembered(_work_of)
"""The work of a batch with so many tokens, in blocks of this size, for so many programs."""
