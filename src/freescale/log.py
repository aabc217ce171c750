"""What a run says aloud: plain lines on stderr, so that stdout stays for results.

Everything that fell back, was skipped or was made up is said through `notice`, once per distinct text. What all ranks
have to say is said once where something listens to all of them (see `launch.voices`).
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CLEAR_LINE = "\r\033[K"
"""A process of this run may have a progress bar there, which it draws again underneath."""


def _write(text: str) -> None:
    sys.stderr.write(f"{_CLEAR_LINE if sys.stderr.isatty() else ''}{text}\n")
    sys.stderr.flush()


_said: set[str] = set()
_hear: Callable[[str], None] = _write


def notice(text: str) -> None:
    """Say something that the user should know but did not ask for."""
    if text not in _said:
        _said.add(text)
        tell(f"note: {text}")


def failure(error: Exception) -> None:
    """Say what ended this process."""
    in_colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    name = "\033[31merror:\033[0m" if in_colour else "error:"
    tell(f"{name} {error}")


def tell(text: str) -> None:
    """Say it to whoever listens."""
    _hear(text)


@contextmanager
def heard_by(listener: Callable[[str], None]) -> Iterator[None]:
    """Let another than stderr hear what is said meanwhile."""
    global _hear
    before, _hear = _hear, listener
    try:
        yield
    finally:
        _hear = before
