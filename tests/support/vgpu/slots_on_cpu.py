"""What the kernels of zero-collision tables compute, by torch operators on the CPU, over the memory of the device."""

from typing import Any

import torch
from torch import Tensor

from freescale.embedding.zero_collision_ids import initial_rows
from freescale.embedding.zero_collision_layout import EMPTY, EvictionPolicy, SlotArrays, StepTime
from freescale.embedding.zero_collision_torch import TorchSlots
from tests.support.vgpu import device


def find_slots(table: Any, ids: Tensor, is_wanted: Tensor, faults: Tensor, now: StepTime) -> Tensor:
    """Find rows of wanted ids, and note their use."""
    on_cpu, is_found = device.on_cpu(ids), device.on_cpu(is_wanted)
    rows = torch.full_like(on_cpu, table.shared_row)
    rows[is_found] = _slots(table).find(on_cpu[is_found], now)[0]
    _, *uses = table.arrays
    made = device.on_device(rows)
    device.gpu.memory.kernel("find_slots", [ids, is_wanted, *table.arrays], [*uses, faults], [made])
    return made


def insert_sorted(
    table: Any, ids: Tensor, buckets: Tensor, order: Tensor, now: StepTime, policy: EvictionPolicy
) -> tuple[Tensor, Tensor]:
    """Give slots to the ids whose bucket is one."""
    on_cpu, given = device.on_cpu(ids), device.on_cpu(order)[device.on_cpu(buckets) < table.layout.buckets]
    places = given.sort().values
    rows, evicted = torch.full_like(on_cpu, table.shared_row), torch.full_like(on_cpu, EMPTY)
    rows[places], evicted[places] = _slots(table).insert(on_cpu[places], now, policy)
    made = [device.on_device(value) for value in (rows, evicted)]
    device.gpu.memory.kernel("insert_ids", [ids, buckets, order, *table.arrays], [*table.arrays], made)
    return made[0], made[1]


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
    """Write the rows of new ids, and no others."""
    new = device.on_cpu(is_new)
    written, of_ids, whole = device.on_cpu(rows)[new], device.on_cpu(ids)[new], device.on_cpu(weights)
    initial = initial_rows(of_ids, whole.shape[1], table=table, seed=seed, deviation=deviation)
    whole[written] = initial.to(whole.dtype)
    if sums is not None:
        device.on_cpu(sums)[written] = 0.0
    for state in (weights, sums):
        if state is not None:
            used = frozenset(written.tolist())
            device.gpu.memory.kernel("initialize_rows", [rows, ids, is_new], [state], [], used, indexed=state)


def _slots(table: Any) -> TorchSlots:
    return TorchSlots(SlotArrays(*map(device.on_cpu, table.arrays)), table.layout, table.first)
