"""The folder of a run without torch: which checkpoints it holds, and the lock that allows one writer.

    RUN/checkpoints/step-N  see `checkpoint.checkpoints`
    RUN/run.lock            the holder as JSON, created exclusively; its modification time is the holder's heartbeat
    RUN/run.lock.TOKEN      for a moment: a process removes the stale lock with this token

The lock also works on file systems that several hosts share, where `flock` may have no effect. It is stale if its
holder ran on this host and is gone, or if it ran elsewhere and its heartbeat stopped. The age of a heartbeat is the
difference of two modification times, so the clocks of hosts do not matter.
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

FACTS = "facts.json"
LOCK = "run.lock"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
"""Age of a heartbeat from which a holder on another host counts as gone."""
_ATTEMPTS, _WAIT_SECONDS, _POLL_SECONDS = 20, 0.05, 0.5


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if not path.suffix and (path / FACTS).exists())


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.split("-")[1])


def require_complete(run: Path) -> Path:
    """Return the newest complete checkpoint of a run, or raise UsageError."""
    if complete := complete_checkpoints(run / "checkpoints"):
        return complete[-1]
    raise UsageError("the run has no complete checkpoint", where=str(run), remedy="let it train until it saves one")


def require_start(run: Path, newest: Path | None, *, resume: bool, autoresume: bool) -> None:
    """Refuse to overwrite an earlier run, and to resume without a checkpoint. With `autoresume` both are right."""
    if autoresume:
        return
    if newest is not None and not resume:
        remedy = "add --resume, or choose another --out"
        raise UsageError(f"there is a run in {run} already", where=str(newest), remedy=remedy)
    if newest is None and resume:
        raise UsageError(f"there is no complete checkpoint in {run} to resume", remedy="leave out --resume")


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock."""

    token: str
    host: str
    """Its name, for messages."""
    system: str
    """Boot and process namespace: where these are equal, `pid` means the same process."""
    pid: int
    start: int
    """Start of the process in ticks since the boot: distinguishes it from a later one with the same pid."""
    since: str
    job: str = ""
    """Its elastic job, whose restarted ranks may take over the lock."""

    @staticmethod
    def this_process() -> "LockHolder":
        """Describe this process."""
        pid = os.getpid()
        return LockHolder(
            token=secrets.token_hex(8),
            host=platform.node(),
            system=_system(),
            pid=pid,
            start=_start_of(pid),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            job=_job(),
        )

    def is_gone(self, *, silent_seconds: float, asker: "LockHolder") -> bool:
        """Return whether the holder is gone, as seen by the process that asks for the lock."""
        if self.system == asker.system:
            return not _runs(self.pid, self.start)
        return silent_seconds > STALE_SECONDS or (is_restart() and self.job == asker.job != "")


_UNKNOWN_HOLDER = LockHolder(token="unreadable", host="an unknown host", system="", pid=0, start=0, since="")
"""Holder of a lock that was created and never written."""


class RunLock:
    """The right to write into a folder, from `acquire` to the end of the `with` block.

    `waits`: a holder on another host is refused only when its heartbeat was seen. A cluster may start a command again
    on another host before the lock of a killed process is stale.
    """

    def __init__(self, folder: Path, *, waits: bool = False) -> None:
        self._folder, self._path, self._waits = folder, folder / LOCK, waits
        self._holder = LockHolder.this_process()
        self._released = threading.Event()
        self._heartbeat: threading.Thread | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._heartbeat is None:
            return
        self._released.set()
        self._heartbeat.join()
        with contextlib.suppress(OSError):  # a lock that cannot be removed is stale once this process has ended
            if _read(self._path) == self._holder:
                self._path.unlink()

    def acquire(self) -> None:
        """Create the folder and take its lock, also from a holder that is gone. UsageError if the holder lives."""
        with storage_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for _ in range(_ATTEMPTS):
                if _create(self._path, self._holder):
                    break
                self._remove_if_stale()
            else:
                raise self._refusal("its lock names no holder", self._path)
        self._heartbeat = threading.Thread(target=self._keep_alive, name="freescale-lock", daemon=True)
        self._heartbeat.start()

    def _remove_if_stale(self) -> None:
        """Remove a lock whose holder is gone.

        Only the process that creates the marker of the lock's token may remove the lock, and only if it still exists
        then: a lock that was created meanwhile has another token.
        """
        holder = self._find_stale()
        if holder is None:
            return
        marker = self._path.with_name(f"{LOCK}.{holder.token}")
        if not _create(marker, self._holder):
            raise self._refusal("another process is taking over its stale lock", marker)
        try:
            if self._find_stale() == holder:
                self._path.unlink()
                warning_once(f"took over the stale lock of {self._folder} from process {holder.pid} on {holder.host}")
        finally:
            marker.unlink()

    def _find_stale(self) -> LockHolder | None:
        """Return the holder of a stale lock, or None if the lock was just removed or created. Raises if it lives."""
        holder, silent_seconds = _read(self._path), _age(self._path, self._folder)
        if self._waits and holder is not None and holder.system != self._holder.system:
            holder, silent_seconds = self._wait_for_heartbeat(holder, silent_seconds)
        if holder is None:
            time.sleep(_WAIT_SECONDS)  # its creator is about to write
            return _UNKNOWN_HOLDER if silent_seconds > STALE_SECONDS else None
        if holder.is_gone(silent_seconds=silent_seconds, asker=self._holder):
            return holder
        raise self._refusal(f"process {holder.pid} on {holder.host} has written to it since {holder.since}", self._path)

    def _wait_for_heartbeat(self, holder: LockHolder, before: float) -> tuple[LockHolder | None, float]:
        """Return the holder and the age of its heartbeat once it is renewed or stale, or the holder is another."""
        logger.info(
            "waiting for the lock of process %d on %s: up to %.0f s without a heartbeat",
            holder.pid,
            holder.host,
            max(0.0, STALE_SECONDS - before),
        )
        while True:
            other, age = _read(self._path), _age(self._path, self._folder)
            if other != holder or age < before or age > STALE_SECONDS:
                return other, age
            before = age
            time.sleep(_POLL_SECONDS)

    def _refusal(self, what: str, path: Path) -> UsageError:
        remedy = "choose another folder, or wait until that process has ended; if it is gone, remove this file"
        return UsageError(f"{self._folder} is in use: {what}", where=str(path), remedy=remedy)

    def _keep_alive(self) -> None:
        """Renew the heartbeat. If another process holds the lock, this one missed too many and must end."""
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # the file system may answer the next heartbeat
                other = None if _create(self._path, self._holder) else _read(self._path)
                if other is not None and other != self._holder:
                    logger.error(
                        "%s", self._refusal(f"process {other.pid} on {other.host} took over its lock", self._path)
                    )
                    os._exit(UsageError.exit_code)
                os.utime(self._path)


def is_restart() -> bool:
    """Return whether a launcher has restarted the ranks of this command."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _create(path: Path, holder: LockHolder) -> bool:
    """Create the file and return whether it was new. Exclusive creation is atomic on network file systems too."""
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(asdict(holder), file)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> LockHolder | None:
    """Return the holder of a lock; None if the file is missing or incomplete."""
    try:
        return LockHolder(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _age(path: Path, folder: Path) -> float:
    """Return the seconds since the last heartbeat, by the clock of the file system; 0 if the file is gone."""
    probe = folder / f"{LOCK}.{secrets.token_hex(8)}"
    probe.touch(exist_ok=False)
    try:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # opened: attributes may be cached
            return probe.stat().st_mtime - os.fstat(file.fileno()).st_mtime
        return 0.0
    finally:
        probe.unlink()


def _runs(pid: int, start: int) -> bool:
    """Return whether a process of this host lives, rather than another one with the same pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _start_of(pid) in (start, 0)


def _start_of(pid: int) -> int:
    """Return the start of a process; 0 if unknown, -1 if it has ended."""
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
