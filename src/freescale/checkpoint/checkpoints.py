"""Checkpoints in a folder: which tensors they hold, written in the background, atomically, the newest few kept.

    checkpoints/step-00000480/               complete: named so only after every rank has written
    checkpoints/step-00000960-MARK.writing/  incomplete, and ignored
    checkpoints/step-00000960.damaged/       could not be read, and is ignored

All ranks must see the folder. `tensor_files` defines the files of one rank.
"""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from freescale.checkpoint import tensor_files
from freescale.checkpoint.run_folder import FACTS, checkpoint_path, complete_checkpoints, step_of
from freescale.checkpoint.table_changes import find_changes
from freescale.checkpoint.tensor_files import CheckpointError, DamagedError, LocalRows, MismatchError
from freescale.embedding.row_order import RowOrder
from freescale.embedding.sharded import ShardedTables
from freescale.errors import reason
from freescale.storage import sync_to_disk
from freescale.transport.c10d import C10d

_FORMAT = 1
_WRITING, _DAMAGED = ".writing", ".damaged"


def newest(folder: Path, transport: C10d) -> Path | None:
    """Return the newest complete checkpoint as rank 0 sees it, so that all ranks use the same."""
    complete = complete_checkpoints(folder) if transport.peers.rank == 0 else []
    number = transport.sum(1 + step_of(complete[-1]) if complete else 0, name="newest checkpoint")
    return checkpoint_path(folder, number - 1) if number else None


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint, which is all but its tensors."""
    facts = tensor_files.read_json(checkpoint / FACTS)
    valid = isinstance(facts, dict) and all(type(facts.get(key)) is int for key in ("format", "step", "ranks"))
    if not valid or not 0 < facts["ranks"] < 1 << 24:
        raise DamagedError(f"the checkpoint is damaged: {FACTS} lacks format, step or ranks", where=str(checkpoint))
    if facts["format"] > _FORMAT:
        what = f"the checkpoint has format {facts['format']}; this version of freescale reads up to {_FORMAT}"
        remedy = "install the version that wrote it, or a newer one"
        raise MismatchError(what, where=str(checkpoint), remedy=remedy)
    return facts


def load(checkpoint: Path, tensors: Mapping[str, LocalRows], tables: ShardedTables | None = None) -> dict[str, Any]:
    """Load a checkpoint of any world size into the given tensors; return its facts. `tables`: those of the tensors."""
    facts = read_facts(checkpoint)
    if tables is None or tables.dynamic is None:
        tensor_files.read(checkpoint, facts["ranks"], tensors)
        return facts
    changes = find_changes(checkpoint, facts, tables)
    changed = tuple(f"tables.{change.table.name}." for change in changes)
    unchanged = {name: rows for name, rows in tensors.items() if not f"{name}.".startswith(changed)}
    tensor_files.read(checkpoint, facts["ranks"], unchanged)
    for change in changes:
        change.load(tensors)
    tables.dynamic.reopen()
    return facts


def created_buckets(folder: Path, tables: Iterable[str], transport: C10d) -> dict[str, int]:
    """Return how many buckets dynamic tables were created with, as rank 0 reads it; none before a first checkpoint."""
    recorded: dict[str, int] = {}
    for checkpoint in reversed(complete_checkpoints(folder) if transport.peers.rank == 0 else []):
        with contextlib.suppress(CheckpointError):
            recorded = read_facts(checkpoint).get("buckets", {})
            break
    found = {table: transport.sum(recorded.get(table, 0), name="buckets") for table in tables}
    return {table: buckets for table, buckets in found.items() if buckets}


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint that cannot be read, so that it is ignored."""
    shutil.rmtree(damaged := checkpoint.with_name(checkpoint.name + _DAMAGED), ignore_errors=True)
    checkpoint.rename(damaged)


class CheckpointWriter:
    """Saves checkpoints of one run in a background thread."""

    def __init__(self, folder: Path, *, keep: int, transport: C10d) -> None:
        """`transport` must serve nothing else: it is used while training uses the others."""
        self.folder, self._keep, self._transport = folder, keep, transport
        self._rank, self._world_size = transport.peers.rank, transport.peers.world_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="freescale-save")
        self._saving: Future[None] | None = None
        if self._rank == 0:  # before any rank has the mark and can write
            for incomplete in folder.glob(f"step-*{_WRITING}"):
                shutil.rmtree(incomplete)
        # Ranks of an earlier start that lost their network may still write: not into the files of this start.
        self._mark = transport.sum(secrets.randbits(62) if self._rank == 0 else 0, name="mark")

    def save(self, step: int, tensors: Mapping[str, LocalRows], facts: Mapping[str, Any]) -> None:
        """Copy the tensors now, and write them while training continues. Call `wait` between two saves.

        `facts`: what a resumed run needs beside the tensors.
        """
        assert self._saving is None
        own = tensor_files.take_snapshot(own_tensors(tensors, rank=self._rank, world_size=self._world_size))
        all_facts = {"format": _FORMAT, "step": step, "ranks": self._world_size, **facts}
        self._saving = self._thread.submit(self._write, checkpoint_path(self.folder, step), own, all_facts)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. If any rank failed to write, all ranks raise."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Finish saving."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, final: Path, snapshot: Callable[[], dict[str, LocalRows]], facts: Mapping[str, Any]) -> None:
        """Write this rank's tensor_files. After all ranks have, rank 0 renames the folder."""
        own = snapshot()
        writing = final.with_name(f"{final.name}-{self._mark:x}{_WRITING}")
        with self._raise_on_all_ranks("its part", final):
            writing.mkdir(parents=True, exist_ok=True)
            tensor_files.write(writing, self._rank, own)
        with self._raise_on_all_ranks("its name", final):
            if self._rank == 0:
                tensor_files.write_json(writing / FACTS, facts)
                shutil.rmtree(final, ignore_errors=True)
                writing.rename(final)
                sync_to_disk(self.folder)
                for old in complete_checkpoints(self.folder)[: -self._keep]:
                    shutil.rmtree(old)

    @contextlib.contextmanager
    def _raise_on_all_ranks(self, what: str, final: Path) -> Any:
        """Raise on all ranks if the disk refuses a write to any of them."""
        refused: OSError | None = None
        try:
            yield
        except OSError as error:
            refused = error
        flags = self._transport.all_gather(torch.tensor([int(refused is not None)]), name="saving").wait()
        failed = flags.flatten().nonzero().flatten().tolist()
        if not failed:
            return
        ranks = ", ".join(map(str, failed))
        message = f"the checkpoint of step {step_of(final)} was not written: the disk refused {what} to rank {ranks}"
        where = reason(refused) if refused is not None else f"see the message of rank {failed[0]}"
        remedy = "check that the folder exists on all hosts and has space; earlier checkpoints are intact"
        raise CheckpointError(message, where=where, remedy=remedy) from refused


def own_tensors(tensors: Mapping[str, LocalRows], *, rank: int, world_size: int) -> dict[str, LocalRows]:
    """Return the tensors that this rank saves: its rows, and its share of the replicated tensors."""
    replicated = [name for name, rows in tensors.items() if rows.replicated]
    of_others = set(replicated) - set(replicated[rank::world_size])
    return {name: rows for name, rows in tensors.items() if name not in of_others}


def model_tensors(
    module: nn.Module, tables: ShardedTables | None, *, rank: int, world_size: int
) -> dict[str, LocalRows]:
    """Return the live tensors to save and load: the dense model, and this rank's rows of sharded tables."""
    dense = {f"model.{n}": LocalRows.whole(tensor, replicated=True) for n, tensor in module.state_dict().items()}
    return dense if tables is None else dense | _table_tensors(tables, rank, world_size)


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, LocalRows]:
    """Return the state of the dense optimizer, by the parameter's name."""
    _initialize_state(optimizer)
    return {
        f"optimizer.{name}.{kind}": LocalRows.whole(value, replicated=True)
        for name, parameter in module.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def generator_tensors(rank: int) -> dict[str, LocalRows]:
    """Return a copy of the state of this rank's torch generator."""
    return {f"generator.{rank}": LocalRows.whole(torch.get_rng_state(), replicated=False)}


def _table_tensors(tables: ShardedTables, rank: int, world_size: int) -> dict[str, LocalRows]:
    position = {table.name: (table.owned(rank, world_size).start, table.order) for table in tables.tables}
    state = {f"tables.{n}": LocalRows(local, *position[n.split(".")[0]]) for n, local in tables.shard.state().items()}
    slots = {} if tables.dynamic is None else tables.dynamic.state()
    return state | {f"tables.{n}": LocalRows(s.local, s.first, RowOrder(s.total, shards=1)) for n, s in slots.items()}


def _initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Let a fresh optimizer create its state by a step with a learning rate of 0, so that it can be loaded into."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
