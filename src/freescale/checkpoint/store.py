"""Checkpoints in a folder: written behind training, under another name until complete, the newest few kept.

    checkpoints/step-00000480/               complete: the name is given only when every rank has written
    checkpoints/step-00000960-MARK.writing/  not complete, and ignored
    checkpoints/step-00000960.damaged/       was complete, could not be read again, and is ignored

The folder must be one that all ranks see. What the files of a rank look like, `files` knows.
"""

import contextlib
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from freescale.checkpoint import files
from freescale.checkpoint.files import CheckpointError, DamagedError, MismatchError, Part
from freescale.checkpoint.listing import FACTS, complete, named, step_of
from freescale.errors import reason
from freescale.transport.c10d import C10d

_FORMAT = 1
_WRITING, _DAMAGED = ".writing", ".damaged"


def newest(folder: Path, transport: C10d) -> Path | None:
    """The newest complete checkpoint, as rank 0 sees it: all ranks must take the same."""
    found = complete(folder) if transport.peers.rank == 0 else []
    number = transport.sum(1 + step_of(found[-1]) if found else 0, name="newest checkpoint")
    return named(folder, number - 1) if number else None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, without its tensors."""
    facts = files.read_json(checkpoint / FACTS)
    sound = isinstance(facts, dict) and all(type(facts.get(key)) is int for key in ("format", "step", "ranks"))
    if not sound or not 0 < facts["ranks"] < 1 << 24:
        raise DamagedError(f"the checkpoint is damaged: {FACTS} does not say what it holds", where=str(checkpoint))
    if facts["format"] > _FORMAT:
        what = f"the checkpoint has format {facts['format']}; this version of freescale reads up to {_FORMAT}"
        remedy = "install the version that wrote it, or a newer one"
        raise MismatchError(what, where=str(checkpoint), remedy=remedy)
    return facts


def load(checkpoint: Path, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Read into the given tensors, whatever number of ranks wrote them, and give the facts."""
    facts = read_facts(checkpoint)
    files.read(checkpoint, facts["ranks"], parts)
    return facts


def set_aside(checkpoint: Path) -> None:
    """Let nobody take for a checkpoint what could not be read."""
    shutil.rmtree(damaged := checkpoint.with_name(checkpoint.name + _DAMAGED), ignore_errors=True)
    checkpoint.rename(damaged)


class Store:
    """Saves checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, transport: C10d) -> None:
        """`transport` must be used for nothing else: saving goes on while training uses the others."""
        self.folder, self._keep, self._transport = folder, keep, transport
        self._rank, self._world_size = transport.peers.rank, transport.peers.world_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="freescale-save")
        self._saving: Future[None] | None = None
        if self._rank == 0:  # before any rank knows the mark, and could have begun to write
            for left_behind in folder.glob(f"step-*{_WRITING}"):
                shutil.rmtree(left_behind)
        # Ranks of an earlier start that was cut off may still write: they must not write into our files.
        self._mark = transport.sum(secrets.randbits(62) if self._rank == 0 else 0, name="mark")

    def save(self, step: int, parts: Mapping[str, Part], facts: Mapping[str, Any]) -> None:
        """Copy the tensors now, and write them while training goes on. What was saved before must have been waited for.

        `facts`: whatever else a resumed run has to know.
        """
        assert self._saving is None
        everywhere = [name for name, part in parts.items() if part.everywhere]
        others = set(everywhere) - set(everywhere[self._rank :: self._world_size])
        own = {name: part.copied() for name, part in parts.items() if name not in others}
        whole = {"format": _FORMAT, "step": step, "ranks": self._world_size, **facts}
        self._saving = self._thread.submit(self._write, named(self.folder, step), own, whole)

    def wait(self) -> None:
        """Wait until what was saved last is complete. If any rank failed to write, all ranks raise."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Finish saving."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, final: Path, own: Mapping[str, Part], facts: Mapping[str, Any]) -> None:
        """Write the own files; when all ranks have, rank 0 gives the checkpoint its name."""
        writing = final.with_name(f"{final.name}-{self._mark:x}{_WRITING}")
        with self._all_or_none("its part", final):
            writing.mkdir(parents=True, exist_ok=True)
            files.write(writing, self._rank, own)
        with self._all_or_none("its name", final):
            if self._rank == 0:
                files.write_json(writing / FACTS, facts)
                shutil.rmtree(final, ignore_errors=True)
                writing.rename(final)
                files.sync_names(self.folder)
                for old in complete(self.folder)[: -self._keep]:
                    shutil.rmtree(old)

    @contextlib.contextmanager
    def _all_or_none(self, what: str, final: Path) -> Any:
        """Whatever the disk refuses to one rank, all ranks learn."""
        refused: OSError | None = None
        try:
            yield
        except OSError as error:
            refused = error
        flags = self._transport.all_gather(torch.tensor([int(refused is not None)]), name="saving").wait()
        failed = flags.flatten().nonzero().flatten().tolist()
        if not failed:
            return
        who = ", ".join(map(str, failed))
        told = f"the checkpoint of step {step_of(final)} was not written: the disk refused {what} to rank {who}"
        where = reason(refused) if refused is not None else f"see what rank {failed[0]} says"
        remedy = "see that the folder exists on all hosts and has space; the checkpoints before it are unharmed"
        raise CheckpointError(told, where=where, remedy=remedy) from refused
