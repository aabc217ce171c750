"""Folders of torch.distributed.checkpoint (DCP): reading them without executing anything of them, and writing them.

    .metadata       a pickle: tensors with their chunks, other objects, and where the bytes of each are
    __0_0.distcp    one `torch.save` after another, an archive per chunk or object

Tensors are read from their archives. Objects, which are pickles of anything, stay the bytes that they are.
"""

import io
import math
import pickle
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.checkpoint.dcp_pickle import STORAGES, PickledObject, load_inert
from freescale.checkpoint.tensor_files import StoredTensor
from freescale.errors import DataError, reason
from freescale.storage import sync_to_disk

METADATA = ".metadata"
_PATH = tuple[str | int, ...]
_VERSION = "1.0.0"


class ByteRange(NamedTuple):
    """Where the bytes of a chunk or an object are."""

    file: str
    at: int
    size: int


class DcpChunk(NamedTuple):
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: ByteRange


class DcpFolder:
    """A checkpoint of DCP. Scalars count as one row."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, ByteRange] = {}
        self.paths: dict[str, _PATH] = {}
        """The keys, in the nested state dict, that lead to each entry."""
        self._chunks: dict[str, list[DcpChunk]] = {}
        self._last: tuple[ByteRange, Tensor] | None = None
        raw = self._read(ByteRange(METADATA, 0, -1))
        metadata = load_inert(raw, where=str(folder / METADATA))
        try:
            self._interpret(metadata.state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._error(f"its metadata is not that of DCP: {reason(error)}") from error

    def _interpret(self, state: Mapping[str, Any]) -> None:
        stored = {}
        for index, info in state["storage_data"].items():
            if info.state.get("transform_descriptors"):
                raise self._error(f"'{index.state['fqn']}' is stored through an extension, such as compression")
            place = ByteRange(str(info.state["relative_path"]), _natural(info.state["offset"]), info.state["length"])
            if Path(place.file).name != place.file or _natural(place.size) < 0:
                raise ValueError(f"{place.file} is not a file of the folder")
            stored[index.state["fqn"], index.state.get("offset")] = place
        for name, entry in state["state_dict_metadata"].items():
            if entry.kind == "BytesStorageMetadata":
                self.objects[name] = stored[name, None]
                continue
            dtype, size = entry.state["properties"].state[0], _sizes(entry.state["size"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"'{name}' has no type")
            self.tensors[name] = StoredTensor(dtype, size)
            boxes = [(_sizes(c.state["offsets"]), _sizes(c.state["sizes"])) for c in entry.state["chunks"]]
            self._chunks[name] = [DcpChunk(*box, stored[name, box[0]]) for box in boxes]
            if not all(_is_inside(chunk, self.tensors[name]) for chunk in self._chunks[name]):
                raise ValueError(f"a chunk of '{name}' is outside of it, or larger than its bytes")
        paths = state.get("planner_data") or {}
        self.paths = {name: tuple(paths.get(name, (name,))) for name in [*self.tensors, *self.objects]}

    def read_rows(self, parts: Mapping[str, range]) -> dict[str, Tensor]:
        """Return rows of tensors, by number."""
        return {name: self._read_rows(name, rows) for name, rows in parts.items()}

    def read_object(self, name: str) -> bytes:
        """Return the bytes of an object: what `torch.save` wrote of it."""
        return self._read(self.objects[name])

    def _read_rows(self, name: str, rows: range) -> Tensor:
        dtype, size = self.tensors[name]
        out, missing = torch.empty((len(rows), *size[1:]), dtype=dtype), len(rows) * math.prod(size[1:])
        for chunk in self._chunks[name]:
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            begin, end = max(rows.start, offsets[0]), min(rows.stop, offsets[0] + sizes[0])
            if begin >= end or not math.prod(sizes):
                continue
            box = out[begin - rows.start : end - rows.start]
            for axis, (offset, count) in enumerate(zip(offsets[1:], sizes[1:], strict=True), 1):
                box = box.narrow(axis, offset, count)
            values = self._load(name, chunk, dtype).view(sizes)
            box.copy_(values[begin - offsets[0] : end - offsets[0]])
            missing -= box.numel()
        if missing:
            raise self._error(f"{abs(missing)} values of '{name}' are {'missing' if missing > 0 else 'there twice'}")
        return out

    def _load(self, name: str, chunk: DcpChunk, dtype: torch.dtype) -> Tensor:
        """Return a chunk. The last one is kept: a large one is asked for in several parts."""
        if self._last is None or self._last[0] != chunk.stored:
            where = str(self.folder / chunk.stored.file)
            self._last = chunk.stored, load_tensor(self._read(chunk.stored), where=where)
        values = self._last[1]
        if tuple(values.shape) != chunk.sizes or values.dtype != dtype:
            raise self._error(f"a chunk of '{name}' is not what the metadata states")
        return values

    def _read(self, place: ByteRange) -> bytes:
        try:
            with (self.folder / place.file).open("rb") as file:
                file.seek(place.at)
                raw = file.read(place.size)
        except OSError as error:
            raise self._error(f"{place.file} cannot be read: {reason(error)}") from error
        if len(raw) < place.size:
            raise self._error(f"{place.file} was cut")
        return raw

    def _error(self, what: str) -> DataError:
        remedy = "save it again with torch.distributed.checkpoint and its FileSystemWriter, without extensions"
        return DataError(f"the DCP checkpoint cannot be read: {what}", where=str(self.folder), remedy=remedy)


def load_tensor(raw: bytes, *, where: str) -> Tensor:
    """Return the tensor that `torch.save` wrote. It is read from its archive, whose checksums are verified."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            folder, found = name.removesuffix("data.pkl"), load_inert(archive.read(name), where=where)
            order = archive.read(f"{folder}byteorder").decode() if f"{folder}byteorder" in archive.namelist() else ""
            if order not in ("", sys.byteorder) or not _is_tensor(found):
                raise ValueError("it is not a plain tensor of this machine's byte order")
            (_, storage, key, _, _), offset, size, stride, *_ = found.arguments
            dtype, shape = STORAGES[storage.kind], tuple(map(_natural, size))
            values = torch.frombuffer(bytearray(archive.read(f"{folder}data/{key}")) or bytearray(8), dtype=dtype)
            if math.prod(shape) > len(values):
                raise ValueError("it has more values than its storage")
        return values.as_strided(shape, tuple(map(_natural, stride)), _natural(offset)).contiguous()
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, RuntimeError, OSError, EOFError) as error:
        remedy = "save the checkpoint again with torch.distributed.checkpoint"
        raise DataError(f"a tensor cannot be read: {reason(error)}", where=where, remedy=remedy) from error


def _is_tensor(found: Any) -> bool:
    return isinstance(found, PickledObject) and found.kind == "_rebuild_tensor_v2"


def _is_inside(chunk: DcpChunk, tensor: StoredTensor) -> bool:
    """Return whether a chunk is a box of the tensor, and has as many bytes as its values need."""
    dtype, size = tensor
    ends = [offset + count for offset, count in zip(chunk.offsets, chunk.sizes, strict=True)]
    fits = len(ends) == len(size) and all(end <= most for end, most in zip(ends, size, strict=False))
    return fits and math.prod(chunk.sizes) * dtype.itemsize <= chunk.stored.size


def _sizes(given: Any) -> tuple[int, ...]:
    return tuple(map(_natural, given))


def _natural(given: Any) -> int:
    if type(given) is not int or not 0 <= given < 1 << 62:
        raise ValueError(f"{given!r} is not a size")
    return given


class DcpWriter:
    """Writes a folder as `torch.distributed.checkpoint.save` does on one rank, chunk by chunk."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, "__0_0.distcp"
        folder.mkdir(parents=True)
        self._file = (folder / self._name).open("wb")
        self._stored: dict[tuple[str, tuple[int, ...] | None], ByteRange] = {}
        self._chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}

    def __enter__(self) -> "DcpWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add_rows(self, name: str, first: int, rows: Tensor, *, size: tuple[int, ...]) -> None:
        """Add rows of a tensor, whose size may be that of a scalar."""
        offsets, values = ((first, *[0] * (rows.dim() - 1)), rows) if size else ((), rows.view(()))
        torch.save(values.clone(), archive := io.BytesIO())  # a view would be saved with all that it is a view of
        self._stored[name, offsets] = ByteRange(self._name, self._file.tell(), archive.tell())
        self._file.write(archive.getbuffer())
        self._chunks.setdefault(name, []).append((offsets, tuple(values.shape)))

    def add_object(self, name: str, raw: bytes) -> None:
        """Add the bytes of an object."""
        self._stored[name, None] = ByteRange(self._name, self._file.tell(), len(raw))
        self._file.write(raw)

    def finish(self, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], paths: Mapping[str, _PATH]) -> None:
        """Write the metadata: the types and sizes of the tensors, and the keys that lead to each entry."""
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        def entry(name: str, dtype: torch.dtype, size: tuple[int, ...]) -> dcp.TensorStorageMetadata:
            boxes = [(torch.Size(at), torch.Size(count)) for at, count in self._chunks[name]]
            chunks = [dcp.ChunkStorageMetadata(*box) for box in boxes]
            return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(size), chunks)

        listed = {name: entry(name, dtype, size) for name, dtype, size in tensors}
        objects = {name: dcp.BytesStorageMetadata() for name, offset in self._stored if offset is None}
        stored = {dcp.MetadataIndex(name, at): _StorageInfo(*place) for (name, at), place in self._stored.items()}
        metadata = dcp.Metadata({**listed, **objects}, dict(paths), stored, dcp.StorageMeta(), version=_VERSION)
        (self._folder / METADATA).write_bytes(pickle.dumps(metadata))
        self._file.flush()
        for path in (self._folder / self._name, self._folder / METADATA, self._folder):
            sync_to_disk(path)
