"""Ranks are watched, end with their agent, and receive no signal that is meant for another process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from freescale.launch.local_ranks import LocalRanks, start_forkserver, wait_for_forkserver
from freescale.log import ConsoleHandler, handled_by

AGENT = """
import os, sys, time
from freescale.launch.local_ranks import LocalRanks, start_forkserver

if __name__ == "__main__":
    start_forkserver()
    LocalRanks(["data", "synth", "--users", "100000000", sys.argv[1]], [{"RANK": "0"}, {"RANK": "1"}])
    print("started", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    start_forkserver()
    wait_for_forkserver()


def named(name: str) -> list[int]:
    """Processes of a name that run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text() == f"{name}\n" and "Z" not in (process / "stat").read_text().split()[2]:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def codes(ranks: LocalRanks) -> list[int | None]:
    until = time.monotonic() + 30
    while None in ranks.exit_codes() and time.monotonic() < until:
        time.sleep(0.01)
    return ranks.exit_codes()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An agent whose ranks are named as no others are, and would take hours."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT.replace('"0"', f'"0{os.getpid()}"').replace('"1"', f'"1{os.getpid()}"'))
    agent = subprocess.Popen([sys.executable, script, tmp_path / "data"], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    assert agent.stdout.readline() == "started\n"
    yield agent
    agent.kill()
    agent.wait()
    for rank in ranks_of_the_agent():  # after a failed test
        os.kill(rank, signal.SIGKILL)


def ranks_of_the_agent() -> list[int]:
    return named(f"freescale-r0{os.getpid()}"[:15]) + named(f"freescale-r1{os.getpid()}"[:15])


def test_the_exit_code_of_each_rank_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = LocalRanks(["config", "no-such-recipe"], [{"RANK": str(rank)} for rank in range(3)])
    assert codes(ranks) == [2, 2, 2]
    assert codes(LocalRanks(["--version"], [{"RANK": "0"}])) == [0]


def test_a_killed_rank_is_reported_with_its_signal(tmp_path: Path) -> None:
    ranks = LocalRanks(["data", "synth", "--users", "100000000", str(tmp_path / "data")], [{"RANK": "0"}])
    assert ranks.exit_codes() == [None]
    ranks.signal(signal.SIGTERM)
    assert codes(ranks) == [-signal.SIGTERM]


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path) -> None:
    ranks = LocalRanks(["data", "synth", "--users", "100000000", str(tmp_path / "data")], [{"RANK": "0"}])
    ranks.end()
    assert ranks.exit_codes() == [-signal.SIGKILL]


def test_ranks_end_with_the_agent_that_started_them(running: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 20
    while len(ranks_of_the_agent()) < 2:
        assert time.monotonic() < until, "the ranks are not there"
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    while ranks_of_the_agent():
        assert time.monotonic() < until, "a rank lives on"
        time.sleep(0.01)


def test_restarted_ranks_are_ready_at_once() -> None:
    begin = time.monotonic()
    assert codes(LocalRanks(["--version"], [{"RANK": str(rank)} for rank in range(4)])) == [0, 0, 0, 0]
    assert time.monotonic() - begin < 4, "four that import torch take longer"


def test_a_message_of_every_rank_is_logged_once(capfd: pytest.CaptureFixture[str]) -> None:
    with handled_by(ConsoleHandler()):
        ranks = LocalRanks(["config", "no-such-recipe"], [{"RANK": str(rank)} for rank in range(3)])
        assert codes(ranks) == [2, 2, 2]
        ranks.end()
    assert capfd.readouterr().err.count("error: ") == 1


def test_an_unexpected_exception_is_logged_once_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with handled_by(ConsoleHandler()):
        ranks = LocalRanks(["selftest"], [{"RANK": "no number"}] * 2)
        assert codes(ranks) == [1, 1]
        ranks.end()
    said = capfd.readouterr().err
    assert said.count("Traceback") == said.count("ValueError: ") == 1
    assert "in progress" in said  # the first that reads it
