"""One rank on its own host: `test_clock` runs it as a process in a time namespace."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from freescale.bubbles.clock import ClockAlignment
from freescale.bubbles.step_profiler import StepProfiler

SLEEP = 0.02


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    offset = ClockAlignment(group).measure()
    bubbles = StepProfiler(folder, steps=20, every=10)
    for _ in bubbles.iterate("data", range(20)):
        with bubbles.record("host"):
            time.sleep(SLEEP if rank == 1 else 0.0)
        with bubbles.record("dense gradients"):
            flight = bubbles.recorder.begin_collective("sum")
            flight.on_wait()
            dist.all_reduce(torch.zeros(8))
            flight.on_complete()
        bubbles.end_step()
    bubbles.close()
    (folder / f"{rank}.json").write_text(json.dumps([offset.add, offset.bound]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
