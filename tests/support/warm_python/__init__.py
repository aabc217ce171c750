"""A `python` whose processes are forked from one that has imported torch and TorchRec, since that takes seconds.

It takes the place of `sys.executable` in tests that start commands: `-m MODULE`, `-c CODE`, `-` and `SCRIPT` with
arguments run in a process of their own, with the caller's folder, environment and standard streams. Left out are the
start of the interpreter and its tear-down, so tests of these, of signals and of time start a real one.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

_FOLDER = Path(__file__).parent
_COMMANDS = {"python": "", "freescale": "-m freescale", "torchrun": "-m torch.distributed.run"}


class WarmPython:
    """The server, and a folder of commands that run on it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        commands, address = Path(self._folder.name), Path(self._folder.name) / "socket"
        for name, words in _COMMANDS.items():
            client = f"{sys.executable} -IS {_FOLDER / 'client.py'} {address}"
            (commands / name).write_text(f'#!/bin/sh\nexec {client} {words} "$@"\n')
            (commands / name).chmod(0o755)
        self.python = str(commands / "python")
        self.path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        """For the environment of a shell: `python`, `freescale` and `torchrun` are found here."""
        command = [sys.executable, "-m", "tests.support.warm_python.server", address, self.python]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"

    def __enter__(self) -> "WarmPython":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self._folder.cleanup()
