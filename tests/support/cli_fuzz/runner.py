"""Gives commands to a zygote and takes back what became of them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

SECONDS = 180.0
"""What a command may take beside other tests."""
_FILE_BYTES = 256 << 20
_ENVIRONMENT = {
    "BROWSER": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "120",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
}


@dataclass(frozen=True)
class Circumstances:
    """What a command meets outside of its arguments and files."""

    file_bytes: int = _FILE_BYTES
    """The largest file that it can write; writing more fails as on a full disk."""
    full_stdout: bool = False
    """Whether stdout takes nothing, as `> /dev/full` does."""
    interrupt_after: float | None = None
    """Seconds after which Ctrl-C is pressed."""


@dataclass(frozen=True)
class Reply:
    """What became of a command."""

    code: int
    """Its exit code; below 0, the signal that ended it."""
    late: bool
    """Whether it was killed because its time was over."""
    seconds: float
    out: str
    err: str
    left: list[str]
    """Command lines of processes that it left behind."""


class Runner:
    """Runs one command after another, each in a process of its own."""

    def __init__(self, *, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        command = [sys.executable, "-m", "tests.support.cli_fuzz.zygote"]
        self._zygote = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | _ENVIRONMENT
        )

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, words: Sequence[str], folder: Path, circumstances: Circumstances | None = None) -> Reply:
        """Run `freescale WORDS` in a folder. Temporary files go to its subfolder `tmp`."""
        met = circumstances or Circumstances()
        request = {
            "words": list(words),
            "folder": str(folder),
            "seconds": self._seconds,
            "environment": {"TMPDIR": str(folder / "tmp"), "HOME": str(folder)},
            **vars(met),
        }
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(request).encode() + b"\n")
        self._zygote.stdin.flush()
        line = self._zygote.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that commands are forked from is gone: {self._zygote.wait()}")
        return Reply(**json.loads(line))

    def close(self) -> None:
        """End the process that commands are forked from."""
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait()
