"""Unique ids of a batch, and the ids that two consecutive batches share. Pure.

The owner of a row finds shared ids from the requests of both batches, and sends one bit per id. Work and memory depend
on the ids, never on the table size. On a device the ids of all tables are handled together, so that the host waits for
their numbers once, however many tables there are.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale.data.device_copy import numbers_to_device

_DENSE = 4  # up to so many rows per id, a flag per row is cheaper than sorting


class UniqueIds(NamedTuple):
    """The unique ids of a batch in one table."""

    unique: Tensor
    """Ascending."""
    inverse: Tensor
    """Position of each id in `unique`, in the shape of the ids."""


def deduplicate(ids: Tensor, *, rows: int | None) -> UniqueIds:
    """Return the unique ids of a table with so many rows; None: of any ids, among which slots are numbers below 0."""
    if rows is None:
        return _deduplicate_with_slots(ids)
    if rows > _DENSE * ids.numel():
        return UniqueIds(*torch.unique(ids, return_inverse=True))
    place = torch.zeros(rows, dtype=torch.int64, device=ids.device)
    place[ids] = 1
    unique = place.nonzero()[:, 0]
    return UniqueIds(unique, (place.cumsum(0) - 1)[ids])


def _deduplicate_with_slots(ids: Tensor) -> UniqueIds:
    """Return the unique ids. Negative numbers near 0, which are slots sampled as negatives, are not sorted."""
    lowest = int(ids.min()) if ids.numel() else 0
    if not -_DENSE * ids.numel() < lowest < 0:
        return UniqueIds(*torch.unique(ids, return_inverse=True))
    is_slot = ids < 0
    at, others = is_slot.nonzero()[:, 0], (~is_slot).nonzero()[:, 0]
    slots = deduplicate(ids.index_select(0, at).sub_(lowest), rows=-lowest)
    unique, place = torch.unique(ids.index_select(0, others), return_inverse=True)
    inverse = torch.empty_like(ids).index_copy_(0, at, slots.inverse)
    inverse.index_copy_(0, others, place.add_(len(slots.unique)))
    return UniqueIds(torch.cat([slots.unique + lowest, unique]), inverse)


def deduplicate_up_to(ids: Tensor, bound: int) -> tuple[UniqueIds, int]:
    """Return the unique ids, and how many of them are at most `bound`. On a device the host waits once."""
    if ids.device.type == "cpu":
        unique, inverse = torch.unique(ids, return_inverse=True)
        return UniqueIds(unique, inverse), int((unique <= bound).sum())
    ordered, order = ids.sort()
    number = F.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))[: len(ordered)]
    unique = torch.empty_like(ordered).scatter_(0, number, ordered)  # equal values at equal places
    inverse = torch.empty_like(order).scatter_(0, order, number)
    before = F.pad(number + 1, (1, 0))
    smaller = before.index_select(0, (ordered <= bound).sum().view(1))
    count, small = torch.cat([before[-1:], smaller]).tolist()  # the host waits
    return UniqueIds(unique[:count], inverse), small


def deduplicate_tables(ids: Sequence[Tensor], *, rows: Sequence[int | None]) -> list[UniqueIds]:
    """Return the unique ids of several tables with so many rows; None: any ids. On a device the host waits once."""
    if ids[0].device.type == "cpu":
        return [deduplicate(of_table, rows=count) for of_table, count in zip(ids, rows, strict=True)]
    bounded_first = sorted(range(len(ids)), key=lambda table: rows[table] is None)
    found = deduplicate_together([ids[table] for table in bounded_first], [rows[table] for table in bounded_first])
    return [found[bounded_first.index(table)] for table in range(len(ids))]


def deduplicate_together(ids: Sequence[Tensor], rows: Sequence[int | None]) -> list[UniqueIds]:
    """Return the unique ids of tables. Those with a number of rows are sorted together; they come first."""
    bounded = [count for count in rows if count is not None]
    sizes, first = [len(of_table) for of_table in ids], [*([0, *accumulate(bounded)][:-1]), *[0] * len(ids)][: len(ids)]
    ends, first_of_table, size_of_table = numbers_to_device([[0, *accumulate(sizes)], first, sizes], ids[0].device)
    table_first = first_of_table.repeat_interleave(size_of_table, output_size=sum(sizes))
    together = sum(sizes[: len(bounded)])
    ordered, order = _sort_parts(torch.cat([*ids]) + table_first, [together, *sizes[len(bounded) :]])
    is_first = torch.zeros(len(ordered) + 1, dtype=torch.bool, device=ordered.device).index_fill_(0, ends, True)
    is_first[1:-1] |= ordered[1:] != ordered[:-1]
    number = is_first[:-1].cumsum(0) - 1
    unique = torch.empty_like(ordered).scatter_(0, number, ordered - table_first)  # equal values at equal places
    before = F.pad(number + 1, (1, 0))[ends]
    table_before = before[:-1].repeat_interleave(size_of_table, output_size=sum(sizes))
    inverse = torch.empty_like(order).scatter_(0, order, number - table_before)
    counts = before.diff().tolist()  # the host waits
    return [UniqueIds(*pair) for pair in zip(unique[: sum(counts)].split(counts), inverse.split(sizes), strict=True)]


def _sort_parts(values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Sort parts of these sizes, each by itself. Return the values, and the place of each before."""
    if len(sizes) == 1:
        return values.sort()
    ordered, order = zip(*(part.sort() for part in values.split([*sizes])), strict=True)
    begins = [0, *accumulate(sizes)]
    return torch.cat(ordered), torch.cat([places + begin for places, begin in zip(order, begins, strict=False)])


def spread(values: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor | int:
    """Return the number of its block for each entry of blocks of these sizes; of a single block the number itself."""
    if len(values) == 1:
        return values[0]
    number, size = numbers_to_device([values, sizes], device)
    return number.repeat_interleave(size, output_size=sum(sizes))


class SplitValues(NamedTuple):
    """Values of several blocks, split by a mask. The order is kept."""

    counts: list[int]
    """Selected values of each block."""
    selected: Tensor
    others: Tensor


def partition(values: Tensor, mask: Tensor, sizes: Sequence[int]) -> SplitValues:
    """Split values by a mask. `sizes`: of the blocks of both. On a device the host waits once."""
    before = F.pad(mask.cumsum(0), (1, 0))
    (ends,) = numbers_to_device([[0, *accumulate(sizes)]], mask.device)
    counts = before[ends].diff().tolist()  # the host waits
    selected, before = sum(counts), before[:-1]
    place = torch.where(mask, before, torch.arange(selected, selected + len(mask), device=mask.device) - before)
    moved = torch.empty_like(values).scatter_(0, place, values)
    return SplitValues(counts, moved[:selected], moved[selected:])


_BITS = 8


class SharedIds(NamedTuple):
    """Masks over the ids of two batches: which ids the other batch has too."""

    in_next: Tensor
    in_this: Tensor


def split(this: Tensor, following: Tensor) -> SharedIds:
    """Return which ids of a batch and of the next one are shared. Any order; duplicates are allowed."""
    return SharedIds(is_in(this, following), is_in(following, this))


def is_in(ids: Tensor, others: Tensor) -> Tensor:
    """Return which ids are among others."""
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
    first, first_byte = ([0, *accumulate(counts)][:-1] for counts in (sizes, packed_sizes(sizes)))
    shifts = [_BITS * byte - bit for byte, bit in zip(first_byte, first, strict=True)]
    shift, count = numbers_to_device([shifts, sizes], device)
    return torch.arange(sum(sizes), device=device) + shift.repeat_interleave(count, output_size=sum(sizes))


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)
