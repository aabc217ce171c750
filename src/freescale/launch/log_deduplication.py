"""Log records of the ranks of one host, each distinct text written once instead of once per rank.

Each rank sends over a pipe of its own: a rank that is killed amid a text does not block the others.
"""

import logging
import multiprocessing
import threading
from multiprocessing.connection import Connection, wait

from freescale.log import ConsoleFormatter, logger

_POLL_SECONDS = 0.1


class LogCollector:
    """Logs each distinct text of some ranks once, when the first rank sends it."""

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
