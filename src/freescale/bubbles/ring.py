"""The flight recorder: the last operations of a rank in a small file that outlives it, however it ends. Pure.

RUN/flight/rank-00003.ring    records of fixed size, the oldest overwritten; gone when the run has ended well
RUN/flight/rank-00003.lost    the same, of a start before, that did not end well

The file is mapped into memory, so the kernel keeps it when the process is killed.
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


class Note(NamedTuple):
    """Something that a rank did."""

    number: int
    at: int
    """Nanoseconds since 1970."""
    step: int
    phase: str
    """in or out."""
    what: str


class Ring:
    """Keeps the last operations of one rank."""

    def __init__(self, run: Path, rank: int) -> None:
        self._path = run / FOLDER / f"rank-{rank:05d}.ring"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._path.rename(self._path.with_suffix(".lost"))
        try:
            with self._path.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, _SLOTS * _RECORD.size)  # or a full disk would kill who writes
                self._memory = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            warning_once(f"no flight record is kept: {reason(error)}")
            self._memory = mmap.mmap(-1, _SLOTS * _RECORD.size)
        self._numbers = itertools.count(1)

    def note(self, step: int, phase: str, what: str) -> None:
        """Write down that something begins or ends. From any thread."""
        number = next(self._numbers)
        place = number % _SLOTS * _RECORD.size
        # The name is cut by the format itself, which takes less time than doing it here.
        _RECORD.pack_into(self._memory, place, number, time.time_ns(), step, phase.encode(), what.encode())

    def remove(self) -> None:
        """The run has ended well: nobody will ask."""
        self._path.unlink(missing_ok=True)


def read(run: Path) -> dict[int, list[Note]]:
    """The last operations of every rank that left some, in order: of this start or, if it ended well, of one before."""
    found: dict[int, list[Note]] = {}
    paths = sorted((run / FOLDER).glob("rank-*.ring")) or sorted((run / FOLDER).glob("rank-*.lost"))
    for path in paths:
        content = path.read_bytes()
        number = path.stem.removeprefix("rank-")
        if len(content) != _SLOTS * _RECORD.size or not number.isdigit():
            raise DataError("this is no flight record", where=str(path), remedy="remove the file")
        kept = sorted(record for record in _RECORD.iter_unpack(content) if record[0])
        found[int(number)] = [Note(n, at, step, _text(phase), _text(what)) for n, at, step, phase, what in kept]
    return found


def stuck(notes: dict[int, list[Note]]) -> list[list[str]]:
    """Of every rank: its step, what it had begun and not ended, and how long before the last sign of any rank."""
    some = {rank: of_rank for rank, of_rank in notes.items() if of_rank}
    latest = max((of_rank[-1].at for of_rank in some.values()), default=0)
    silent = {rank: f"{(latest - of_rank[-1].at) / 1e9:.2f} s" for rank, of_rank in some.items()}
    return [[str(rank), str(of[-1].step), ", ".join(_open(of)) or "-", silent[rank]] for rank, of in some.items()]


def _open(notes: list[Note]) -> list[str]:
    """What was begun and did not end."""
    under_way = Counter[str]()
    for note in notes:
        under_way[note.what] = max(0, under_way[note.what] + (1 if note.phase == "in" else -1))
    return [what for what, count in under_way.items() if count]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
