"""Deferred transfers arrive unchanged, and none of their chunks starts while an urgent transfer is in flight."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from freescale.transport import chunked
from freescale.transport.base import Work
from freescale.transport.c10d import C10d
from freescale.transport.chunked import ChunkedTransport
from freescale.transport.world import clone_group
from tests.support.ranks import Ranks, World

TIMEOUT = 10.0


def lanes(world: World, timeout: float = 60.0) -> tuple[C10d, C10d]:
    """Return the urgent group and a deferred one."""
    assert dist.group.WORLD is not None
    urgent = C10d(dist.group.WORLD, world.store, timeout=timeout)
    return urgent, clone_group(urgent)


def exchange(world: World, seeds: int, chunk_bytes: int) -> bool:
    """Random uneven splits, zeros among them, in chunks of some bytes; every row encodes its sender and receiver."""
    chunked.CHUNK_BYTES["cpu"] = chunk_bytes
    urgent, deferred = lanes(world)
    transport = ChunkedTransport(deferred, urgent=urgent)
    for seed in range(seeds):
        splits = np.random.default_rng(seed).integers(0, 9, (world.ranks, world.ranks)) * (seed % 3)

        def rows(source: int, target: int, counts: np.ndarray = splits) -> torch.Tensor:
            return (torch.arange(counts[source, target] * 3) + 7 * source + 1000 * target).reshape(-1, 3)

        mine = torch.cat([rows(world.rank, target) for target in range(world.ranks)])
        send, receive = splits[world.rank].tolist(), splits[:, world.rank].tolist()
        got = transport.all_to_all(mine, send, receive, name="rows").wait()
        if not torch.equal(got, torch.cat([rows(source, world.rank) for source in range(world.ranks)])):
            return False
    return True


class NullTracer:
    """A tracer that records nothing."""

    def on_wait(self) -> None:
        pass

    def on_complete(self) -> None:
        pass


class CountingC10d(C10d):
    """Urgent transfers that count how often `busy` returns true."""

    def __init__(self, like: C10d) -> None:
        super().__init__(like.group, like.peers.store, timeout=like.timeout)
        self.found_busy = 0

    def busy(self, rate: float = 0.0) -> bool:
        busy = super().busy(rate)
        self.found_busy += busy
        if self.found_busy == 20:
            self.peers.store.set("deferred has had its chance", "1")
        return busy


def yields(world: World, transfer: str) -> list[bool]:
    """Return, on rank 0, whether an urgent transfer was in flight as each chunk of a deferred one began.

    Rank 0 starts an urgent transfer before a given chunk. Rank 1 joins it only after rank 0 has polled it 20 times or
    has started another chunk, so the urgent transfer is in flight long enough to see what rank 0 does.
    """
    chunked.CHUNK_BYTES["cpu"] = 800
    plain, deferred = lanes(world)
    urgent = CountingC10d(plain)
    transport = ChunkedTransport(deferred, urgent=urgent)
    begun: list[bool] = []
    moving: list[Work[torch.Tensor]] = []

    def on_chunk(_name: str, _size: int) -> NullTracer:
        begun.append(C10d.busy(urgent))
        if moving:
            world.store.set("deferred has had its chance", "1")
        elif transfer == "all_to_all" and len(begun) == 2:
            moving.append(urgent.all_reduce(torch.ones(1), name="urgent"))
        return NullTracer()

    def defer() -> None:
        if transfer == "all_reduce":
            transport.all_reduce(torch.ones(4), name="deferred")
        else:
            transport.all_to_all(torch.ones(1000), [500, 500], [500, 500], name="deferred")

    plain.sum(0, name="both are here")
    if world.rank == 0:
        transport.add_tracer(on_chunk)
        if transfer == "all_reduce":
            moving.append(urgent.all_reduce(torch.ones(1), name="urgent"))
        defer()
    else:
        behind = threading.Thread(target=defer)
        behind.start()
        world.store.wait(["deferred has had its chance"], timedelta(seconds=60))
        moving.append(urgent.all_reduce(torch.ones(1), name="urgent"))
        behind.join()
    moving[0].wait()
    return begun


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.close()


@pytest.mark.parametrize("chunk_bytes", [24, 200, 1 << 20])
def test_rows_arrive_in_order_for_any_chunk_size(ranks: Ranks, chunk_bytes: int) -> None:
    assert all(ranks.run(exchange, 6, chunk_bytes))


@pytest.mark.parametrize(("transfer", "chunks"), [("all_to_all", 5), ("all_reduce", 1)])
def test_deferred_traffic_yields_to_urgent_traffic(transfer: str, chunks: int) -> None:
    started = Ranks(2)
    try:
        assert started.run(yields, transfer)[0] == [False] * chunks
    finally:
        started.close()


def seconds_while_urgent_waits(world: World) -> float:
    """Return the seconds of a deferred transfer, while an urgent one of rank 0 waits for rank 1.

    Rank 1 joins the urgent transfer only afterwards. An earlier transfer has measured the rate of the link.
    """
    urgent, deferred = lanes(world, TIMEOUT)
    transport = ChunkedTransport(deferred, urgent=urgent)
    large, halves = torch.ones(1 << 19), [1 << 18, 1 << 18]
    transport.all_to_all(large, halves, halves, name="deferred")
    work = urgent.all_reduce(torch.ones(1), name="urgent") if world.rank == 0 else None
    begin = time.monotonic()
    transport.all_to_all(large, halves, halves, name="deferred")
    seconds = time.monotonic() - begin
    (work or urgent.all_reduce(torch.ones(1), name="urgent")).wait()
    return seconds


def test_a_rank_that_waits_for_a_late_rank_does_not_hold_deferred_traffic_back() -> None:
    started = Ranks(2)
    try:
        assert max(started.run(seconds_while_urgent_waits)) < TIMEOUT
    finally:
        started.close()
