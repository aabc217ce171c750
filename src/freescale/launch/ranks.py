"""The ranks of one generation on this host: processes that are started, watched and ended."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PARENT = "FREESCALE_AGENT"
_PR_SET_PDEATHSIG = 1


class LocalRanks:
    """Runs `freescale WORDS` once per rank."""

    def __init__(self, words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        own = {_PARENT: str(os.getpid())}
        self._processes = [
            subprocess.Popen([sys.executable, "-m", "freescale", *words], env={**os.environ, **own, **more})
            for more in environments
        ]

    def codes(self) -> list[int | None]:
        """The exit code of each rank; None while it runs, below 0 the signal that ended it."""
        return [process.poll() for process in self._processes]

    def signal(self, kind: signal.Signals) -> None:
        """Pass a signal on to those that run."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(kind)

    def end(self) -> None:
        """Kill those that run: they have had their time."""
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()


def end_with_parent() -> None:
    """Let the kernel kill this process when the agent that started it dies, so that none is left behind."""
    parent = os.environ.get(_PARENT)
    if parent is None:
        return
    with contextlib.suppress(AttributeError):  # systems other than Linux have no such call
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(f"the agent {parent} that started this rank is gone")
