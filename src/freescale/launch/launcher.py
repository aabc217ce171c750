"""Starts the ranks of a command on this host, or on several hosts that find each other at a rendezvous."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from freescale.checkpoint.run_folder import RunLock
from freescale.errors import UsageError
from freescale.launch import Hosts, is_forked, is_rank
from freescale.progress import launched_rank, progress

_SPIN_COUNT = "1000"
"""How often an OpenMP thread polls for work before it sleeps: some microseconds. The default is milliseconds, during
which it takes a core from other runs on the machine."""


def launch_ranks(
    words: Sequence[str],
    *,
    nproc: int,
    hosts: Hosts | None = None,
    restarts: int = 0,
    lock: RunLock | None = None,
) -> int | None:
    """Start `nproc` ranks of `freescale WORDS` and return their exit code; None if this process is to be the rank.

    `hosts`: start so many ranks on each of several hosts. `restarts`: how often lost ranks are restarted. `lock`: of
    the folder that the command writes; the process that outlives all restarts acquires it, before importing torch if
    possible.
    """
    _require_counts(nproc, restarts)
    _prepare_environment()
    if is_rank(is_agent=hosts is not None) or (nproc == 1 and hosts is None and not restarts):
        if lock is not None and launched_rank() == 0 and not is_forked():
            lock.acquire()
        return None
    if lock is not None and hosts is None:
        lock.acquire()
    from freescale.launch.local_ranks import start_forkserver, wait_for_forkserver

    with progress("starting ranks"), _no_interrupt_lost():
        start_forkserver()  # it imports torch while this process imports what it needs itself
        from freescale.launch.agent import Agent
        from freescale.launch.rendezvous import Rendezvous

        wait_for_forkserver()
    rendezvous = Rendezvous(hosts or Hosts(), nproc)
    try:
        if lock is not None and hosts is not None and rendezvous.serves:
            lock.acquire()  # the run ends with this host, so no other host needs the lock
        return Agent(rendezvous, words, nproc=nproc, restarts=restarts).run()
    finally:
        rendezvous.close()


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


def _require_counts(nproc: int, restarts: int) -> None:
    if nproc < 1:
        raise UsageError(f"--nproc {nproc} starts no rank", remedy="give 1 or more")
    if restarts < 0:
        raise UsageError(f"--restarts {restarts} is below 0", remedy="give 0 or more")


def _prepare_environment() -> None:
    """Set what torch, CUDA and OpenMP read when they start, unless the user has."""
    # DDP would log a warning on every rank about its search for unused parameters (see `train.sharded_model`).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Streams share so many hardware queues of a GPU, by default 8; in one queue a transfer waits for unrelated kernels.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
