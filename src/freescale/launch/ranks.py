"""The ranks of one generation on this host: processes that are started, watched and ended.

They are forked from one process that has imported what takes seconds (see `nursery`): ranks that are started again are
there at once.
"""

import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection

from freescale.launch import AGENT
from freescale.launch.log_deduplication import LogCollector, PipeHandler
from freescale.log import handled_by, logger

_CONTEXT = multiprocessing.get_context("forkserver")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
HELD_BACK = {signal.SIGTERM, signal.SIGINT}
"""Signals to all processes of a job are meant for its ranks: if the process that forks them ended, they would be killed
amid their saving. A rank that was just forked gets them when it lets them come."""


class LocalRanks:
    """Runs `freescale WORDS` once per rank."""

    def __init__(self, words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._logs = LogCollector(len(environments))
        given = zip(environments, self._logs.senders, strict=True)
        self._processes = [_CONTEXT.Process(target=_be_rank, args=(words, more, sender)) for more, sender in given]
        for process in self._processes:
            process.start()
        self._logs.start()

    def codes(self) -> list[int | None]:
        """The exit code of each rank; None while it runs, below 0 the signal that ended it."""
        return [process.exitcode for process in self._processes]

    def signal(self, kind: signal.Signals) -> None:
        """Pass a signal on to those that run."""
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, kind)

    def end(self) -> None:
        """Kill those that run: they have had their time."""
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.join()
        self._logs.stop()


def prepare() -> None:
    """Begin to import, in a process of its own, what ranks need. Signals are held back before it runs any code."""
    _CONTEXT.set_forkserver_preload(["freescale.launch.nursery"])
    resource_tracker.ensure_running()  # which would let signals come again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    os.environ[AGENT] = str(os.getpid())
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[AGENT]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_until_prepared() -> None:
    """Return when ranks would start at once."""
    first = _CONTEXT.Process(target=_nothing)
    first.start()
    first.join()


def _nothing() -> None:
    pass


def _be_rank(words: Sequence[str], environment: Mapping[str, str], sender: Connection) -> None:
    """What a forked process does: `freescale WORDS`, as if it had been started with this environment."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    os.environ.update(environment)
    end_with_parent(name=f"freescale-r{environment['RANK']}")
    agent = multiprocessing.parent_process()
    if agent is None or not agent.is_alive():
        sys.exit("the agent that started this rank is gone")
    sys.argv[1:] = words
    with handled_by(PipeHandler(sender)):
        try:
            runpy.run_module("freescale", run_name="__main__")
        except Exception:
            logger.info("%s", traceback.format_exc().rstrip())
            sys.exit(1)


def end_with_parent(name: str) -> None:
    """Let the kernel kill this process when its parent dies, so that none is left behind. `name`: what `top` shows."""
    with contextlib.suppress(AttributeError):  # systems other than Linux have no such call
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_NAME, name.encode())
