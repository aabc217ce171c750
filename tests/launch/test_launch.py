"""A process starts ranks or is one as its launcher says, holds the lock if it must, and can be interrupted early."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from freescale.checkpoint.run_folder import LOCK, RunLock
from freescale.errors import TransportError, UsageError
from freescale.launch import AGENT, Hosts
from freescale.launch.agent import Agent
from freescale.launch.launcher import launch_ranks
from freescale.launch.rendezvous import Rendezvous
from freescale.launch.restart_decision import RestartDecision

WORDS = ["--version"]
SAVING = """
import signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(1)
    Path(sys.argv[1]).touch()
    sys.exit(130)

signal.signal(signal.SIGTERM, save)
print("trains", flush=True)
time.sleep(60)
"""


def test_a_slurm_task_is_a_rank_unless_the_command_names_a_rendezvous(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-4]")
    with RunLock(tmp_path) as lock:
        assert launch_ranks(WORDS, nproc=8, lock=lock) is None
        assert not (tmp_path / LOCK).exists(), "rank 1 writes no run"
        assert launch_ranks(WORDS, nproc=2, hosts=Hosts(), lock=lock) == 0, "the ranks that it started have ended"
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid(), "the agent that serves the store has it"


def test_rank_zero_of_another_launcher_holds_the_lock_and_ranks_of_ours_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rank, agent, holds in (("0", None, True), ("1", None, False), ("0", "7", False)):
        monkeypatch.setenv("RANK", rank)
        if agent is not None:
            monkeypatch.setenv(AGENT, agent)
        with RunLock(tmp_path) as lock:
            assert launch_ranks(WORDS, nproc=1, lock=lock) is None
            assert (tmp_path / LOCK).exists() == holds


def test_counts_that_start_no_rank_are_refused() -> None:
    for ranks, restarts in ((0, 0), (-1, 0), (-1, 3), (1, -1)):
        with pytest.raises(UsageError, match="--nproc" if ranks < 1 else "--restarts"):
            launch_ranks(WORDS, nproc=ranks, restarts=restarts)


def test_environment_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    launch_ranks(WORDS, nproc=1)
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    launch_ranks(WORDS, nproc=1)
    assert os.environ["GOMP_SPINCOUNT"] == "77"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    launch_ranks(WORDS, nproc=1)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    launch_ranks(WORDS, nproc=1)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def of_session(leader: int) -> dict[int, str]:
    """Processes of a session that run, and their names."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if rest.split()[3] == str(leader) and rest.split()[0] != "Z":
            found[int(process.name)] = name
    return found


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["the fork server has begun", "it imports torch"])
def test_a_command_interrupted_before_its_ranks_exist_ends_and_leaves_no_process(
    kind: signal.Signals, moment: str
) -> None:
    command = [sys.executable, "-m", "freescale", "selftest", "--nproc", "2"]
    running = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (others := set(of_session(running.pid).items()) - {(running.pid, "python")}) or (
        moment == "it imports torch" and "freescale-fork" not in {name for _, name in others}
    ):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(running.pid, kind)
    said = running.communicate(timeout=20)[1]
    assert running.returncode == 130, said
    assert said.splitlines()[-1] == "interrupted", said  # after a line of progress, if the machine is slow
    until = time.monotonic() + 3
    while of_session(running.pid):
        assert time.monotonic() < until, of_session(running.pid)
        time.sleep(0.01)


class SlowToSave:
    """Stands for `LocalRanks`: one rank that is asked to end while it trains, and takes a second to save."""

    def __init__(self, words: Sequence[str], _environments: object) -> None:
        self._rank = subprocess.Popen([sys.executable, "-c", SAVING, *words], stdout=subprocess.PIPE, text=True)
        assert self._rank.stdout is not None
        assert self._rank.stdout.readline() == "trains\n"
        signal.raise_signal(signal.SIGTERM)

    def exit_codes(self) -> list[int | None]:
        return [self._rank.poll()]

    def signal(self, kind: signal.Signals) -> None:
        self._rank.send_signal(kind)

    def end(self) -> None:
        self._rank.kill()
        self._rank.wait()


def test_ranks_that_are_asked_to_end_get_time_to_save(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("freescale.launch.agent.LocalRanks", SlowToSave)
    rendezvous = Rendezvous(Hosts(), nproc=1)
    assert Agent(rendezvous, [str(tmp_path / "saved")], nproc=1, restarts=0).run() == 130
    rendezvous.close()
    assert (tmp_path / "saved").exists()


def test_an_interrupt_that_an_import_swallows_still_ends_the_command() -> None:
    from freescale.launch.launcher import _no_interrupt_lost

    for kind in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt), _no_interrupt_lost(), contextlib.suppress(BaseException):
            signal.raise_signal(kind)


def test_an_interrupt_inside_exec_of_a_string_exits_with_130(tmp_path: Path) -> None:
    code = """import freescale.cli.main as command
command._dispatch = lambda words: exec("raise KeyboardInterrupt")
raise SystemExit(command.main([]))"""
    (tmp_path / "interrupted_command.py").write_text(code)
    command = [sys.executable, "-m", "interrupted_command"]
    ended = subprocess.run(command, cwd=tmp_path, stderr=subprocess.DEVNULL, timeout=60, check=False)
    assert ended.returncode == 130


def test_a_host_joins_after_any_number_of_restarts() -> None:
    serving = Rendezvous(Hosts(1, 2), nproc=1)
    for restart in range(4):
        serving.publish_ranks(restart, {serving.id: 0}, 1)
    joining = Rendezvous(Hosts(1, 2, *serving.address), nproc=1)

    def decide_for_both() -> None:
        until = time.monotonic() + 20
        while not serving.joined_agents(3, [joining.id]) and time.monotonic() < until:
            time.sleep(0.01)
        serving.publish_decision(3, RestartDecision(None, "other hosts join"))
        serving.publish_ranks(4, {serving.id: 0, joining.id: 1}, 2)
        while serving.exit_codes(4, {joining.id: 1})[joining.id] != [0] and time.monotonic() < until:
            time.sleep(0.01)
        serving.publish_decision(4, RestartDecision(0))
        if time.monotonic() > until:  # for one that waits for the first start
            serving.publish_ranks(0, {serving.id: 0}, 1)
            serving.publish_decision(0, RestartDecision(TransportError.exit_code))

    deciding = threading.Thread(target=decide_for_both)
    deciding.start()
    assert Agent(joining, WORDS, nproc=1, restarts=0).run() == 0
    deciding.join()
    joining.close()
    serving.close()


def test_waiting_for_the_store_of_another_host_can_be_interrupted() -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with socket.socket() as bound:  # and not listening: the address is taken, and nobody serves there
        bound.bind(("127.0.0.1", 0))
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                Rendezvous(Hosts(2, 2, *bound.getsockname()), 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
