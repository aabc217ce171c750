"""Errors with what happened, where, and a remedy.

A package that calls a library converts the exceptions of that library to one of these, with the original as cause.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike

INTERRUPTED = 130
"""Exit code after a request to stop."""
NOTHING_NEW = 8
"""Exit code of a training without a new partition to train on."""


class FreeScaleError(Exception):
    """An expected failure: what, where, remedy."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        details = {"where: ": self.where, "remedy:": self.remedy}
        return "\n".join([self.what, *(f"  {name} {text}" for name, text in details.items() if text)])


class UsageError(FreeScaleError):
    """An unknown command or an invalid argument."""

    exit_code = 2


class ConfigError(FreeScaleError):
    """An invalid config. `key`: the dotted name of the invalid field, if there is one."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", remedy: str = "", key: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.key = key


class DataError(FreeScaleError):
    """Unusable input data."""

    exit_code = 3


class InstallError(FreeScaleError):
    """Incompatible or missing packages."""

    exit_code = 4


class GuardError(FreeScaleError):
    """A metric that fell further than a guard allows."""

    exit_code = 9


class TransportError(FreeScaleError):
    """A failed transfer between ranks."""

    exit_code = 5


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NAME_TAKEN = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY)
_TRANSIENT = (*_FULL, errno.EIO, errno.ESTALE)
"""Errors that may pass: a disk is cleaned up, a file server returns."""
_FILE_ERRORS = (*_TRANSIENT, *_FORBIDDEN, *_NAME_TAKEN, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG)


class StorageError(FreeScaleError):
    """A file or folder that cannot be read or written. Exit code 1 if a retry may help, else 7."""

    exit_code = 7

    @staticmethod
    def from_os_error(error: OSError, output: str | PathLike[str] = "") -> "StorageError":
        """Convert an OSError. `output`: the path that the user asked to write; the failed file may differ."""
        what = error.strerror or reason(error)
        message = f"the output cannot be written: {what}" if output else f"a file cannot be used: {what}"
        result = StorageError(message, where=str(output or error.filename or ""), remedy=_remedy(error.errno))
        if error.errno in _TRANSIENT:
            result.exit_code = FreeScaleError.exit_code  # a launcher may restart the process
        return result


@contextmanager
def storage_errors(path: str | PathLike[str]) -> Iterator[None]:
    """Convert OSErrors inside the block to a StorageError with this path."""
    try:
        yield
    except OSError as error:
        raise StorageError.from_os_error(error, path) from error


def is_file_error(error: OSError) -> bool:
    """Whether an OSError is about a file rather than a connection or a process."""
    return error.errno in _FILE_ERRORS


def _remedy(number: int | None) -> str:
    if number in _FULL:
        return "free disk space, or choose another path"
    if number in _FORBIDDEN:
        return "choose a writable path, or change its permissions"
    if number in _NAME_TAKEN:
        return "another file or folder has that name: choose another name"
    return "check that the path exists and is writable"


def suggest(name: str, choices: Iterable[str]) -> str:
    """Remedy for an unknown name: the closest valid name, or all of them."""
    names = sorted(choices)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"valid: {', '.join(names)}"


def reason(error: BaseException) -> str:
    """Message of an exception as one short line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
