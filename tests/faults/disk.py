"""A folder in which every change may fail: saves checkpoints there, once for each call that the disk is asked for.

    LD_PRELOAD=disk.so python -m tests.faults.disk FOLDER KIND

For every call in turn a process saves steps 1, 2 and 3 until that call ends it (KIND "crash") or is refused (an error's
name). Then it looks what is there. Prints the number of calls; ends with an error if anything was lost.
"""

import ctypes
import errno
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from freescale.checkpoint import checkpoints
from freescale.checkpoint.tensor_files import CheckpointError, LocalRows
from freescale.transport.c10d import C10d

_STEPS = (1, 2, 3)
_REFUSED = 3


def _save(folder: Path, first: int) -> int:
    """Save steps from `first` on; gives the newest that was said to be complete."""
    here = dist.HashStore()
    dist.init_process_group("gloo", store=here, rank=0, world_size=1, timeout=timedelta(seconds=30))
    assert dist.group.WORLD is not None
    place = checkpoints.CheckpointWriter(folder, keep=2, transport=C10d(dist.group.WORLD, here, timeout=30))
    told = 0
    for step in _STEPS[first - 1 :]:
        place.save(step, {"weight": LocalRows.whole(torch.full((1000,), float(step)), replicated=True)}, {})
        try:
            place.wait()
            told = step
            (folder.parent / "told").write_text(str(step))
        except CheckpointError:
            (folder.parent / "refused").touch()
    return told


def _in_a_child(folder: Path, call: int, error: int, first: int = 1) -> int:
    """Save in a process of its own, whose disk fails at a call. Gives its exit code."""
    child = os.fork()
    if not child:
        disk = ctypes.CDLL(None)
        disk.disk_fails(str(folder).encode(), call, error)
        _save(folder, first)
        (folder.parent / "calls").write_text(str(disk.disk_calls()))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _newest(folder: Path) -> int:
    """The newest checkpoint, read whole; 0 if there is none."""
    found = checkpoints.complete_checkpoints(folder)
    for path in found:
        weight = torch.zeros(1000)
        checkpoints.load(path, {"weight": LocalRows.whole(weight, replicated=True)})
        assert weight.eq(checkpoints.step_of(path)).all(), f"{path} holds something else"
    return checkpoints.step_of(found[-1]) if found else 0


def _number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def _trial(place: Path, call: int, kind: str) -> None:
    """One failing call: nothing that was said to be complete is lost, and a later run goes on from there."""
    shutil.rmtree(place, ignore_errors=True)
    folder = place / "checkpoints"
    folder.mkdir(parents=True)
    code = _in_a_child(folder, call, -1 if kind == "crash" else getattr(errno, kind))
    newest, told = _newest(folder), _number(place / "told")
    where = f"{kind} at call {call}"
    assert newest >= told, f"{where}: step {told} was complete, and is lost"
    if kind == "crash":
        assert code == 137, f"{where}: ended with {code}"
        assert _in_a_child(folder, 0, 0, first=newest + 1) == 0, f"{where}: the next run failed"
    else:
        assert code == 0, f"{where}: ended with {code}, not with an error of ours"
    if kind == "crash" or told == _STEPS[-1]:
        assert _newest(folder) == _STEPS[-1], f"{where}: the last step is not there"
    assert len(checkpoints.complete_checkpoints(folder)) <= _REFUSED, f"{where}: old checkpoints pile up"


def main() -> None:
    place, kind = Path(sys.argv[1]), sys.argv[2]
    (place / "checkpoints").mkdir(parents=True)
    assert _in_a_child(place / "checkpoints", 0, 0) == 0
    calls = _number(place / "calls")
    assert calls > 20, "the disk is not the failing one"
    for call in range(1, calls + 1):
        _trial(place, call, kind)
    sys.stdout.write(f"{calls}\n")


if __name__ == "__main__":
    main()
