"""Every error a user can meet: what happened, where, and what to do about it.

This room knows nothing of the others. A library's own exception never reaches the user: the room that called the
library raises one of these instead, with the original as its cause.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike

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


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)
_TRANSIENT = (*_FULL, errno.EIO, errno.ESTALE)
"""A disk may have space again in a minute, and a file server may be back."""
_OF_FILES = (*_TRANSIENT, *_FORBIDDEN, *_IN_THE_WAY, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG)


class StorageError(FreeScaleError):
    """A file or a folder that the system does not let us read or write. Exit code 1 where trying again may help."""

    exit_code = 7

    @staticmethod
    def from_os_error(error: OSError, output: str | PathLike[str] = "") -> "StorageError":
        """Describe an error of the system. `output`: what the user asked to write; another file may have failed."""
        what = error.strerror or reason(error)
        told = f"the output cannot be written: {what}" if output else f"a file cannot be used: {what}"
        found = StorageError(told, where=str(output or error.filename or ""), remedy=_remedy(error.errno))
        if error.errno in _TRANSIENT:
            found.exit_code = FreeScaleError.exit_code  # a launcher may restart what ends with it
        return found


@contextmanager
def storage_errors(path: str | PathLike[str]) -> Iterator[None]:
    """Raise what the system refuses meanwhile as a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError.from_os_error(error, path) from error


def is_file_error(error: OSError) -> bool:
    """Whether an error of the system is about a file, rather than a connection or a process."""
    return error.errno in _OF_FILES


def _remedy(number: int | None) -> str:
    if number in _FULL:
        return "free some space there, or choose another place"
    if number in _FORBIDDEN:
        return "choose a place that you may write to, or change its permissions"
    if number in _IN_THE_WAY:
        return "something else has that name: choose another"
    return "see that the path exists and can be written"


def suggest(name: str, known: Iterable[str]) -> str:
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
