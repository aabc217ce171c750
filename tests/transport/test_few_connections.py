"""Pairs of ranks that connect when they first send deliver the same, and a rank lost before that is named in time."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from freescale.connections import EAGER_RANKS, GlooWire, TreeCollectives, connects_on_demand, few_connections
from freescale.errors import TransportError
from freescale.transport.c10d import C10d
from freescale.transport.host_layout import HostLayout
from freescale.transport.pairwise import PairwiseC10d
from freescale.transport.shared_memory import SharedMemory, SharedMemoryTransport
from freescale.transport.two_level import TwoLevelTransport
from freescale.transport.world import clone_group
from tests.support.ranks import Ranks, World

TIMEOUT = 4.0
LAZY = "TORCH_GLOO_LAZY_INIT"


def held() -> int:
    """Return the sockets of this process."""
    return sum(os.readlink(f"/proc/self/fd/{name}").startswith("socket:") for name in _descriptors())


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            yield name


def whole(world: World, timeout: float = 60.0) -> C10d:
    assert dist.group.WORLD is not None
    return C10d(dist.group.WORLD, world.store, timeout=timeout)


def sockets_of_a_group(world: World, lazy: str) -> list[int]:
    """Return how many sockets a group adds: when created, after a tree, after an all-to-all."""
    os.environ[LAZY] = lazy
    try:
        before, counts = held(), list[int]()
        group = clone_group(whole(world))
        used = [
            lambda: None,
            lambda: TreeCollectives(GlooWire(group.group)).all_gather(torch.tensor(world.rank)),
            lambda: group.all_to_all(torch.arange(4), [1] * 4, [1] * 4, name="rows").wait(),
        ]
        for use in used:
            use()
            whole(world).sum(0, name="barrier")
            counts.append(held() - before)
            whole(world).sum(0, name="barrier")  # before others connect for the next one
        return [count - counts[0] + (3 if lazy == "0" else 2) for count in counts]
    finally:
        del os.environ[LAZY]


def test_pairs_connect_when_they_first_send(groups: dict[int, Ranks]) -> None:
    at_once = groups[4].run(sockets_of_a_group, "0")
    on_demand = groups[4].run(sockets_of_a_group, "1")
    assert at_once == [[3, 3, 3]] * 4
    assert on_demand == [[2, 3, 3], [2, 2, 3], [2, 3, 3], [2, 2, 3]], "a ring, then 0-2 of the tree, then all pairs"


def exchanged(world: World) -> bool:
    """Exchange rows in two levels, in a group that connects on demand; return whether they are those of gloo."""
    os.environ[LAZY] = "1"
    try:
        group = PairwiseC10d(clone_group(whole(world)))
        layout = HostLayout.of([0, 0, 1, 1])
        memory = SharedMemory(group.peers, layout.ranks[world.rank // 2], name="few connections", timeout=60.0)
        near = SharedMemoryTransport(memory, group, within_host=True)
        relayed = TwoLevelTransport(layout, near, group, connect=group.connect)
        rows, counts, same = torch.arange(10) + 100 * world.rank, [1, 2, 3, 4], []
        receive = [counts[world.rank]] * 4
        for turn in (0, 1):
            got = relayed.rotated(turn).all_to_all(rows, counts, receive, name="rows").wait()
            same.append(torch.equal(got, whole(world).all_to_all(rows, counts, receive, name="rows").wait()))
        return all(same) and len(group._connected) == 1
    finally:
        del os.environ[LAZY]


def test_two_levels_connect_the_pairs_that_lead_and_deliver_the_same(groups: dict[int, Ranks]) -> None:
    assert groups[4].run(exchanged) == [True] * 4


def fail_while_others_open_a_group(world: World) -> str:
    """Rank 0 fails while the others wait for it in the store. Return the error of rank 0."""
    group = whole(world, TIMEOUT * 5)
    if world.rank:
        clone_group(group)
        return "opened"
    time.sleep(1.0)
    try:
        with group.peers.guard("rows"):
            raise RuntimeError("the link is down")
    except TransportError as error:
        return str(error)


def test_ranks_that_open_a_group_notice_that_another_has_given_up() -> None:
    started = Ranks(3)
    try:
        started.send(fail_while_others_open_a_group)
        assert "every rank answers" in started.result(0), "the others wait in the store, and answer meanwhile"
        for process in started.processes[1:]:
            process.join(20)
            assert process.exitcode == TransportError.exit_code
    finally:
        started.close()


def nothing(_: World) -> None:
    """Start up."""


def send_to_all(world: World) -> tuple[float, str]:
    begin = time.monotonic()
    try:
        whole(world, TIMEOUT).all_to_all(torch.zeros(3), [1] * 3, [1] * 3, name="first rows").wait()
    except TransportError as error:
        return time.monotonic() - begin, str(error)
    return time.monotonic() - begin, "arrived"


def connect_to_all(world: World) -> str:
    try:
        PairwiseC10d(whole(world, TIMEOUT)).connect(range(3))
    except TransportError as error:
        return str(error)
    return "connected"


def test_a_rank_that_is_lost_before_its_first_message_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAZY, "1")
    started = Ranks(3)
    try:
        started.run(nothing)
        pid = started.processes[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        started.processes[1].join(10)
        started._pipes = [started._pipes[0], started._pipes[2]]
        for seconds, text in started.run(send_to_all):
            assert "first rows failed" in text
            assert "ranks that do not answer: 1" in text
            assert seconds < TIMEOUT + 6.0
        started.send(connect_to_all)
        for place, process in enumerate((started.processes[0], started.processes[2])):
            try:  # a call of gloo that would not return for minutes
                assert "ranks that do not answer: 1" in started.result(place, TIMEOUT + 20.0)
            except EOFError:
                process.join(10)
                assert process.exitcode == TransportError.exit_code
    finally:
        started.close()


def test_few_ranks_connect_at_once_and_many_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAZY, raising=False)
    assert [connects_on_demand(ranks) for ranks in (2, EAGER_RANKS, EAGER_RANKS + 1)] == [False, False, True]
    with few_connections(EAGER_RANKS + 1):
        assert os.environ[LAZY] == "1"
    assert LAZY not in os.environ
    monkeypatch.setenv(LAZY, "0")
    assert not connects_on_demand(1000)
