"""Promise: what is deferred arrives as it was sent, in pieces, and none begins while something urgent is under way."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from freescale.transport import chunked as pieces
from freescale.transport.c10d import C10d
from freescale.transport.chunked import ChunkedTransport
from freescale.transport.world import clone_group
from tests.support.ranks import Ranks, World


def lanes(world: World) -> tuple[C10d, C10d]:
    """What is urgent, and another group for what is not."""
    assert dist.group.WORLD is not None
    urgent = C10d(dist.group.WORLD, world.store, timeout=60.0)
    return urgent, clone_group(urgent)


def exchange(world: World, seeds: int, piece_bytes: int) -> bool:
    """Random uneven splits, zeros among them, in pieces of some bytes; every row says who sent it, and to whom."""
    pieces.CHUNK_BYTES["cpu"] = piece_bytes
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


def paused(world: World) -> tuple[float, float]:
    """When something urgent ended that one rank was late for, and when something deferred did that began meanwhile."""
    urgent, deferred = lanes(world)
    transport = ChunkedTransport(deferred, urgent=urgent)
    ones = torch.ones(4)
    if world.rank == 1:
        time.sleep(0.3)
    handle = urgent.all_reduce(torch.ones(1), name="urgent")
    transport.all_to_all(ones, [2, 2], [2, 2], name="deferred")
    ended = time.monotonic()
    busy = urgent.busy()
    handle.wait()
    return float(busy), ended


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.close()


@pytest.mark.parametrize("piece_bytes", [24, 200, 1 << 20])
def test_rows_arrive_in_order_whatever_the_pieces(ranks: Ranks, piece_bytes: int) -> None:
    assert all(ranks.run(exchange, 6, piece_bytes))


@pytest.mark.quiet
def test_nothing_deferred_moves_while_something_urgent_is_under_way() -> None:
    started = Ranks(2)
    began = time.monotonic()
    results = started.run(paused)
    started.close()
    assert all(not busy and ended - began >= 0.3 for busy, ended in results)


def passed(world: World) -> tuple[float, float]:
    """As above, once the wire has shown how quick it is. One rank is late for what is urgent, not for the other."""
    urgent, deferred = lanes(world)
    transport = ChunkedTransport(deferred, urgent=urgent)
    large, halves = torch.ones(1 << 19), [1 << 18, 1 << 18]
    transport.all_to_all(large, halves, halves, name="deferred")
    late = threading.Timer(0.5, lambda: None)
    late.start()
    handle = urgent.all_reduce(torch.ones(1), name="urgent") if world.rank == 0 else None
    transport.all_to_all(large, halves, halves, name="deferred")
    busy = late.is_alive()
    late.join()
    (handle or urgent.all_reduce(torch.ones(1), name="urgent")).wait()
    return float(busy), time.monotonic()


@pytest.mark.quiet
def test_a_rank_that_waits_for_a_late_one_does_not_hold_back_what_is_deferred() -> None:
    started = Ranks(2)
    assert [busy for busy, _ in started.run(passed)] == [1.0, 1.0]
    started.close()
