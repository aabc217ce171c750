"""Agents find each other at one address, and the store listens on no other."""

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from freescale.errors import UsageError
from freescale.launch import Hosts
from freescale.launch.rendezvous import Rendezvous
from freescale.launch.restart_decision import RestartDecision
from freescale.transport.world import store_prefix


def listening(port: int) -> set[str]:
    """Addresses with a listener at a port of this machine, as the kernel reports them."""
    lines = [*Path("/proc/net/tcp").read_text().splitlines()[1:], *Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    places = [line.split()[1:4:2] for line in lines]
    hosts = {place.split(":")[0] for place, state in places if state == "0A" and int(place.split(":")[1], 16) == port}
    return {socket.inet_ntoa(bytes.fromhex(host)[::-1]) if len(host) == 8 else host for host in hosts}


def test_the_store_listens_on_the_given_address_alone() -> None:
    rendezvous = Rendezvous(Hosts(address="127.0.0.2"), nproc=2)
    assert rendezvous.serves
    assert listening(rendezvous.address[1]) == {"127.0.0.2"}
    assert rendezvous.interface() == "lo"
    rendezvous.close()
    assert not listening(rendezvous.address[1])


def test_the_first_agent_serves_and_others_find_it() -> None:
    first = Rendezvous(Hosts(1, 2), nproc=2)
    second = Rendezvous(Hosts(1, 2, *first.address), nproc=3)
    assert (first.serves, second.serves) == (True, False)
    for agent in (first, second):
        agent.heartbeat()
    assert first.alive_agents() == [0, 1]
    second.join(0)
    assert first.joined_agents(0, first.alive_agents()) == {1: 3}
    assert second.read_ranks(0) is None
    first.publish_ranks(0, {0: 0, 1: 2}, 5)
    assert second.read_ranks(0) == ({0: 0, 1: 2}, 5)
    second.report_exit_codes(0, [None, 0, -9])
    assert first.exit_codes(0, {0: 0, 1: 2}) == {0: [None], 1: [None, 0, -9]}
    first.publish_decision(0, RestartDecision(None, "so", lost_at=1.5))
    assert second.read_decision(0) == RestartDecision(None, "so", lost_at=1.5)
    second.close()
    first.close()


def test_keys_of_earlier_restarts_are_deleted() -> None:
    rendezvous = Rendezvous(Hosts(), nproc=1)
    of_ranks = dist.TCPStore(*rendezvous.address, is_master=False)
    for restart in range(3):
        rendezvous.join(restart)
        rendezvous.publish_ranks(restart, {0: 0}, 1)
        dist.PrefixStore(store_prefix(restart), of_ranks).set("an address", "")
        rendezvous.publish_decision(restart, RestartDecision(None, "so"))
    left = [key.lstrip("/") for key in of_ranks.list_keys()]
    assert not [key for key in left if key.startswith(("0/", "freescale/0/"))]
    assert rendezvous.read_decision(1) == RestartDecision(None, "so")
    assert rendezvous.read_ranks(2) is not None
    assert "freescale/1/an address" in left
    rendezvous.close()


def test_an_address_that_cannot_be_used_is_an_error() -> None:
    with pytest.raises(UsageError, match="cannot listen at"):
        Rendezvous(Hosts(address="no such host"), nproc=1)
