"""Converts checkpoints to and from torch.distributed.checkpoint (DCP), bit for bit.

Without an example a conversion keeps everything: names, the keys of nested state dicts, other objects as the bytes that
they are, and the facts of a training. So the conversion back gives the original. With an example, a checkpoint of the
target's format, the result has the example's names, sizes and facts, and the values of the source. TorchRec's names of
tables and of their optimizer state are known:

    tables.NAME      *.embeddings.NAME.weight, or *.embedding_bags.NAME.weight
    tables.NAME.sum  the same, then .NAME.momentum1

Rows are converted in the order of their numbers, whatever ranks owned them.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from freescale.checkpoint import checkpoints, tensor_files
from freescale.checkpoint.dcp_folder import METADATA, DcpFolder, DcpWriter
from freescale.checkpoint.run_folder import FACTS, checkpoint_path, require_complete
from freescale.checkpoint.tensor_files import DamagedError, LocalRows, StoredTensor
from freescale.embedding.row_order import RowOrder
from freescale.errors import DataError, UsageError, storage_errors
from freescale.storage import sync_to_disk

_FACTS_ENTRY = "freescale.facts"
"""The facts of a training, as bytes, in a checkpoint of DCP."""
_OBJECT = "object of DCP: "
"""Begins the name of an object of DCP in a checkpoint of ours."""
_BLOCK_BYTES = 1 << 30
"""Of rows that are held at once."""
_TABLE = re.compile(r"(?:^|\.)(?:embeddings|embedding_bags)\.([^.]+)\.weight(\.\1\.momentum1)?$")
_SLOTS = re.compile(r"\.(candidate_)?(ids|last_step|time|count)$")
"""Arrays of dynamic ids: flat in our checkpoints, [buckets, slots + 1] in a `ZeroCollisionTable`."""


class Checkpoint(Protocol):
    """Tensors that can be read in parts."""

    tensors: dict[str, StoredTensor]

    def read_rows(self, parts: Mapping[str, range]) -> dict[str, Tensor]:
        """Return rows of tensors, by number."""


class TrainedCheckpoint:
    """A checkpoint of FreeScale. `path`: its folder, or that of the run whose newest one it is."""

    def __init__(self, path: Path) -> None:
        self.folder = path if (path / FACTS).exists() else require_complete(path)
        self.facts = checkpoints.read_facts(self.folder)
        self.tensors = tensor_files.stored_tensors(self.folder, self.facts["ranks"])
        self.dcp: dict[str, Any] | None = self.facts.get("dcp")
        """What DCP has beside values, if the checkpoint was converted from it."""
        try:
            for name, (dtype, *size) in (self.dcp or {"tensors": {}})["tensors"].items():
                self.tensors.setdefault(name, StoredTensor(getattr(torch, dtype), tuple(size)))  # empty: in no file
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{FACTS} does not describe the tensors of DCP", where=str(self.folder)) from error

    def read_rows(self, parts: Mapping[str, range]) -> dict[str, Tensor]:
        """Return rows of tensors, by number."""
        into = {}
        for name, rows in parts.items():
            dtype, size = self.tensors[name]
            local = torch.empty((len(rows), *size[1:]), dtype=dtype)
            into[name] = LocalRows(local, rows.start, RowOrder((size or (1,))[0], shards=1))
        tensor_files.read(self.folder, self.facts["ranks"], {n: rows for n, rows in into.items() if rows.local.numel()})
        return {name: rows.local for name, rows in into.items()}


class ConvertedTensor(NamedTuple):
    """A tensor of the result, and the one that its values are from."""

    name: str
    size: tuple[int, ...]
    source: Checkpoint
    source_name: str

    @property
    def stored(self) -> StoredTensor:
        """The tensor in its source."""
        return self.source.tensors[self.source_name]

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.size) * self.stored.dtype.itemsize


class ConversionSummary(NamedTuple):
    """What a conversion did. Without an example, `kept` and `unused` are empty."""

    out: str
    converted: list[str]
    """Tensors of the result with values of the source."""
    kept: list[str]
    """Entries of the example for which the source has nothing."""
    unused: list[str]
    """Tensors of the source for which the example has no place."""


def convert(source: Path, out: Path, *, like: Path | None = None, renames: Sequence[str] = ()) -> ConversionSummary:
    """Convert a checkpoint to the other format. `renames`: OURS=THEIRS, how names begin here and in DCP."""
    pairs = [_parse_rename(text) for text in renames]
    if out.exists():
        raise UsageError("the output exists already", where=str(out), remedy="choose another folder")
    to_dcp = not _is_dcp(source)
    if like is not None and _is_dcp(like) != to_dcp:
        remedy = f"give a checkpoint of {'torch.distributed.checkpoint' if to_dcp else 'FreeScale'}"
        raise UsageError("the example has the format of the source", where=str(like), remedy=remedy)
    with storage_errors(out):
        if to_dcp:
            return _to_dcp(TrainedCheckpoint(source), out, None if like is None else DcpFolder(like), pairs)
        return _from_dcp(DcpFolder(source), out, None if like is None else TrainedCheckpoint(like), pairs)


def our_names(theirs: Iterable[str], renames: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return our names of DCP's: by `renames` first, then those of TorchRec's tables; others are the same."""
    found: dict[str, str] = {}
    for name in theirs:
        match = _TABLE.search(name)
        ours = name if match is None else f"tables.{match[1]}{'.sum' if match[2] else ''}"
        for begin, dcp_begin in reversed(renames):
            ours = begin + name.removeprefix(dcp_begin) if name.startswith(dcp_begin) else ours
        if same := [other for other, taken in found.items() if taken == ours]:
            what = f"'{same[0]}' and '{name}' would both become '{ours}'"
            raise UsageError(what, remedy="tell them apart with --rename OURS=THEIRS")
        found[name] = ours
    return found


def _parse_rename(text: str) -> tuple[str, str]:
    ours, equals, theirs = text.partition("=")
    if not equals or not theirs:
        raise UsageError(f"'{text}' is no renaming", remedy="give --rename OURS=THEIRS, how names begin here and there")
    return ours, theirs


def _is_dcp(folder: Path) -> bool:
    return (folder / METADATA).exists()


def _from_dcp(
    source: DcpFolder, out: Path, example: TrainedCheckpoint | None, renames: Sequence[tuple[str, str]]
) -> ConversionSummary:
    tensors = {name: stored for name, stored in source.tensors.items() if name != _FACTS_ENTRY}
    for name, stored in tensors.items():
        if not tensor_files.is_supported(stored.dtype):
            what = f"'{name}' is {_describe(stored)}, which checkpoints of FreeScale cannot hold"
            raise DataError(what, where=str(source.folder), remedy="leave it out of the state dict")
    if example is not None:
        theirs = {ours: name for name, ours in our_names(tensors, renames).items()}
        entries, summary = _fill_example(example, source, theirs, {name: name for name in example.tensors}, out)
        _write_ours(out, entries, {}, example.facts)
        return summary
    entries = [ConvertedTensor(name, stored.size or (1,), source, name) for name, stored in tensors.items()]
    summary = ConversionSummary(str(out), [*tensors], [], [])
    if _FACTS_ENTRY in source.tensors:
        _write_ours(out, entries, {}, _read_facts(source))
        return summary
    paths = {name: list(path) for name, path in source.paths.items()}
    sizes = {name: [str(stored.dtype).removeprefix("torch."), *stored.size] for name, stored in tensors.items()}
    facts = {"format": 1, "step": 0, "ranks": 1, "dcp": {"paths": paths, "tensors": sizes}}
    _write_ours(out, entries, {name: source.read_object(name) for name in source.objects}, facts)
    return summary


def _to_dcp(
    source: TrainedCheckpoint, out: Path, example: DcpFolder | None, renames: Sequence[tuple[str, str]]
) -> ConversionSummary:
    if example is not None:
        ours = our_names(example.tensors, renames)
        entries, summary = _fill_example(example, source, ours, ours, out)
        objects = {name: example.read_object(name) for name in example.objects}
        _write_dcp(out, entries, objects, example.paths)
        return summary._replace(kept=[*summary.kept, *objects])
    names = [name for name in source.tensors if not name.startswith(_OBJECT)]
    entries = [ConvertedTensor(name, source.tensors[name].size, source, name) for name in names]
    summary = ConversionSummary(str(out), names, [], [])
    if source.dcp is None:
        _write_dcp(out, entries, {}, {}, facts=source.facts)
        return summary
    entries = [entry._replace(size=tuple(source.dcp["tensors"][entry.name][1:])) for entry in entries]
    stored = {name.removeprefix(_OBJECT): name for name in source.tensors if name.startswith(_OBJECT)}
    _write_dcp(out, entries, {name: _read_bytes(source, ours) for name, ours in stored.items()}, source.dcp["paths"])
    return summary


def _fill_example(
    example: Checkpoint, source: Checkpoint, names: Mapping[str, str], ours: Mapping[str, str], out: Path
) -> tuple[list[ConvertedTensor], ConversionSummary]:
    """Return the tensors of an example, with values of the source where it has them.

    `names`: by the names of the example those of the source. `ours`: by the same, those of FreeScale.
    """
    entries = []
    for name, stored in example.tensors.items():
        other = names.get(name, "")
        matches = other in source.tensors
        if matches:
            _require_alike(name, stored, other, source.tensors[other])
        entries.append(ConvertedTensor(name, stored.size, *((source, other) if matches else (example, name))))
    converted = [entry.name for entry in entries if entry.source is source]
    kept = [entry.name for entry in entries if entry.source is example]
    unused = sorted(set(source.tensors) - {entry.source_name for entry in entries if entry.source is source})
    if not converted:
        remedy = f"name the places with --rename OURS=THEIRS; the source has {', '.join(unused[:5])}"
        raise UsageError("no tensor of the source has a place in the example", remedy=remedy)
    partial = _tables(converted, ours).keys() & _tables(kept, ours).keys()
    for table in sorted(partial):
        with_value, without = _tables(converted, ours)[table], _tables(kept, ours)[table]
        what = f"table '{table}' would be converted in part: the source has '{with_value}', and nothing for '{without}'"
        remedy = "use the same optimizer in both, and save rows and optimizer state in one checkpoint"
        raise UsageError(what, remedy=remedy)
    return entries, ConversionSummary(str(out), converted, kept, unused)


def _tables(names: Iterable[str], ours: Mapping[str, str]) -> dict[str, str]:
    """Return the tables that tensors belong to, each with one of them."""
    known = [(ours[name], name) for name in names if not name.endswith("._extra_state")]
    return {our.split(".")[1]: name for our, name in known if our.startswith("tables.")}


def _require_alike(name: str, wanted: StoredTensor, other: str, given: StoredTensor) -> None:
    same = _without_ones(wanted.size) == _without_ones(given.size)
    if _SLOTS.search(name) and _SLOTS.search(other):
        same = math.prod(wanted.size) == math.prod(given.size)
    if not same or wanted.dtype != given.dtype:
        what = f"'{other}' is {_describe(given)}, and '{name}' of the example is {_describe(wanted)}"
        raise UsageError(what, remedy="give an example of the same model, with as many rows in the same precision")


def _without_ones(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return a size without ones at its end: a scalar is one row, and a value per row may be a column."""
    while size and size[-1] == 1:
        size = size[:-1]
    return size


def _describe(stored: StoredTensor) -> str:
    return f"{str(stored.dtype).removeprefix('torch.')}{list(stored.size)}"


def _blocks(entries: Iterable[ConvertedTensor]) -> Iterator[tuple[ConvertedTensor, int, Tensor]]:
    """Yield all rows of all tensors in the shape of the result, as many at a time as memory should hold."""
    waiting: list[tuple[ConvertedTensor, range]] = []
    held = 0
    for entry in entries:
        size = entry.stored.size or (1,)
        whole = len(_without_ones(size)) != len(_without_ones(entry.size or (1,)))
        step = size[0] if whole else max(1, _BLOCK_BYTES * size[0] // max(1, entry.bytes))
        for first in range(0, max(1, size[0]), max(1, step)):
            rows = range(first, min(first + step, size[0]))
            part = entry.bytes * len(rows) // max(1, size[0])
            if held + part > _BLOCK_BYTES:
                yield from _read_together(waiting)
                waiting, held = [], 0
            waiting.append((entry, rows))
            held += part
    yield from _read_together(waiting)


def _read_together(parts: Sequence[tuple[ConvertedTensor, range]]) -> Iterator[tuple[ConvertedTensor, int, Tensor]]:
    """Read rows, those of a checkpoint at once: it reads its lists of chunks anew each time."""
    sources = {id(entry.source): entry.source for entry, _ in parts}
    read = {
        key: source.read_rows({e.source_name: rows for e, rows in parts if e.source is source})
        for key, source in sources.items()
    }
    for entry, rows in parts:
        values = read[id(entry.source)].pop(entry.source_name)
        shape = entry.size or (1,)
        whole = len(rows) == (entry.stored.size or (1,))[0]
        yield entry, rows.start, values.view(shape if whole else (len(rows), *shape[1:]))


def _write_ours(
    out: Path, entries: Sequence[ConvertedTensor], objects: Mapping[str, bytes], facts: Mapping[str, Any]
) -> None:
    """Write a run with one checkpoint. The files of all ranks but the first are empty."""

    def parts() -> Iterator[tuple[str, LocalRows]]:
        for entry, first, rows in _blocks(entries):
            yield entry.name, LocalRows(rows, first, RowOrder((entry.size or (1,))[0], shards=1))
        for name, raw in objects.items():
            rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            yield f"{_OBJECT}{name}", LocalRows(rows, 0, RowOrder(len(rows), shards=1))

    with _complete_or_absent(out) as folder:
        checkpoint = checkpoint_path(folder / "checkpoints", facts["step"])
        checkpoint.mkdir(parents=True)
        tensor_files.write_parts(checkpoint, 0, parts())
        for rank in range(1, facts["ranks"]):
            tensor_files.write_parts(checkpoint, rank, ())
        tensor_files.write_json(checkpoint / FACTS, dict(facts))
        if "config" in facts:
            (folder / "config.toml").write_text(facts["config"], encoding="utf-8")


def _write_dcp(
    out: Path,
    entries: Sequence[ConvertedTensor],
    objects: Mapping[str, bytes],
    paths: Mapping[str, Sequence[str | int]],
    *,
    facts: Mapping[str, Any] | None = None,
) -> None:
    with _complete_or_absent(out) as folder, DcpWriter(folder) as writer:
        for name, raw in objects.items():
            writer.add_object(name, raw)
        for entry, first, rows in _blocks(entries):
            writer.add_rows(entry.name, first, rows, size=entry.size)
        listed = [(entry.name, entry.stored.dtype, entry.size) for entry in entries]
        if facts is not None:
            raw = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
            writer.add_rows(_FACTS_ENTRY, 0, raw, size=tuple(raw.shape))
            listed.append((_FACTS_ENTRY, raw.dtype, tuple(raw.shape)))
        names = [*objects, *(name for name, *_ in listed)]
        writer.finish(listed, {name: tuple(paths.get(name, (name,))) for name in names})


@contextlib.contextmanager
def _complete_or_absent(out: Path) -> Iterator[Path]:
    """Give a folder to write, which gets its name when it is complete."""
    writing = out.with_name(f".{out.name}.partial-{os.getpid()}")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield writing
        writing.rename(out)
        sync_to_disk(out.parent)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _read_bytes(source: Checkpoint, name: str) -> bytes:
    return source.read_rows({name: range(source.tensors[name].size[0])})[name].numpy().tobytes()


def _read_facts(source: DcpFolder) -> dict[str, Any]:
    try:
        facts = json.loads(_read_bytes(source, _FACTS_ENTRY))
        if all(type(facts[key]) is int and facts[key] >= 0 for key in ("format", "step", "ranks")):
            return dict(facts)
        why = "it lacks format, step or ranks"
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        why = str(error)
    what = f"'{_FACTS_ENTRY}' does not describe a training: {why}"
    raise DataError(what, where=str(source.folder), remedy="convert the training again")
