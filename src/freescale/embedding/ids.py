"""Each id once, before it is looked up or sent. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_DENSE = 4  # a mark per row of the table is cheaper than sorting while the table has at most so many rows per id


class UniqueIds(NamedTuple):
    """The rows that a batch needs of one table."""

    unique: Tensor
    """Ascending."""
    inverse: Tensor
    """Where each id that was asked for stands in `unique`; of the shape of those ids."""


def deduplicate(ids: Tensor, *, rows: int) -> UniqueIds:
    """Find the distinct ids of a table with so many rows."""
    if rows > _DENSE * ids.numel():
        return UniqueIds(*torch.unique(ids, return_inverse=True))
    place = torch.zeros(rows, dtype=torch.int64, device=ids.device)
    place[ids] = 1
    unique = place.nonzero()[:, 0]
    return UniqueIds(unique, (place.cumsum(0) - 1)[ids])


_BITS = 8


class SharedIds(NamedTuple):
    """Of the ids of two batches: which of them are in the other one too."""

    in_next: Tensor
    in_this: Tensor


def split(this: Tensor, following: Tensor) -> SharedIds:
    """Compare the ids of a batch and of the next one; any order, duplicates welcome."""
    return SharedIds(_is_in(this, following), _is_in(following, this))


def _is_in(ids: Tensor, others: Tensor) -> Tensor:
    if not len(ids) or not len(others):
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    ordered = others.sort().values
    place = torch.searchsorted(ordered, ids).clamp_(max=len(ordered) - 1)
    return ordered[place] == ids


def packed_sizes(sizes: Sequence[int]) -> list[int]:
    """Bytes that masks of so many bits take."""
    return [-(-size // _BITS) for size in sizes]


def pack(masks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Masks of these sizes, laid end to end, as bits; every mask begins with a byte of its own."""
    bits = torch.zeros(_BITS * sum(packed_sizes(sizes)), dtype=torch.uint8, device=masks.device)
    bits[_bit_positions(sizes, masks.device)] = masks.to(torch.uint8)
    return (bits.view(-1, _BITS) << _shifts(masks.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, sizes: Sequence[int]) -> Tensor:
    """The masks again, end to end."""
    bits = packed[:, None] >> _shifts(packed.device) & 1
    return bits.flatten()[_bit_positions(sizes, packed.device)].bool()


def _bit_positions(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Where the bits of each mask stand."""
    of_masks = torch.tensor([sizes, packed_sizes(sizes)], device=device)
    ends = of_masks.cumsum(1)
    shift = _BITS * (ends[1] - of_masks[1]) - (ends[0] - of_masks[0])
    return torch.arange(sum(sizes), device=device) + shift.repeat_interleave(of_masks[0], output_size=sum(sizes))


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)
