"""The ranks of this host: processes that are forked, watched and ended, and their logs.

They are forked from a process that has imported torch (see `forkserver`), so restarted ranks are ready at once. Their
log records are deduplicated: each distinct text is written once instead of once per rank.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait

from freescale.launch import AGENT
from freescale.log import ConsoleFormatter, handled_by, logger

_CONTEXT = multiprocessing.get_context("forkserver")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_POLL_SECONDS = 0.1
BLOCKED_SIGNALS = {signal.SIGTERM, signal.SIGINT}
"""Blocked in the forkserver: a signal to all processes of a job would end it, and with it the ranks while they save. A
forked rank unblocks them and receives what came meanwhile."""


class LocalRanks:
    """Runs `freescale WORDS` once per rank."""

    def __init__(self, words: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self._logs = LogCollector(len(environments))
        ranks = zip(environments, self._logs.senders, strict=True)
        self._processes = [_CONTEXT.Process(target=_run_rank, args=(words, *rank)) for rank in ranks]
        for process in self._processes:
            process.start()
        self._logs.start()

    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each rank; None while it runs, negative for a signal."""
        return [process.exitcode for process in self._processes]

    def signal(self, kind: signal.Signals) -> None:
        """Send a signal to the ranks that run."""
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, kind)

    def end(self) -> None:
        """Kill the ranks that still run."""
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.join()
        self._logs.stop()


def start_forkserver() -> None:
    """Start the process that imports what ranks need. Signals are blocked before it runs any code."""
    _CONTEXT.set_forkserver_preload(["freescale.launch.forkserver"])
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    os.environ[AGENT] = str(os.getpid())
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[AGENT]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_forkserver() -> None:
    """Return when the forkserver has imported everything."""
    first = _CONTEXT.Process(target=_do_nothing)
    first.start()
    first.join()


def _do_nothing() -> None:
    pass


def _run_rank(words: Sequence[str], environment: Mapping[str, str], sender: Connection) -> None:
    """Run `freescale WORDS` in a forked process, as if it had been started with this environment."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
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
    """Let the kernel kill this process when its parent dies, so that no rank is left. `name`: shown by `top`."""
    with contextlib.suppress(AttributeError):  # only Linux has this call
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_NAME, name.encode())


class LogCollector:
    """Logs each distinct text of some ranks once, when the first rank sends it.

    Each rank has its own pipe: a rank that is killed amid a text does not block the others.
    """

    def __init__(self, world_size: int) -> None:
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(world_size)]
        self._receivers: list[Connection] = [receiver for receiver, _ in pipes]
        self.senders = [sender for _, sender in pipes]
        """One per rank."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._collect, daemon=True)

    def start(self) -> None:
        """Start to collect, after every rank has received its sender."""
        for sender in self.senders:
            sender.close()  # so that a pipe ends with its rank
        self._thread.start()

    def stop(self) -> None:
        """Return after everything that ranks sent before they ended is logged."""
        self._stopping.set()
        self._thread.join()

    def _collect(self) -> None:
        logged: set[str] = set()
        while self._receivers:
            ready = wait(self._receivers, _POLL_SECONDS)
            if not ready and self._stopping.is_set():
                return  # a process that a rank started lives on and keeps its pipe open
            for receiver in [receiver for receiver in self._receivers if receiver in ready]:
                text = self._receive(receiver)
                if text and text not in logged:
                    logged.add(text)
                    logger.info("%s", text)

    def _receive(self, receiver: Connection) -> str:
        """Return the next text of a pipe; drop the pipe and return nothing if its rank has ended."""
        try:
            return receiver.recv_bytes().decode()
        except (EOFError, OSError):  # an OSError: the rank was killed amid a text
            self._receivers.remove(receiver)
            receiver.close()
            return ""


class PipeHandler(logging.Handler):
    """Sends the log records of a rank to the process that started it."""

    def __init__(self, sender: Connection) -> None:
        super().__init__()
        self.setFormatter(ConsoleFormatter())
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record. `logging` holds a lock meanwhile, so threads do not mix their texts."""
        self._sender.send_bytes(self.format(record).encode(errors="backslashreplace"))  # as stderr does it
