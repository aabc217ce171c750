"""Watches a training from outside: its output, its progress and its processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

HANGS_AFTER = 240.0


class WatchedRun:
    """A training in a child process, with its output and progress."""

    def __init__(self, folder: Path, words: Sequence[str], *, host: str = "", **environment: str) -> None:
        inside = ["ip", "netns", "exec", host] if host else []
        command = [*inside, sys.executable, "-m", "freescale", *words, "--out", str(folder)]
        self.folder, self.said, self._reached = folder, "", 0
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def wait_for(self, step: int, other: "WatchedRun | None" = None) -> None:
        """Return when a step is logged by this run or by another host, since either may have rank 0."""
        runs, until = [self, *([other] if other else [])], time.monotonic() + HANGS_AFTER
        while all(run._reached < step for run in runs):
            ended = all(not run._reader.is_alive() for run in runs)
            require(not ended and time.monotonic() < until, f"step {step} was not reached: {self.said[-2000:]}")
            time.sleep(0.005)

    def wait_for_ranks(self, count: int) -> None:
        """Return when so many ranks have started."""
        while len(self.ranks()) < count:
            require(self._reader.is_alive(), f"no ranks were started: {self.said[-2000:]}")
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, in order."""
        return [rank for child in _children(self.agent) for rank in _children(child)]

    @property
    def agent(self) -> int:
        """Return the launcher's process, which `ip netns exec` becomes."""
        return self._process.pid

    def ended(self) -> int | None:
        """Return the exit code; kill the run and return None if it hangs."""
        try:
            code = self._process.wait(HANGS_AFTER)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join(5)
        return code

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said += line
            if line.startswith("step ") and "/" in line:
                self._reached = max(self._reached, int(line.split()[1].split("/")[0]))


def _children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def alive(pids: Sequence[int]) -> list[int]:
    """Return the processes that still run a while later."""
    until = time.monotonic() + 5
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def make_data(folder: Path) -> Path:
    """Write the log that every run trains on."""
    words = ["data", "synth", "--preset", "ml1m", "--users", "600", "--items", "500", str(folder)]
    subprocess.run([sys.executable, "-m", "freescale", *words], check=True, capture_output=True)
    return folder
