"""Promise: agents meet at one address and nowhere else; a rank ends with the agent that started it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freescale.errors import UsageError
from freescale.launch.decide import Verdict
from freescale.launch.hosts import Hosts
from freescale.launch.meeting import Meeting


def listening(port: int) -> set[str]:
    """Addresses at which somebody on this machine listens at a port, as the kernel writes them."""
    lines = [*Path("/proc/net/tcp").read_text().splitlines()[1:], *Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    places = [line.split()[1:4:2] for line in lines]
    hosts = {place.split(":")[0] for place, state in places if state == "0A" and int(place.split(":")[1], 16) == port}
    return {socket.inet_ntoa(bytes.fromhex(host)[::-1]) if len(host) == 8 else host for host in hosts}


def test_the_store_listens_at_the_chosen_address_alone() -> None:
    meeting = Meeting(Hosts(address="127.0.0.2"), ranks=2)
    assert meeting.serves
    assert listening(meeting.address[1]) == {"127.0.0.2"}
    assert meeting.interface() == "lo"
    meeting.close()
    assert not listening(meeting.address[1])


def test_the_first_agent_serves_and_others_find_it() -> None:
    first = Meeting(Hosts(1, 2), ranks=2)
    second = Meeting(Hosts(1, 2, *first.address), ranks=3)
    assert (first.serves, second.serves) == (True, False)
    for agent in (first, second):
        agent.beat()
    assert first.alive() == [0, 1]
    second.come(0)
    assert first.here(0, first.alive()) == {1: 3}
    assert second.opened(0) is None
    first.open(0, {0: 0, 1: 2}, 5)
    assert second.opened(0) == ({0: 0, 1: 2}, 5)
    second.report(0, [None, 0, -9])
    assert first.reported(0, {0: 0, 1: 2}) == {0: [None], 1: [None, 0, -9]}
    first.conclude(0, Verdict(None, "so", lost_at=1.5))
    assert second.concluded(0) == Verdict(None, "so", lost_at=1.5)
    second.close()
    first.close()


def test_an_address_that_cannot_be_used_is_said() -> None:
    with pytest.raises(UsageError, match="cannot listen at"):
        Meeting(Hosts(address="no such host"), ranks=1)


def test_a_rank_ends_with_the_agent_that_started_it() -> None:
    child = "from freescale.launch.ranks import end_with_parent; end_with_parent(); print('up', flush=True); input()"
    agent = (
        "import os, sys, subprocess, time;"
        f"one = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE,"
        " env={**os.environ, 'FREESCALE_AGENT': str(os.getpid())});"
        "one.stdout.readline(); print(one.pid, flush=True); time.sleep(60)"
    )
    running = subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    rank = int(running.stdout.readline())
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    until = time.monotonic() + 10
    while Path(f"/proc/{rank}").exists() and "Z" not in Path(f"/proc/{rank}/stat").read_text():
        assert time.monotonic() < until, "the rank lives on"
        time.sleep(0.05)
