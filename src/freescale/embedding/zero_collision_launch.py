"""Assigns slots on a GPU: the host waits for nothing, because nothing is compacted.

Ids come with a mask of those that are wanted. One kernel finds their slots, one inserts new ids, and one initializes
rows. The result is that of `DynamicIds.assign`, bit for bit. Inserting sorts the ids by bucket; one program inserts all
ids of a bucket in ascending order, so there are no atomics.
"""

import struct
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from freescale.embedding import zero_collision_kernels as kernels
from freescale.embedding.zero_collision_ids import Candidates, DynamicIds, initial_key
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy, SlotArrays, StepTime

KINDS = {"none": kernels.NONE, "ttl": kernels.TTL, "lru": kernels.LRU, "lfu": kernels.LFU}
_WARPS = 4  # a thread for each slot of a window


class SlotTable(NamedTuple):
    """The slots of the buckets from `first` on."""

    arrays: SlotArrays
    layout: BucketLayout
    first: int

    @property
    def constants(self) -> dict[str, int]:
        """What kernels are compiled for."""
        window = self.layout.window
        return {"SLOTS": self.layout.slots, "WINDOW": window, "PADDED": triton.next_power_of_2(window)}

    @property
    def shared_row(self) -> int:
        """The first shared row."""
        return self.first * self.layout.stride + self.layout.slots

    def local(self, rows: Tensor) -> Tensor:
        """Return rows of the whole table as rows of the arrays."""
        return rows - self.first * self.layout.stride


class MaskedAssignment(NamedTuple):
    """The rows of a step's ids, as `Assignment`, with a mask instead of places."""

    rows: Tensor
    """Of each wanted id."""
    is_new: Tensor
    evicted: Tensor
    """Of new ids: the ids that lost these slots; EMPTY where the slot was free."""
    is_waiting: Tensor
    is_without_slot: Tensor


def assign_masked(
    ids: DynamicIds, requests: Tensor, is_wanted: Tensor, faults: Tensor, *, step: int, time: int
) -> MaskedAssignment:
    """Return the rows of a step's ids, and give slots to the new ones.

    `requests`: ascending. `is_wanted`: one place of each id. `faults`: becomes 1 if an id is not of these buckets.
    """
    now, table = StepTime.of(step, time), SlotTable(ids.arrays, ids.layout, ids.owned.start)
    rows = find_slots(table, requests, is_wanted, faults, now)
    is_absent = is_admitted = is_wanted & ~table.layout.is_slot(rows)
    small, places = None, rows
    if ids.candidates is not None:
        small = SlotTable(ids.candidates.arrays, ids.candidates.layout, ids.owned.start)
        places = find_slots(small, requests, is_absent, faults, now)
        is_unknown = is_absent & ~small.layout.is_slot(places)
        found, _ = insert_ids(small, requests, is_unknown, now, Candidates.policy)
        places = torch.where(is_unknown, found, places)
        is_admitted = is_absent & (small.arrays.count.view(-1)[small.local(places)] >= ids.admit_after)
    inserted, evicted = insert_ids(table, requests, is_admitted, now, ids.policy)
    is_new = is_admitted & table.layout.is_slot(inserted)
    if small is not None:  # ids with a slot are no candidates any more; the id of a shared row is EMPTY anyway
        small.arrays.ids.view(-1)[small.local(torch.where(is_new, places, small.shared_row))] = EMPTY
    rows = torch.where(is_admitted, inserted, rows)
    return MaskedAssignment(rows, is_new, evicted, is_absent & ~is_admitted, is_admitted & ~is_new)


def find_slots(table: SlotTable, ids: Tensor, is_wanted: Tensor, faults: Tensor, now: StepTime) -> Tensor:
    """Return the rows of wanted ids, shared ones for those without a slot. Notes that a step uses the others."""
    rows, arrays, constants = torch.empty_like(ids), table.arrays, table.constants
    if len(ids):
        bits = table.layout.buckets.bit_length() - 1
        numbers = table.first, len(arrays.ids), now.step, now.time
        options: dict[str, Any] = {"BITS": bits, "num_warps": _WARPS, **constants}
        kernels.find_slots[(len(ids),)](ids, is_wanted, rows, *arrays, faults, *numbers, **options)
    return rows


def insert_ids(
    table: SlotTable, ids: Tensor, is_wanted: Tensor, now: StepTime, policy: EvictionPolicy
) -> tuple[Tensor, Tensor]:
    """Give slots to wanted ids, which are ascending and have none; return their rows, and the ids that had them."""
    none = table.layout.buckets  # sorted behind all buckets
    buckets, order = torch.where(is_wanted, table.layout.bucket_of(ids), none).sort(stable=True)
    return insert_sorted(table, ids, buckets, order, now, policy)


def insert_sorted(
    table: SlotTable, ids: Tensor, buckets: Tensor, order: Tensor, now: StepTime, policy: EvictionPolicy
) -> tuple[Tensor, Tensor]:
    """Launch the kernel. `buckets`: ascending; those behind the last one insert nothing."""
    rows, evicted = torch.full_like(ids, table.shared_row), torch.full_like(ids, EMPTY)
    if len(ids):
        numbers = table.first, len(ids), now.step, now.time, policy.ttl, policy.protected
        options: dict[str, Any] = {"BUCKETS": table.layout.buckets, "KIND": KINDS[policy.kind], "num_warps": _WARPS}
        options |= table.constants
        kernels.insert_ids[(len(ids),)](ids, buckets, order, rows, evicted, *table.arrays, *numbers, **options)
    return rows, evicted


def initialize_rows(
    weights: Tensor,
    sums: Tensor | None,
    rows: Tensor,
    ids: Tensor,
    is_new: Tensor,
    *,
    table: str,
    seed: int,
    deviation: float,
) -> None:
    """Write the initial values of new ids, and zeros to their optimizer state: see `initial_rows`."""
    if not len(ids):
        return
    (scale_bits,) = struct.unpack("<q", struct.pack("<d", deviation * 3.0**0.5))
    dim, columns = weights.shape[1], 0 if sums is None else sums[:1].numel()
    options: dict[str, Any] = {"DIM": dim, "PADDED": triton.next_power_of_2(dim), "SUMS": columns}
    options |= {"num_warps": _WARPS, "enable_fp_fusion": False}
    arguments = weights, weights if sums is None else sums, rows, ids, is_new, initial_key(table, seed), scale_bits
    kernels.initialize_rows[(len(ids),)](*arguments, **options)
