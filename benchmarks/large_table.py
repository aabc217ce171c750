"""A large table of dynamic ids on one rank: filled, saved and resumed, with time and memory.

    python benchmarks/large_table.py [--slots 100000000] [--dim 8] [--load 0.75] [--folder TMP] [--out FILE.json]

Gives slots to ids in steps of a million, initializes their rows, and writes ids, rows and optimizer state as a
checkpoint does. Then it frees everything, reads the files and looks up a million ids, whose rows must be the same.
`memory`: the resident memory of the process, most and at the end of each part. One thread; seconds of the wall clock.
"""

import argparse
import gc
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from freescale.checkpoint import tensor_files
from freescale.checkpoint.tensor_files import LocalRows
from freescale.embedding.row_order import RowOrder
from freescale.embedding.zero_collision_ids import DynamicIds, empty_state, initial_rows
from freescale.embedding.zero_collision_layout import BucketLayout
from freescale.hashing import splitmix64

STEP_IDS = 1_000_000


def draw(first: int, count: int) -> Tensor:
    """Distinct ids, ascending."""
    ids = splitmix64(torch.arange(first, first + count)).sort().values
    return ids[ids != -1]


def fill(table: DynamicIds, weight: Tensor, total: int) -> int:
    """Give slots to so many ids; return how many have none."""
    without_slot = 0
    for step, first in enumerate(range(0, total, STEP_IDS)):
        ids = draw(first, min(STEP_IDS, total - first))
        assigned = table.assign(ids, step=step, time=step)
        weight[assigned.rows[assigned.new]] = initial_rows(
            ids[assigned.new], weight.shape[1], table="item", seed=0, deviation=0.01
        ).float()
        without_slot += assigned.without_slot
    return without_slot


def stored(state: dict[str, Tensor], weight: Tensor, sums: Tensor, layout: BucketLayout) -> dict[str, LocalRows]:
    """Return the tensors of a checkpoint."""
    arrays = {name: array.view(-1) for name, array in state.items()} | {"weight": weight, "sum": sums}
    return {name: LocalRows(array, 0, RowOrder(layout.rows, shards=1)) for name, array in arrays.items()}


def resident() -> float:
    """Return the resident memory in GB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 1e9, 2)


class Watch:
    """Seconds and memory of each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self._began = time.perf_counter()

    def end(self, part: str) -> None:
        """End a part."""
        now = time.perf_counter()
        self.seconds[part], self.memory[part], self._began = round(now - self._began, 1), resident(), now


def measure(slots: int, dim: int, load: float, folder: Path) -> dict[str, Any]:
    """Fill, save and resume a table."""
    layout, watch = BucketLayout.of(slots), Watch()
    total = int(load * layout.buckets * layout.slots)
    table, weight, sums = DynamicIds(layout), torch.zeros(layout.rows, dim), torch.zeros(layout.rows, 1)
    watch.end("allocate")
    without_slot = fill(table, weight, total)
    watch.end("fill")
    asked = draw(0, min(STEP_IDS, total))
    rows = table.lookup(asked)
    expected, slot_bytes = weight[rows], sum(array.nbytes for array in table.state_dict().values()) / layout.rows
    watch.end("look up a million")
    tensor_files.write(folder, 0, stored(table.state_dict(), weight, sums, layout))
    watch.end("save")
    del table, weight, sums
    gc.collect()
    watch.end("free")
    state = empty_state(layout, layout.buckets)
    weight, sums = torch.zeros(layout.rows, dim), torch.zeros(layout.rows, 1)
    tensor_files.read(folder, 1, stored(state, weight, sums, layout))
    watch.end("read")
    table = DynamicIds(layout, state=state)
    found = table.lookup(asked)
    watch.end("open and look up a million")
    return {
        "slots": layout.buckets * layout.slots,
        "dim": dim,
        "ids": total,
        "percent_without_slot": 100 * without_slot / total,
        "same_rows_after_resume": torch.equal(found, rows) and torch.equal(weight[found], expected),
        "stored_bytes_per_slot": round(slot_bytes, 2),
        "file_gb": round(sum(file.stat().st_size for file in folder.iterdir()) / 1e9, 2),
        "seconds": watch.seconds,
        "memory_gb": watch.memory | {"most": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=100_000_000)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--load", type=float, default=0.75)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        result = measure(options.slots, options.dim, options.load, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result), flush=True)
    record.save(options.out, [result])


if __name__ == "__main__":
    main()
