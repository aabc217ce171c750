"""Checkpoints in a folder: written behind training, under another name until complete, the newest few kept.

    checkpoints/step-00000480/          complete: the name is given only when every rank has written
    checkpoints/step-00000960.writing/  not complete, and ignored

The folder must be one that all ranks see.
"""

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from freescale.errors import FreeScaleError, reason

_FACTS = "facts.json"
_WRITING = ".writing"


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != _WRITING and (path / _FACTS).exists())


def named(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return folder / f"step-{step:08d}"


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, without its tensors."""
    try:
        return json.loads((checkpoint / _FACTS).read_text())
    except (OSError, ValueError) as error:
        raise FreeScaleError(
            f"the checkpoint cannot be read: {reason(error)}",
            where=str(checkpoint),
            remedy="remove this folder; the one before it will be taken",
        ) from error


def load(checkpoint: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Read into the given tensors, whatever number of ranks wrote them."""
    try:
        dcp.load(dict(tensors), checkpoint_id=checkpoint, process_group=group)
    except (dcp.CheckpointException, RuntimeError, OSError, KeyError) as error:
        raise FreeScaleError(
            f"the checkpoint does not fit this run or is damaged: {_why(error)}",
            where=str(checkpoint),
            remedy="resume with the config that it was saved with, or remove this folder to take the one before it",
        ) from error


class Store:
    """Saves checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, rank: int, group: dist.ProcessGroup) -> None:
        """`group` must be used for nothing else: saving goes on while training uses the others."""
        self.folder, self._keep, self._leads, self._group = folder, keep, rank == 0, group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="freescale-save")
        self._saving: Future[None] | None = None
        if self._leads:
            for left_behind in folder.glob(f"step-*{_WRITING}"):
                shutil.rmtree(left_behind)

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Copy the tensors now, and write them while training goes on."""
        self.wait()
        final = named(self.folder, step)
        writing = final.with_name(final.name + _WRITING)
        written = dcp.async_save(dict(tensors), checkpoint_id=writing, process_group=self._group)
        assert isinstance(written, Future)
        self._saving = self._thread.submit(self._finish, written, writing, final, dict(facts))

    def wait(self) -> None:
        """Wait until what was saved last is complete."""
        if self._saving is None:
            return
        try:
            self._saving.result()
        except (dcp.CheckpointException, RuntimeError, OSError) as error:
            raise FreeScaleError(
                f"a checkpoint could not be written: {_why(error)}",
                where=str(self.folder),
                remedy="see that the folder exists on all hosts and has space; the checkpoints before it are unharmed",
            ) from error
        finally:
            self._saving = None

    def close(self) -> None:
        """Finish saving."""
        self.wait()
        self._thread.shutdown()

    def _finish(self, written: Future[Any], writing: Path, final: Path, facts: Mapping[str, Any]) -> None:
        """Give the complete checkpoint its name. Rank 0 hears of the end only when every rank has written."""
        written.result()
        if not self._leads:
            return
        (writing / _FACTS).write_text(json.dumps(facts, indent=1) + "\n")
        _to_disk(writing / _FACTS)
        _to_disk(writing)
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
        _to_disk(self.folder)
        for old in complete(self.folder)[: -self._keep]:
            shutil.rmtree(old)


def _why(error: BaseException) -> str:
    """The complaint of the first rank that has one."""
    if isinstance(error, dcp.CheckpointException):
        rank, (failure, _) = min(error.failures.items())
        return f"rank {rank}: {reason(failure)}"
    return reason(error)


def _to_disk(path: Path) -> None:
    """Make sure that a file, or the names in a folder, survive the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
