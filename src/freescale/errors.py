"""Every error a user can meet: what happened, where, and what to do about it.

This room knows nothing of the others. A library's own exception never reaches the user: the room that called the
library raises one of these instead, with the original as its cause.
"""

import difflib
from collections.abc import Iterable

INTERRUPTED = 130
"""The exit code of who was asked to end."""


class FreeScaleError(Exception):
    """An expected failure, told in three parts."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        told = {"where: ": self.where, "remedy:": self.remedy}
        return "\n".join([self.what, *(f"  {name} {text}" for name, text in told.items() if text)])


class UsageError(FreeScaleError):
    """A command or an argument that does not exist or does not fit."""

    exit_code = 2


class ConfigError(FreeScaleError):
    """A config that cannot be run. `key` is the dotted field at fault, where one is."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", remedy: str = "", key: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.key = key


class DataError(FreeScaleError):
    """Input data that cannot be used."""

    exit_code = 3


class InstallError(FreeScaleError):
    """A set of packages that does not work together."""

    exit_code = 4


class TransportError(FreeScaleError):
    """Data that did not arrive from another rank."""

    exit_code = 5


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant, or list them all."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}"


def reason(error: BaseException) -> str:
    """Give another library's complaint as one short line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
