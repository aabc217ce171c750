"""One writer per folder, also on file systems that several hosts share, where `flock` may be of no effect.

    RUN/run.lock            who writes here: JSON, created exclusively, its modification time the holder's heartbeat
    RUN/run.lock.TOKEN      for a moment: somebody removes the stale lock that has this token

A lock is stale if its holder ran on this host and is gone, or if it ran elsewhere and its heartbeat stopped. The age of
a heartbeat is the difference of two modification times, so that the clocks of hosts do not matter. Imports no torch.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from freescale.errors import UsageError, storage_errors
from freescale.log import logger, warning_once

NAME = "run.lock"
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
"""Without a heartbeat for so long, a holder on another host is taken to be gone."""
_ATTEMPTS, _WAIT_SECONDS = 20, 0.05


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    token: str
    host: str
    """Its name, for the reader."""
    system: str
    """The boot and the process namespace: where these are equal, `pid` means the same process."""
    pid: int
    start: int
    """Of the process, in ticks since the boot: tells it from a later one with the same number."""
    since: str
    job: str = ""
    """The elastic job it is part of, whose restarted ranks may take the lock over."""

    @staticmethod
    def this_process() -> "Holder":
        """Describe the process that asks."""
        pid = os.getpid()
        return Holder(
            token=secrets.token_hex(8),
            host=platform.node(),
            system=_system(),
            pid=pid,
            start=_start_of(pid),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            job=_job(),
        )

    def is_gone(self, *, silent_seconds: float, asker: "Holder") -> bool:
        """Whether nobody stands behind a lock any more, as the process that asks for it sees it."""
        if self.system == asker.system:
            return not _runs(self.pid, self.start)
        return silent_seconds > STALE_SECONDS or (is_restart() and self.job == asker.job != "")


_NOBODY = Holder(token="unreadable", host="an unknown host", system="", pid=0, start=0, since="")
"""Of a lock whose holder ended before it could write its name."""


class RunLock:
    """The right to write into a folder, from `acquire` to the end of the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / NAME
        self._mine = Holder.this_process()
        self._released = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._heart is None:
            return
        self._released.set()
        self._heart.join()
        with contextlib.suppress(OSError):  # what cannot be removed is stale as soon as this process has ended
            if _read(self._path) == self._mine:
                self._path.unlink()

    def acquire(self) -> None:
        """Make the folder if need be and take its lock, also from a holder that is gone. UsageError if it is not."""
        with storage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                if _created(self._path, self._mine):
                    break
                self._remove_if_stale()
            else:
                raise self._refusal("its lock does not say who holds it", self._path)
        self._heart = threading.Thread(target=self._beat, name="freescale-lock", daemon=True)
        self._heart.start()

    def _remove_if_stale(self) -> None:
        """Remove a lock whose holder is gone.

        Of all processes that see it, only the one that creates the marker of its token may remove it, and only if it
        is still there then: a lock that was created meanwhile has another token.
        """
        holder = self._stale()
        if holder is None:
            return
        marker = self._path.with_name(f"{NAME}.{holder.token}")
        if not _created(marker, self._mine):
            raise self._refusal("another process is taking over its stale lock", marker)
        try:
            if self._stale() == holder:
                self._path.unlink()
                warning_once(f"took over the stale lock of {self._folder} from process {holder.pid} on {holder.host}")
        finally:
            marker.unlink()

    def _stale(self) -> Holder | None:
        """The holder of a stale lock, or None if the lock has just gone or come. UsageError if its holder lives."""
        holder, silent_seconds = _read(self._path), _age(self._path, self._folder)
        if holder is None:
            time.sleep(_WAIT_SECONDS)  # somebody created it and is about to write
            return _NOBODY if silent_seconds > STALE_SECONDS else None
        if holder.is_gone(silent_seconds=silent_seconds, asker=self._mine):
            return holder
        raise self._refusal(f"process {holder.pid} on {holder.host} writes to it since {holder.since}", self._path)

    def _refusal(self, what: str, path: Path) -> UsageError:
        remedy = "choose another folder, or wait until that process has ended; if it is gone, remove this file"
        return UsageError(f"{self._folder} is in use: {what}", where=str(path), remedy=remedy)

    def _beat(self) -> None:
        """Renew the heartbeat. If another process holds the lock, this one was silent for too long and must end."""
        while not self._released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a file system that does not answer now may answer the next beat
                found = None if _created(self._path, self._mine) else _read(self._path)
                if found is not None and found != self._mine:
                    logger.error(
                        "%s", self._refusal(f"process {found.pid} on {found.host} took over its lock", self._path)
                    )
                    os._exit(UsageError.exit_code)
                os.utime(self._path)


def is_restart() -> bool:
    """Whether a launcher has started the ranks of this command before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _created(path: Path, holder: Holder) -> bool:
    """Whether this process made the file. Creating exclusively is atomic on network file systems too."""
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(asdict(holder), file)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> Holder | None:
    """Who holds a lock; None if the file is not there or not whole."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _age(path: Path, folder: Path) -> float:
    """Seconds since the last heartbeat, by the clock of the file system; 0 if the file is gone."""
    probe = folder / f"{NAME}.{secrets.token_hex(8)}"
    probe.touch(exist_ok=False)
    try:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # opened: attributes may be cached
            return probe.stat().st_mtime - os.fstat(file.fileno()).st_mtime
        return 0.0
    finally:
        probe.unlink()


def _runs(pid: int, start: int) -> bool:
    """Whether a process of this host lives, and not another one that was given its number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _start_of(pid) in (start, 0)


def _start_of(pid: int) -> int:
    """When a process began; 0 where the system does not say, -1 of a process that has ended."""
    try:
        state, *_, start = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[:20]
    except (OSError, ValueError):
        return 0
    return -1 if state == "Z" else int(start)


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _job() -> str:
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else name
