"""What a run tells while it goes: a line of progress for people, a line of JSON per entry for programs.

Rank 0 writes; on the others this does nothing.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from freescale.bubbles.records import replace_lines
from freescale.errors import reason
from freescale.log import notice
from freescale.progress import Bar, on_terminal, progress

FILE = "metrics.jsonl"


def entries(run: Path) -> Iterator[dict[str, Any]]:
    """What a run noted. Who was killed, or had a full disk, may have left half a line."""
    with contextlib.suppress(FileNotFoundError), (run / FILE).open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and "kind" in entry and type(entry.get("step")) is int:
                    yield entry


class Journal:
    """Progress on the terminal (plain lines where there is none), `metrics.jsonl`, and TensorBoard if asked for."""

    def __init__(
        self, folder: Path, *, leads: bool, steps: int, tensorboard: bool = False, quiet: bool = False
    ) -> None:
        """`quiet`: only the files are written."""
        self._leads, self._steps, self._path, self._unwritten = leads, steps, folder / FILE, b""
        if leads:
            folder.mkdir(parents=True, exist_ok=True)
        self._talks = leads and not quiet
        self._board = _tensorboard(folder) if leads and tensorboard else None
        self._last, self._shown = "", contextlib.ExitStack()
        self._bar: Bar | None = None
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

    def write(self, entry: Mapping[str, Any]) -> None:
        """Add an entry to the file."""
        if self._leads:
            self._add(json.dumps(entry) + "\n")
        if self._board is not None:
            for name, value in entry.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{entry['kind']}/{name}", value, entry["step"])

    def rewind(self, step: int) -> None:
        """Drop entries beyond a step, which will be done again, and half a line that may have been left."""
        if self._leads:
            kept = (json.dumps(entry) for entry in entries(self._path.parent) if entry["step"] <= step)
            replace_lines(self._path, kept)
            self._unwritten = b""

    def _add(self, line: str) -> None:
        """What a full disk refuses is written when there is room again."""
        self._unwritten += line.encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            notice(f"{self._path} is behind: {reason(error)}")

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
