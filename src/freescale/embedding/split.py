"""Which rows two consecutive batches share: found by their owner from the ids of both, told in one bit per id. Pure.

Work and memory follow the ids, never the rows of a table; nothing here waits for a device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_BITS = 8


class Shared(NamedTuple):
    """Of the ids of two batches: which of them are in the other one too."""

    of_this: Tensor
    of_next: Tensor


def split(this: Tensor, following: Tensor) -> Shared:
    """Compare the ids of a batch and of the next one; any order, duplicates welcome."""
    return Shared(_among(this, following), _among(following, this))


def _among(ids: Tensor, others: Tensor) -> Tensor:
    if not len(ids) or not len(others):
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    ordered = others.sort().values
    place = torch.searchsorted(ordered, ids).clamp_(max=len(ordered) - 1)
    return ordered[place] == ids


def packed_size(bits: int) -> int:
    """Bytes that so many bits take."""
    return -(-bits // _BITS)


def pack(masks: Sequence[Tensor]) -> Tensor:
    """Masks end to end, eight to a byte."""
    bits = torch.cat(list(masks)).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % _BITS)).view(-1, _BITS)
    return (bits << torch.arange(_BITS, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The masks again, of these sizes."""
    bits = packed[:, None] >> torch.arange(_BITS, dtype=torch.uint8, device=packed.device) & 1
    return list(bits.flatten()[: sum(sizes)].bool().split(list(sizes)))
