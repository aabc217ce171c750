"""Checkpoints leave a GPU while the next steps run, and hold the state of their own step."""

import threading
from pathlib import Path
from unittest.mock import patch

import torch

from freescale.checkpoint import checkpoints
from freescale.checkpoint.checkpoints import CheckpointWriter
from freescale.checkpoint.run_folder import checkpoint_path
from freescale.checkpoint.tensor_files import LocalRows
from freescale.embedding.row_order import RowOrder
from freescale.transport.world import new_group
from tests.support.ranks import Ranks, World
from tests.support.training import joined
from tests.support.vgpu.checks import reports_of

ROWS = 1000


def save_and_change(world: World, folder: str, free_bytes: int) -> tuple[list[str], int, int]:
    """Save rows and change them. Return the reports, and how often the main thread and the writer wait for the device.

    The writer starts after the change is launched, so what the main thread has launched does not wait for its copies.
    """
    from tests.support.vgpu import device

    here = joined(world)
    initial = torch.arange(3.0 * ROWS).view(ROWS, 3) + world.rank
    table = initial.to(here.device)
    order = RowOrder(world.ranks * ROWS, shards=1)
    with reports_of(world) as found:
        writer, is_changed = CheckpointWriter(Path(folder), keep=1, transport=new_group(timeout=60)), threading.Event()
        writer._thread.submit(is_changed.wait)
        device.waits.clear()
        with patch.object(torch.vgpu, "mem_get_info", lambda *_: (free_bytes, 1 << 30)):  # type: ignore[attr-defined]
            writer.save(1, {"table": LocalRows(table, world.rank * ROWS, order)}, {})
        table.mul_(-1.0)
        waits = device.waits.copy()
        is_changed.set()
        writer.close()
        of_writer = sum((device.waits - waits).values())
    loaded = torch.empty_like(initial)
    checkpoints.load(checkpoint_path(Path(folder), 1), {"table": LocalRows(loaded, world.rank * ROWS, order)})
    assert torch.equal(loaded, initial)
    assert torch.equal(table.cpu(), -initial)
    return found, sum(waits.values()), of_writer


def test_a_checkpoint_is_copied_to_the_host_behind_the_next_step_and_holds_the_state_of_its_own(
    gpus: Ranks, tmp_path: Path
) -> None:
    assert gpus.run(save_and_change, str(tmp_path), 1 << 30) == [([], 0, 1)] * 2


def test_without_device_memory_for_a_second_copy_the_main_thread_copies_to_the_host(
    gpus: Ranks, tmp_path: Path
) -> None:
    assert gpus.run(save_and_change, str(tmp_path), 1000) == [([], 1, 0)] * 2
