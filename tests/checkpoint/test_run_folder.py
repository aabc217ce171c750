"""One process at a time writes into a folder, and the lock of a dead process blocks no other."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from freescale.checkpoint import run_folder
from freescale.checkpoint.run_folder import (
    FACTS,
    LOCK,
    STALE_SECONDS,
    LockHolder,
    RunLock,
    checkpoint_path,
    require_complete,
)
from freescale.errors import StorageError, UsageError

HOLD = """
import sys, time
from pathlib import Path
from freescale.checkpoint import run_folder
run_folder.HEARTBEAT_SECONDS = 0.05
with run_folder.RunLock(Path(sys.argv[1])) as held:
    held.acquire()
    print("held", flush=True)
    time.sleep(30)
"""
RACE = """
import os, sys, time
from pathlib import Path
from freescale.checkpoint.run_folder import RunLock
from freescale.errors import UsageError

folder, at = Path(sys.argv[1]), time.monotonic() + 0.1
children = []
for _ in range(6):
    if child := os.fork():
        children.append(child)
        continue
    with RunLock(folder) as lock:
        time.sleep(max(0.0, at - time.monotonic()))
        try:
            lock.acquire()
            code = 0
        except UsageError:
            code = 1
        (folder / f"tried-{os.getpid()}").touch()
        while len(list(folder.glob("tried-*"))) < 6:  # the lock of a process that has ended is free
            time.sleep(0.01)
        os._exit(code)
print([os.waitpid(child, 0)[1] for child in children].count(0))
"""


def left_by(folder: Path, holder: LockHolder, *, silent_seconds: float = 0.0) -> None:
    """Leave the lock of another holder behind, whose heartbeat stopped so long ago."""
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(json.dumps(asdict(holder)))
    then = time.time() - silent_seconds
    os.utime(folder / LOCK, (then, then))


def test_a_second_writer_is_refused_with_holder_time_and_remedy(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run") as first:
        first.acquire()
        with pytest.raises(UsageError) as refused, RunLock(tmp_path / "run") as second:
            second.acquire()
        holder = json.loads((tmp_path / "run" / LOCK).read_text())
        assert (
            f"process {os.getpid()} on {holder['host']} has written to it since {holder['since']}" in refused.value.what
        )
        assert refused.value.where == str(tmp_path / "run" / LOCK)
        assert "choose another folder" in refused.value.remedy
    assert list((tmp_path / "run").iterdir()) == [], "who was refused took nothing away, and the holder left nothing"
    with RunLock(tmp_path / "run") as third:
        third.acquire()


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A folder whose lock was held by a process that was killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match=f"process {process.pid}"), RunLock(tmp_path) as lock:
        lock.acquire()
    process.send_signal(signal.SIGKILL)
    process.wait()
    return tmp_path


def test_the_lock_of_a_killed_process_is_taken_over_at_once_and_logged(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunLock(killed) as lock:
        lock.acquire()
        assert f"took over the stale lock of {killed} from process" in caplog.text
    assert list(killed.iterdir()) == []


def test_another_process_with_the_pid_of_the_dead_one_is_not_the_holder(tmp_path: Path) -> None:
    left_by(tmp_path, replace(LockHolder.this_process(), start=1))
    with RunLock(tmp_path) as lock:
        lock.acquire()
        assert json.loads((tmp_path / LOCK).read_text())["start"] == LockHolder.this_process().start


def test_a_holder_on_another_host_is_gone_when_its_heartbeat_stops(tmp_path: Path) -> None:
    elsewhere = replace(LockHolder.this_process(), system="another boot", host="node-7", pid=1)
    left_by(tmp_path, elsewhere, silent_seconds=STALE_SECONDS / 2)
    with pytest.raises(UsageError, match="process 1 on node-7"), RunLock(tmp_path) as lock:
        lock.acquire()
    left_by(tmp_path, elsewhere, silent_seconds=STALE_SECONDS + 1)
    with RunLock(tmp_path) as lock:
        lock.acquire()


def test_a_command_that_waits_takes_over_when_no_heartbeat_comes_and_is_refused_when_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = replace(LockHolder.this_process(), system="another boot", host="node-7", pid=1)
    monkeypatch.setattr(run_folder, "_POLL_SECONDS", 0.05)
    left_by(tmp_path, elsewhere, silent_seconds=STALE_SECONDS - 0.5)
    began = time.monotonic()
    with RunLock(tmp_path, waits=True) as lock:
        lock.acquire()
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert time.monotonic() - began > 0.4
    left_by(tmp_path, elsewhere, silent_seconds=STALE_SECONDS / 2)
    renewed = threading.Timer(0.3, os.utime, [tmp_path / LOCK])
    renewed.start()
    with pytest.raises(UsageError, match="process 1 on node-7"), RunLock(tmp_path, waits=True) as lock:
        lock.acquire()
    assert renewed.finished.is_set()
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "node-7"


def test_a_restarted_rank_zero_takes_over_the_lock_of_its_elastic_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by(tmp_path, replace(LockHolder.this_process(), system="another boot", job="job-5"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-5")
    with pytest.raises(UsageError), RunLock(tmp_path) as lock:
        lock.acquire()  # started, not restarted: a second job of this name
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with RunLock(tmp_path) as lock:
        lock.acquire()


def test_an_incomplete_lock_is_stale_after_a_while(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    with pytest.raises(UsageError, match="its lock names no holder"), RunLock(tmp_path) as lock:
        lock.acquire()
    long_ago = time.time() - STALE_SECONDS - 1
    os.utime(tmp_path / LOCK, (long_ago, long_ago))
    with RunLock(tmp_path) as lock:
        lock.acquire()


def test_exactly_one_of_several_processes_takes_over_a_stale_lock(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / str(number)
        left_by(folder, replace(LockHolder.this_process(), start=1))
        command = [sys.executable, "-c", RACE, folder]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert ended.stdout == "1\n"


def test_a_heartbeat_is_renewed_and_a_removed_lock_is_created_again(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        os.utime(tmp_path / LOCK, (0, 0))
        wait_until(lambda: (tmp_path / LOCK).stat().st_mtime > 0)
        (tmp_path / LOCK).unlink()
        wait_until((tmp_path / LOCK).exists)
    finally:
        process.kill()
        process.wait()


def test_a_holder_without_heartbeat_ends_when_another_has_its_lock(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    os.kill(process.pid, signal.SIGSTOP)
    left_by(tmp_path, replace(LockHolder.this_process(), host="node-7"))
    os.kill(process.pid, signal.SIGCONT)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == UsageError.exit_code
    assert "on node-7 took over its lock" in said
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "node-7"


def test_a_run_that_ends_leaves_the_lock_of_the_one_that_took_over(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        lock.acquire()
        left_by(tmp_path, replace(LockHolder.this_process(), host="node-7"))
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "node-7"


def test_the_newest_complete_checkpoint_is_used(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        checkpoint_path(tmp_path / "checkpoints", step).mkdir(parents=True)
    with pytest.raises(UsageError, match="no complete checkpoint"):
        require_complete(tmp_path)
    for step in (9, 10):
        (checkpoint_path(tmp_path / "checkpoints", step) / FACTS).touch()
    assert require_complete(tmp_path) == checkpoint_path(tmp_path / "checkpoints", 10)


def test_a_folder_that_cannot_be_created_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError) as refused, RunLock(tmp_path / "file" / "run") as lock:
        lock.acquire()
    assert refused.value.where == str(tmp_path / "file" / "run")
    assert refused.value.exit_code == 7


def wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)
