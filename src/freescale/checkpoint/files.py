"""What one rank wrote of a checkpoint: raw bytes, and an index in JSON that says what they are.

    rank-00003.bytes   tensors, one behind another, cut into pieces of whole rows
    rank-00003.json    of every piece: its tensor, type, rows, place and checksum

Nothing in here can run when it is read, and a bit that changed since it was written is found. Knows no groups: any
number of ranks reads what any other number wrote.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from freescale.errors import ConfigError, FreeScaleError, reason

_PIECE_BYTES = 1 << 24
_KNOWN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {_name(dtype): dtype for dtype in _KNOWN}


class CheckpointError(FreeScaleError):
    """A checkpoint that cannot be written, or does not fit the run that reads it."""


class MismatchError(CheckpointError):
    """A checkpoint that this run can never read: of another model, or of a later version."""

    exit_code = ConfigError.exit_code


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was written."""


@dataclass(frozen=True)
class Part:
    """The rows of a tensor that this rank holds, as they are in memory: saved from there, loaded into there."""

    local: Tensor
    first: int
    rows: int
    """Of the whole tensor."""
    everywhere: bool = False
    """Every rank holds the same, so that one of them writes it."""

    @staticmethod
    def whole(tensor: Tensor, *, everywhere: bool) -> "Part":
        """A tensor of which this rank holds all rows."""
        return Part(tensor, 0, len(_as_rows(tensor)), everywhere)

    def copied(self) -> "Part":
        """As it is now, on the CPU."""
        return replace(self, local=self.local.detach().cpu().clone())


@dataclass(frozen=True)
class _Piece:
    """Some rows of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of one row."""
    rows: int
    """Of the whole tensor."""
    first: int
    count: int
    at: int
    crc: int

    def is_sound(self) -> bool:
        """Whether it could be true."""
        numbers = (*self.shape, self.rows, self.first, self.count, self.at, self.crc)
        known = type(self.name) is str and self.dtype in _DTYPES
        known = known and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        return known and self.first + self.count <= self.rows

    @property
    def size(self) -> int:
        """Of its bytes."""
        return self.count * math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def write(folder: Path, rank: int, parts: Mapping[str, Part]) -> None:
    """Write the parts of a rank and see that they are on the disk."""
    pieces: list[_Piece] = []
    with _file(folder, rank, "bytes").open("wb") as file:
        for name, part in parts.items():
            rows = _as_rows(part.local)
            for begin, some in _cut(rows):
                raw = some.contiguous().view(-1).view(torch.uint8).numpy().data
                place = (tuple(rows.shape[1:]), part.rows, part.first + begin, len(some), file.tell())
                pieces.append(_Piece(name, _name(rows.dtype), *place, zlib.crc32(raw)))
                file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    write_json(_file(folder, rank, "json"), [asdict(piece) for piece in pieces])


def read(folder: Path, world_size: int, parts: Mapping[str, Part]) -> None:
    """Fill the parts from what so many ranks wrote; every row must be there once."""
    missing = {name: len(_as_rows(part.local)) for name, part in parts.items()}
    for rank in range(world_size):
        wanted = [(one, parts[one.name]) for one in _index(folder, rank) if one.name in parts]
        overlapping = [(one, part) for one, part in wanted if _overlap(one, part)]
        if not overlapping:
            continue
        with _opened(_file(folder, rank, "bytes")) as file:
            for piece, part in overlapping:
                missing[piece.name] -= _fill(file, piece, part, folder)
    for name, rows in missing.items():
        if rows:
            told = "there twice" if rows < 0 else "missing"
            raise _unfit(f"{abs(rows)} of {parts[name].rows} rows of '{name}' are {told}", folder)


def write_json(path: Path, content: Any) -> None:
    """Write a small file, with its checksum, and see that it is on the disk, and its name too."""
    with path.open("w", encoding="utf-8") as file:
        json.dump({"crc": _seal(content), "content": content}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_names(path.parent)


def read_json(path: Path) -> Any:
    """Read a small file that is as it was written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["crc"] == _seal(found["content"]):
            return found["content"]
        why = "it was changed since it was written"
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        why = reason(error)
    raise _damaged(f"{path.name} cannot be read: {why}", path.parent)


def sync_names(folder: Path) -> None:
    """Make sure that the names in a folder survive the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _index(folder: Path, rank: int) -> list[_Piece]:
    """The pieces that a rank wrote, each of them sound in itself."""
    path = _file(folder, rank, "json")
    try:
        pieces = [_Piece(**(entry | {"shape": tuple(entry["shape"])})) for entry in read_json(path)]
        if all(piece.is_sound() for piece in pieces):
            return pieces
    except (TypeError, KeyError) as error:
        raise _damaged(f"{path.name} is not a list of pieces", folder) from error
    raise _damaged(f"{path.name} has a piece that makes no sense", folder)


def _fill(file: Any, piece: _Piece, part: Part, folder: Path) -> int:
    """Copy into a part what a piece has of its rows; gives their number."""
    into = _as_rows(part.local)
    found = (piece.dtype, piece.shape, piece.rows)
    expected = (_name(into.dtype), tuple(into.shape[1:]), part.rows)
    if found != expected:
        raise _unfit(f"'{piece.name}' is {_told(*found)}, where this run has {_told(*expected)}", folder)
    file.seek(piece.at)
    raw = file.read(piece.size)
    if len(raw) < piece.size or zlib.crc32(raw) != piece.crc:
        raise _damaged(f"{Path(file.name).name} was cut or changed since it was written, at '{piece.name}'", folder)
    rows = torch.frombuffer(bytearray(raw), dtype=into.dtype).view(piece.count, *piece.shape)
    both = _overlap(piece, part)
    into.narrow(0, both.start - part.first, len(both)).copy_(rows.narrow(0, both.start - piece.first, len(both)))
    return len(both)


def _overlap(piece: _Piece, part: Part) -> range:
    """The rows that both have."""
    begin, end = part.first, part.first + len(_as_rows(part.local))
    return range(max(piece.first, begin), min(piece.first + piece.count, end))


def _as_rows(tensor: Tensor) -> Tensor:
    """Single numbers are one row."""
    return tensor.detach() if tensor.ndim else tensor.detach().view(1)


def _cut(rows: Tensor) -> Iterable[tuple[int, Tensor]]:
    """Pieces of whole rows, so that who needs few of them need not read and check all."""
    per_row = max(1, math.prod(rows.shape[1:]) * rows.element_size())
    step = max(1, _PIECE_BYTES // per_row)
    return ((begin, rows[begin : begin + step]) for begin in range(0, len(rows), step))


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise _damaged(f"{path.name} cannot be read: {reason(error)}", path.parent) from error


def _seal(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _unfit(what: str, folder: Path) -> MismatchError:
    remedy = "resume with the config that it was saved with"
    return MismatchError(f"the checkpoint is of another model: {what}", where=str(folder), remedy=remedy)


def _damaged(what: str, folder: Path) -> DamagedError:
    remedy = "remove this folder to take the one before it; `freescale train --resume` does so by itself"
    return DamagedError(f"the checkpoint is damaged: {what}", where=str(folder), remedy=remedy)


def _told(dtype: str, shape: tuple[int, ...], rows: int) -> str:
    return f"{dtype}[{', '.join(map(str, (rows, *shape)))}]"


def _file(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"rank-{rank:05d}.{kind}"
