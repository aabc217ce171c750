"""The files that one rank writes of a checkpoint: raw bytes, and an index in JSON.

    rank-00003.bytes   tensors one after another, in chunks of whole rows
    rank-00003.json    per chunk: its tensor, dtype, rows, position and checksum

Reading them executes no code and detects every changed bit. Uses no process group: any world size reads what any other
wrote. A rank reads only the chunks with its rows, unless the checkpoint has another order of rows: then it reads all.
"""

import json
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale.embedding.row_order import RowOrder, bit_reversal
from freescale.errors import ConfigError, FreeScaleError, reason
from freescale.log import warning_once
from freescale.storage import sync_to_disk

_CHUNK_BYTES = 1 << 24
_PINNED_BYTES = 1 << 26
"""Of each of two buffers that tensors of a device are copied through."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SUPPORTED = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {_name(dtype): dtype for dtype in _SUPPORTED}


class CheckpointError(FreeScaleError):
    """A checkpoint that cannot be written, or does not fit the run that reads it."""


class MismatchError(CheckpointError):
    """A checkpoint that this run can never read: of another model, or of a later version."""

    exit_code = ConfigError.exit_code


class DamagedError(CheckpointError):
    """A checkpoint that changed since it was written."""


@dataclass(frozen=True)
class LocalRows:
    """The rows of a tensor that this rank holds in memory: saved from there, loaded into there."""

    local: Tensor
    first: int
    """Position of the first one."""
    order: RowOrder
    """Rows of the whole tensor, and their positions."""
    replicated: bool = False
    """Every rank holds the same rows, so only one writes them."""

    @staticmethod
    def whole(tensor: Tensor, *, replicated: bool) -> "LocalRows":
        """Wrap a tensor of which this rank holds all rows."""
        return LocalRows(tensor, 0, RowOrder(len(_as_rows(tensor)), shards=1), replicated)


def take_snapshot(tensors: Mapping[str, LocalRows]) -> Callable[[], dict[str, LocalRows]]:
    """Copy tensors as they are now. The returned function returns the copies on the host; any thread may call it.

    Tensors of a device are copied there first, and to the host by that function, on a stream of its own: so neither
    this thread nor the next step waits. Without device memory for that, this thread copies them to the host.
    """
    own = {name: rows for name, rows in tensors.items() if rows.local.device.type != "cpu"}
    device, size = next((rows.local.device for rows in own.values()), None), snapshot_bytes(own)
    if device is not None and size > torch.get_device_module(device).mem_get_info(device)[0]:
        what = f"checkpoints: the device has no {size / 1e9:,.2f} GB for a second copy of the state"
        warning_once(f"{what}; steps wait while it is copied to the host")
        device = None
    if device is None:
        copies = copy_to_host(tensors)
        return lambda: copies
    on_host = copy_to_host({name: rows for name, rows in tensors.items() if name not in own})
    clones = {name: replace(rows, local=rows.local.detach().clone()) for name, rows in own.items()}
    cloned = torch.accelerator.current_stream(device).record_event()

    def to_host() -> dict[str, LocalRows]:
        side = torch.Stream(device)
        side.wait_event(cloned)
        with side:
            for rows in clones.values():
                rows.local.record_stream(side)
            copied = on_host | copy_to_host(clones)
        clones.clear()
        return {name: copied[name] for name in tensors}

    return to_host


def snapshot_bytes(tensors: Mapping[str, LocalRows]) -> int:
    """Return the bytes of tensors on a device: a snapshot takes as many more there until it is on the host."""
    return sum(rows.local.nbytes for rows in tensors.values() if rows.local.device.type != "cpu")


def copy_to_host(tensors: Mapping[str, LocalRows]) -> dict[str, LocalRows]:
    """Copy tensors to the host, each once. Bytes of a device pass through pinned memory, by copy engines.

    The copies are not pinned: the pinned allocator rounds sizes up to powers of two and keeps what it has allocated.
    """
    copies: dict[str, LocalRows] = {}
    parts: list[tuple[Tensor, Tensor]] = []
    for name, rows in tensors.items():
        source = rows.local.detach()
        copied = torch.empty(source.shape, dtype=source.dtype)
        copies[name] = replace(rows, local=copied)
        if source.device.type == "cpu":
            copied.copy_(source)
        elif source.numel():
            pair = [x.contiguous().view(-1).view(torch.uint8).split(_PINNED_BYTES) for x in (copied, source)]
            parts += zip(*pair, strict=True)
    _copy_through_pinned(parts)
    return copies


def _copy_through_pinned(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy bytes of a device into those of the host. One buffer is filled while the host empties the other."""
    size = min(_PINNED_BYTES, sum(len(source) for _, source in parts))
    buffers = deque(torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2 if parts else 0))
    filling: deque[tuple[torch.Event, list[tuple[Tensor, Tensor]]]] = deque()
    for group in _groups(parts):
        if len(filling) == len(buffers):
            _empty(*filling.popleft())
        buffers.rotate()
        staged = buffers[0][: sum(len(source) for _, source in group)].split([len(source) for _, source in group])
        for buffer, (_, source) in zip(staged, group, strict=True):
            buffer.copy_(source, non_blocking=True)
        filled = torch.accelerator.current_stream(group[0][1].device).record_event()
        filling.append((filled, [(into, buffer) for buffer, (into, _) in zip(staged, group, strict=True)]))
    while filling:
        _empty(*filling.popleft())


def _groups(parts: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield parts that fit into a buffer together, so that the host waits once for many small tensors."""
    group: list[tuple[Tensor, Tensor]] = []
    size = 0
    for part in parts:
        if size + len(part[1]) > _PINNED_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += len(part[1])
    if group:
        yield group


def _empty(filled: torch.Event, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    filled.synchronize()
    for into, buffer in copies:
        into.copy_(buffer)


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of one row."""
    rows: int
    """Rows of the whole tensor."""
    first: int
    """Position of the first one."""
    count: int
    at: int
    crc: int
    shards: int = 1
    """Shards of the order of rows."""

    def is_valid(self) -> bool:
        """Return whether the values are consistent."""
        numbers = (*self.shape, self.rows, self.first, self.count, self.at, self.crc, self.shards)
        valid = type(self.name) is str and self.dtype in _DTYPES
        valid = valid and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        valid = valid and self.shards.bit_count() == 1 and self.shards <= max(1, self.rows)
        return valid and self.first + self.count <= self.order.positions

    @property
    def order(self) -> RowOrder:
        """Rows of the whole tensor, and their positions."""
        return RowOrder(self.rows, self.shards)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.count * math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def write(folder: Path, rank: int, tensors: Mapping[str, LocalRows]) -> None:
    """Write the rows of a rank and sync them to the disk."""
    write_parts(folder, rank, tensors.items())


def write_parts(folder: Path, rank: int, parts: Iterable[tuple[str, LocalRows]]) -> None:
    """Write the rows of a rank as they come, each tensor in one or more parts, and sync them to the disk."""
    chunks: list[_Chunk] = []
    with _file(folder, rank, "bytes").open("wb") as file:
        for name, held in parts:
            rows = _as_rows(held.local)
            for begin, chunk in _split(rows):
                raw = chunk.contiguous().view(-1).view(torch.uint8).numpy().data
                position = (tuple(rows.shape[1:]), held.order.rows, held.first + begin, len(chunk), file.tell())
                chunks.append(_Chunk(name, _name(rows.dtype), *position, zlib.crc32(raw), held.order.shards))
                file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    write_json(_file(folder, rank, "json"), [asdict(chunk) for chunk in chunks])


def read(folder: Path, world_size: int, tensors: Mapping[str, LocalRows]) -> None:
    """Load rows from the files of so many ranks. Every row must be there exactly once."""
    missing = {name: rows.order.count(_positions(rows)) for name, rows in tensors.items()}
    for rank in range(world_size):
        needed = [(chunk, tensors[chunk.name]) for chunk in _read_index(folder, rank) if chunk.name in tensors]
        overlapping = [(chunk, rows) for chunk, rows in needed if _may_overlap(chunk, rows)]
        if not overlapping:
            continue
        with _open(_file(folder, rank, "bytes")) as file:
            for chunk, rows in overlapping:
                missing[chunk.name] -= _fill(file, chunk, rows, folder)
    for name, count in missing.items():
        if count:
            problem = "there twice" if count < 0 else "missing"
            raise _mismatch(f"{abs(count)} of {tensors[name].order.rows} rows of '{name}' are {problem}", folder)


class StoredTensor(NamedTuple):
    """A tensor in the files of a checkpoint."""

    dtype: torch.dtype
    size: tuple[int, ...]


def stored_rows(folder: Path, world_size: int) -> dict[str, RowOrder]:
    """Return the rows of each tensor in the files of so many ranks, and their positions."""
    return {chunk.name: chunk.order for rank in range(world_size) for chunk in _read_index(folder, rank)}


def stored_tensors(folder: Path, world_size: int) -> dict[str, StoredTensor]:
    """Return the tensors in the files of so many ranks."""
    chunks = (chunk for rank in range(world_size) for chunk in _read_index(folder, rank))
    return {chunk.name: StoredTensor(_DTYPES[chunk.dtype], (chunk.rows, *chunk.shape)) for chunk in chunks}


def is_supported(dtype: torch.dtype) -> bool:
    """Return whether checkpoints can hold tensors of a type."""
    return dtype in _SUPPORTED


def write_json(path: Path, content: Any) -> None:
    """Write JSON with its checksum, and sync the file and its name to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump({"crc": _checksum(content), "content": content}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_to_disk(path.parent)


def read_json(path: Path) -> Any:
    """Read JSON and verify its checksum."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["crc"] == _checksum(stored["content"]):
            return stored["content"]
        why = "it was changed since it was written"
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        why = reason(error)
    raise _damaged(f"{path.name} cannot be read: {why}", path.parent)


def _read_index(folder: Path, rank: int) -> list[_Chunk]:
    """Return the chunks that a rank wrote, each of them valid."""
    path = _file(folder, rank, "json")
    try:
        chunks = [_Chunk(**(entry | {"shape": tuple(entry["shape"])})) for entry in read_json(path)]
        if all(chunk.is_valid() for chunk in chunks):
            return chunks
    except (TypeError, KeyError) as error:
        raise _damaged(f"{path.name} is not a list of chunks", folder) from error
    raise _damaged(f"{path.name} has an inconsistent chunk", folder)


def _fill(file: Any, chunk: _Chunk, target: LocalRows, folder: Path) -> int:
    """Copy the rows that a chunk and the target share into the target; return their number."""
    into = _as_rows(target.local)
    stored = (chunk.dtype, chunk.shape, chunk.rows)
    expected = (_name(into.dtype), tuple(into.shape[1:]), target.order.rows)
    if stored != expected:
        raise _mismatch(f"'{chunk.name}' is {_describe(*stored)}, where this run has {_describe(*expected)}", folder)
    file.seek(chunk.at)
    raw = file.read(chunk.size)
    if len(raw) < chunk.size or zlib.crc32(raw) != chunk.crc:
        raise _damaged(f"{Path(file.name).name} was cut or changed since it was written, at '{chunk.name}'", folder)
    rows = torch.frombuffer(bytearray(raw), dtype=into.dtype).view(chunk.count, *chunk.shape)
    if chunk.order != target.order:
        return _reorder(rows, chunk, into, target)
    shared = _overlap(chunk, target)
    into.narrow(0, shared.start - target.first, len(shared)).copy_(
        rows.narrow(0, shared.start - chunk.first, len(shared))
    )
    return target.order.count(shared)


def _reorder(rows: Tensor, chunk: _Chunk, into: Tensor, target: LocalRows) -> int:
    """Copy the rows of a chunk with another order; return the number of rows that the target has."""
    numbers = chunk.order.rows_at(np.arange(chunk.first, chunk.first + chunk.count))
    local = target.order.position(numbers, bit_reversal(target.order.shards)) - target.first
    shared = (numbers >= 0) & (local >= 0) & (local < len(into))
    into[torch.from_numpy(local[shared]).to(into.device)] = rows[torch.from_numpy(shared)].to(into.device)
    return int(shared.sum())


def _may_overlap(chunk: _Chunk, target: LocalRows) -> bool:
    return chunk.order != target.order or len(_overlap(chunk, target)) > 0


def _overlap(chunk: _Chunk, target: LocalRows) -> range:
    """Return the positions that both have, in the same order of rows."""
    held = _positions(target)
    return range(max(chunk.first, held.start), min(chunk.first + chunk.count, held.stop))


def _positions(held: LocalRows) -> range:
    return range(held.first, held.first + len(_as_rows(held.local)))


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor as rows; a scalar is one row."""
    return tensor.detach() if tensor.ndim else tensor.detach().view(1)


def _split(rows: Tensor) -> Iterable[tuple[int, Tensor]]:
    """Split into chunks of whole rows, so that a reader of few rows need not read and verify all."""
    per_row = max(1, math.prod(rows.shape[1:]) * rows.element_size())
    step = max(1, _CHUNK_BYTES // per_row)
    return ((begin, rows[begin : begin + step]) for begin in range(0, len(rows), step))


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise _damaged(f"{path.name} cannot be read: {reason(error)}", path.parent) from error


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _mismatch(what: str, folder: Path) -> MismatchError:
    remedy = "resume with the config that saved it"
    return MismatchError(f"the checkpoint is of another model: {what}", where=str(folder), remedy=remedy)


def _damaged(what: str, folder: Path) -> DamagedError:
    remedy = "remove this folder to use the one before it; `freescale train --resume` sets it aside automatically"
    return DamagedError(f"the checkpoint is damaged: {what}", where=str(folder), remedy=remedy)


def _describe(dtype: str, shape: tuple[int, ...], rows: int) -> str:
    return f"{dtype}[{', '.join(map(str, (rows, *shape)))}]"


def _file(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"rank-{rank:05d}.{kind}"
