"""What a run tells while it goes: a line of progress for people, a line of JSON per entry for programs.

Rank 0 writes; on the others this does nothing. Every entry has a kind, a step and a time (Unix seconds):

start      training begins or goes on here: on how many ranks, and why
train      figures since the entry before, every `train.log_every` steps
evaluate   metrics of the held-out part
fault      a loss or gradient that is not finite
recovery   how long it took to go on after a loss of ranks
rewind     steps beyond this one were dropped, since they are computed again; `reached` is how far they went
end        whether training came to its end
"""

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from freescale.bubbles.records import replace_lines
from freescale.errors import DataError, reason
from freescale.log import warning_once
from freescale.progress import ProgressBar, on_terminal, progress

FILE = "metrics.jsonl"
_STAY = ("start", "recovery", "rewind")
"""Kinds that a rewind keeps: they tell what became of the steps that it drops."""
_MOST_STEPS, _LARGEST = 1 << 53, 1e30


def entries(run: Path) -> Iterator[dict[str, Any]]:
    """What a run noted. Who was killed, or had a full disk, may have left half a line."""
    return (entry for entry in _parsed(run) if entry is not None)


def damaged_lines(run: Path) -> int:
    """How many lines of the file hold no entry."""
    return sum(entry is None for entry in _parsed(run))


def figure(entry: Mapping[str, Any], name: str, default: float = math.nan) -> float:
    """A value of an entry, or the default where there is no finite number. Anyone may have edited the file."""
    value = entry.get(name)
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST
    return float(value) if real else default


def _parsed(run: Path) -> Iterator[dict[str, Any] | None]:
    """Every line of the file: None where it holds no entry."""
    try:
        with contextlib.suppress(FileNotFoundError), (run / FILE).open("rb") as file:
            yield from map(_entry, file)
    except OSError as error:
        what = f"the metrics of this run cannot be read: {reason(error)}"
        raise DataError(what, where=str(run / FILE), remedy="make the file readable, or move it away") from error


def _entry(line: bytes) -> dict[str, Any] | None:
    entry = None
    with contextlib.suppress(ValueError, RecursionError):
        entry = json.loads(line)
    fits = isinstance(entry, dict) and isinstance(entry.get("kind"), str) and type(entry.get("step")) is int
    return entry if fits and 0 <= entry["step"] < _MOST_STEPS else None


class Journal:
    """Progress on the terminal (plain lines where there is none), `metrics.jsonl`, and TensorBoard if asked for."""

    def __init__(
        self, folder: Path, *, is_rank_zero: bool, steps: int, tensorboard: bool = False, quiet: bool = False
    ) -> None:
        """`quiet`: only the files are written."""
        self._is_rank_zero, self._steps, self._path, self._unwritten = is_rank_zero, steps, folder / FILE, b""
        if is_rank_zero:
            folder.mkdir(parents=True, exist_ok=True)
        self._talks = is_rank_zero and not quiet
        self._board = _tensorboard(folder) if is_rank_zero and tensorboard else None
        self._last, self._shown = "", contextlib.ExitStack()
        self._bar: ProgressBar | None = None
        if self._talks and on_terminal():
            self._bar = self._shown.enter_context(progress("training", total=steps, unit="steps", at_once=True))

    def say(self, text: str) -> None:
        """Print a line for people."""
        if self._talks:
            sys.stderr.write(text + "\n")

    def progress(self, step: int, values: Mapping[str, float], *, seconds_left: float) -> None:
        """Note how training goes."""
        self.write({"kind": "train", "step": step, **values})
        speeds = [f"{values[name]:,.0f} {name}" for name in ("samples/s", "tokens/s")]
        details = [f"loss {values['loss']:.4f}", *speeds]
        self._last = "  ".join([f"step {step}/{self._steps}", *details])
        if self._bar is not None:
            self._bar.update(step, details=details, seconds_left=seconds_left)
        else:
            left = time.strftime("%H:%M:%S", time.gmtime(seconds_left))
            self.say(f"{self._last}  {left} left")

    def start(self, step: int, *, world_size: int, reason: str) -> None:
        """Note that training begins or goes on here. What a lost start noted beyond this step is dropped."""
        if self._path.exists():
            self.rewind(step)
        self.write({"kind": "start", "step": step, "world_size": world_size, "reason": reason})

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add an entry to the file."""
        if self._is_rank_zero:
            self._add(json.dumps({**entry, "time": round(time.time(), 3)}) + "\n")
        if self._board is not None:
            for name, value in entry.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{entry['kind']}/{name}", value, entry["step"])

    def rewind(self, step: int) -> None:
        """Drop entries beyond a step, which will be computed again, and half a line that may have been left.

        Starts stay, and an entry says how far the dropped ones went.
        """
        if not self._is_rank_zero:
            return
        noted = partial(entries, self._path.parent)
        reached, until = step, 0.0
        for entry in noted():
            if entry["step"] > step and entry["kind"] not in _STAY:
                reached, until = max(reached, entry["step"]), max(until, figure(entry, "time", 0.0))
        kept = (entry for entry in noted() if entry["step"] <= step or entry["kind"] in _STAY)
        rewound = [{"kind": "rewind", "step": step, "reached": reached, "time": until}] if reached > step else []
        replace_lines(self._path, map(json.dumps, itertools.chain(kept, rewound)))
        self._unwritten = b""

    def _add(self, line: str) -> None:
        """What a full disk refuses is written when there is room again."""
        self._unwritten += line.encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            warning_once(f"{self._path} is behind: {reason(error)}")

    def close(self) -> None:
        """End all output."""
        self._shown.close()
        if self._bar is not None and self._last:
            self.say(self._last)
        if self._board is not None:
            self._board.close()


def _tensorboard(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # an extra: only who asks for it needs it

    return SummaryWriter(folder / "tensorboard")
