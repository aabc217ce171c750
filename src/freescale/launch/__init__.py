"""Starts the ranks of a command, and starts them again when one is lost. Knows nothing of what they do.

One agent runs on every host. Agents meet at a store that one of them serves; that one decides. The ranks of one start
form a generation: if one is lost, all of them end, and the next generation begins on the hosts that are there.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from freescale.checkpoint.lock import RunLock
from freescale.errors import UsageError
from freescale.launch.hosts import Hosts
from freescale.progress import progress

AGENT = "FREESCALE_AGENT"
"""In the environment of ranks that our agent started: its process id."""
_SPIN = "1000"
"""How often a thread of OpenMP looks for work before it sleeps: some microseconds. By default it is milliseconds, which
two runs that share cores take from each other."""


def launched_instead(
    words: Sequence[str],
    *,
    ranks: int,
    hosts: Hosts | None = None,
    restarts: int = 0,
    lock: RunLock | None = None,
) -> int | None:
    """Where nobody started this process as a rank and several are asked for: start them, and give their exit code.

    `hosts`: on which to start so many each; this one without. `restarts`: how often ranks are started anew. `lock`: of
    what the command writes; the process that outlives all restarts acquires it, before torch is imported if it can.
    """
    _require_counts(ranks, restarts)
    _prepare_environment()
    if is_rank(hosts) or (ranks == 1 and hosts is None and not restarts):
        if lock is not None and _is_rank_zero() and not is_forked():
            lock.acquire()
        return None
    if lock is not None and hosts is None:
        lock.acquire()
    from freescale.launch.ranks import prepare, wait_until_prepared

    with progress("starting ranks"), _no_interrupt_lost():
        prepare()  # while this process imports what it needs itself
        from freescale.launch.agent import Agent
        from freescale.launch.meeting import Meeting

        wait_until_prepared()
    meeting = Meeting(hosts or Hosts(), ranks)
    try:
        if lock is not None and hosts is not None and meeting.serves:
            lock.acquire()  # the run ends with this host, so no other has to hold it
        return Agent(meeting, words, ranks=ranks, restarts=restarts).run()
    finally:
        meeting.close()


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Raise KeyboardInterrupt on leaving, even if code inside caught it: imports of torch contain bare `except:`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = {kind: signal.signal(kind, interrupt) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        if received:
            raise KeyboardInterrupt


def is_rank(hosts: Hosts | None = None) -> bool:
    """Whether a launcher (this one, torchrun or SLURM) started this process as one of several ranks.

    A task of SLURM that is told where agents meet is one of these.
    """
    of_slurm = "SLURM_PROCID" in os.environ and "SLURM_STEP_NODELIST" in os.environ
    return "RANK" in os.environ or (of_slurm and hosts is None)


def is_forked() -> bool:
    """Whether our own agent started this process: it holds the lock and has checked what needs no torch."""
    return AGENT in os.environ and "RANK" in os.environ


def _is_rank_zero() -> bool:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0


def _require_counts(ranks: int, restarts: int) -> None:
    if ranks < 1:
        raise UsageError(f"--nproc {ranks} starts no rank", remedy="give 1 or more")
    if restarts < 0:
        raise UsageError(f"--restarts {restarts} is below 0", remedy="give 0 or more")


def _prepare_environment() -> None:
    """Set what torch and OpenMP read when they are imported, unless the user has."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of DDP's search for unused parameters (see `train.network`)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN)
