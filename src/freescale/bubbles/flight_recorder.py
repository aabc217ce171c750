"""The flight recorder: keeps the last operations of a rank in a small memory-mapped file that survives a crash.

RUN/flight/rank-00003.ring    records of fixed size; the oldest is overwritten; removed when the run ends successfully
RUN/flight/rank-00003.lost    the same, of an earlier start that failed

The kernel writes the mapped file even if the process is killed. Torch-free.
"""

import contextlib
import itertools
import mmap
import os
import struct
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from freescale.errors import DataError, reason
from freescale.log import warning_once

FOLDER = "flight"
_RECORD = struct.Struct("<qqi4s40s")
_SLOTS = 512


class FlightRecord(NamedTuple):
    """The begin or end of an operation."""

    number: int
    at: int
    """Nanoseconds since 1970."""
    step: int
    phase: str
    """in or out."""
    operation: str


class FlightRecorder:
    """Keeps the last operations of one rank."""

    def __init__(self, run: Path, rank: int) -> None:
        self._path = run / FOLDER / f"rank-{rank:05d}.ring"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(self._path.with_suffix(".lost"))
        try:
            with self._path.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, _SLOTS * _RECORD.size)  # or a full disk raises SIGBUS later
                self._memory = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            warning_once(f"no flight record is kept: {reason(error)}")
            self._memory = mmap.mmap(-1, _SLOTS * _RECORD.size)
        self._numbers = itertools.count(1)

    def record(self, step: int, phase: str, operation: str) -> None:
        """Record that an operation begins or ends. Thread-safe."""
        number = next(self._numbers)
        offset = number % _SLOTS * _RECORD.size
        # The format truncates the name, which is faster than slicing it.
        _RECORD.pack_into(self._memory, offset, number, time.time_ns(), step, phase.encode(), operation.encode())

    def remove(self) -> None:
        """Remove the file: the run ended successfully."""
        self._path.unlink(missing_ok=True)


def read(run: Path) -> dict[int, list[FlightRecord]]:
    """Return the last operations of every rank, in order: of the current start or, if it succeeded, of a failed one."""
    records: dict[int, list[FlightRecord]] = {}
    paths = sorted((run / FOLDER).glob("rank-*.ring")) or sorted((run / FOLDER).glob("rank-*.lost"))
    for path in paths:
        content = path.read_bytes()
        number = path.stem.removeprefix("rank-")
        if len(content) != _SLOTS * _RECORD.size or not number.isdigit():
            raise DataError("this is no flight record", where=str(path), remedy="remove the file")
        used = sorted(record for record in _RECORD.iter_unpack(content) if record[0])
        records[int(number)] = [
            FlightRecord(n, at, step, _text(phase), _text(name)) for n, at, step, phase, name in used
        ]
    return records


def unfinished_operations(records: dict[int, list[FlightRecord]]) -> list[list[str]]:
    """Return, per rank: its step, the operations it did not finish, and its age relative to the newest record."""
    by_rank = {rank: of_rank for rank, of_rank in records.items() if of_rank}
    latest = max((of_rank[-1].at for of_rank in by_rank.values()), default=0)
    age = {rank: f"{(latest - of_rank[-1].at) / 1e9:.2f} s" for rank, of_rank in by_rank.items()}
    return [[str(rank), str(of[-1].step), ", ".join(_unfinished(of)) or "-", age[rank]] for rank, of in by_rank.items()]


def _unfinished(records: list[FlightRecord]) -> list[str]:
    depth = Counter[str]()
    for record in records:
        depth[record.operation] = max(0, depth[record.operation] + (1 if record.phase == "in" else -1))
    return [operation for operation, count in depth.items() if count]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
