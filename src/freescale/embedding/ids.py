"""Unique ids of a batch, and the ids that two consecutive batches share. Pure.

The owner of a row finds shared ids from the requests of both batches, and sends one bit per id. Work and memory depend
on the ids, never on the table size; nothing here waits for a device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_DENSE = 4  # up to so many rows per id, a flag per row is cheaper than sorting


class UniqueIds(NamedTuple):
    """The unique ids of a batch in one table."""

    unique: Tensor
    """Ascending."""
    inverse: Tensor
    """Position of each id in `unique`, in the shape of the ids."""


def deduplicate(ids: Tensor, *, rows: int) -> UniqueIds:
    """Return the unique ids of a table with so many rows."""
    if rows > _DENSE * ids.numel():
        return UniqueIds(*torch.unique(ids, return_inverse=True))
    place = torch.zeros(rows, dtype=torch.int64, device=ids.device)
    place[ids] = 1
    unique = place.nonzero()[:, 0]
    return UniqueIds(unique, (place.cumsum(0) - 1)[ids])


_BITS = 8


class SharedIds(NamedTuple):
    """Masks over the ids of two batches: which ids the other batch has too."""

    in_next: Tensor
    in_this: Tensor


def split(this: Tensor, following: Tensor) -> SharedIds:
    """Return which ids of a batch and of the next one are shared. Any order; duplicates are allowed."""
    return SharedIds(_is_in(this, following), _is_in(following, this))


def _is_in(ids: Tensor, others: Tensor) -> Tensor:
    if not len(ids) or not len(others):
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    ordered = others.sort().values
    place = torch.searchsorted(ordered, ids).clamp_(max=len(ordered) - 1)
    return ordered[place] == ids


def packed_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the bytes of masks of these sizes."""
    return [-(-size // _BITS) for size in sizes]


def pack(masks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Pack concatenated masks of these sizes into bits. Every mask starts at a byte."""
    bits = torch.zeros(_BITS * sum(packed_sizes(sizes)), dtype=torch.uint8, device=masks.device)
    bits[_bit_positions(sizes, masks.device)] = masks.to(torch.uint8)
    return (bits.view(-1, _BITS) << _shifts(masks.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the concatenated masks."""
    bits = packed[:, None] >> _shifts(packed.device) & 1
    return bits.flatten()[_bit_positions(sizes, packed.device)].bool()


def _bit_positions(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the bit positions of all mask entries."""
    of_masks = torch.tensor([sizes, packed_sizes(sizes)], device=device)
    ends = of_masks.cumsum(1)
    shift = _BITS * (ends[1] - of_masks[1]) - (ends[0] - of_masks[0])
    return torch.arange(sum(sizes), device=device) + shift.repeat_interleave(of_masks[0], output_size=sum(sizes))


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)
