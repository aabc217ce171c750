"""Promise: agents meet at one address and nowhere else."""

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from freescale.errors import UsageError
from freescale.launch.decide import Verdict
from freescale.launch.hosts import Hosts
from freescale.launch.meeting import Meeting
from freescale.transport.world import store_prefix


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


def test_what_was_said_in_earlier_generations_is_forgotten() -> None:
    meeting = Meeting(Hosts(), ranks=1)
    of_ranks = dist.TCPStore(*meeting.address, is_master=False)
    for generation in range(3):
        meeting.come(generation)
        meeting.open(generation, {0: 0}, 1)
        dist.PrefixStore(store_prefix(generation), of_ranks).set("an address", "")
        meeting.conclude(generation, Verdict(None, "so"))
    left = [key.lstrip("/") for key in of_ranks.list_keys()]
    assert not [key for key in left if key.startswith(("0/", "freescale/0/"))]
    assert meeting.concluded(1) == Verdict(None, "so")
    assert meeting.opened(2) is not None
    assert "freescale/1/an address" in left
    meeting.close()


def test_an_address_that_cannot_be_used_is_said() -> None:
    with pytest.raises(UsageError, match="cannot listen at"):
        Meeting(Hosts(address="no such host"), ranks=1)
