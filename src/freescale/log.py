"""The logger of this package, "freescale", and the handler that commands install on it.

Libraries and trainers that import FreeScale configure this logger as any other. A command writes it to stderr, so that
stdout holds results only. Whatever falls back, is skipped or is generated is logged, once per distinct text.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("freescale")

_CLEAR_LINE = "\r\033[K"
"""A process of this run may have drawn a progress bar on that line, and draws it again below."""
_logged: set[str] = set()


def info_once(text: str) -> None:
    """Log what the user may want to know, once per distinct text."""
    _once(logging.INFO, text)


def warning_once(text: str) -> None:
    """Log what the user should know, such as a fallback and its reason, once per distinct text."""
    _once(logging.WARNING, text)


def _once(level: int, text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        logger.log(level, "%s", text)


class ConsoleFormatter(logging.Formatter):
    """The message, after its level where that is a warning or an error."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record as plain text, in colour on a terminal."""
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        name = "error:" if record.levelno >= logging.ERROR else "warning:"
        if record.levelno >= logging.ERROR and sys.stderr.isatty() and "NO_COLOR" not in os.environ:
            name = f"\033[31m{name}\033[0m"
        return f"{name} {text}"


class ConsoleHandler(logging.Handler):
    """Writes records to stderr, whatever stderr is at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(ConsoleFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        sys.stderr.write(f"{_CLEAR_LINE if sys.stderr.isatty() else ''}{self.format(record)}\n")
        sys.stderr.flush()


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Send all records of the package, from INFO on, to one handler only."""
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
