"""Every transport delivers rows unchanged, and names a lost rank in time."""

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from freescale.errors import TransportError
from tests.support.ranks import Ranks, World
from tests.transport.transports import TIMEOUT, TRANSPORTS, transport_named

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def exchanges(world: World, name: str, seeds: range) -> list[int]:
    """Random uneven splits, zeros and single rows among them; return the seeds whose rows differ from gloo's."""
    return [seed for seed in seeds if not same_as_gloo(world, name, seed)]


def same_as_gloo(world: World, name: str, seed: int) -> bool:
    random = np.random.default_rng(seed)
    most = int(random.choice([1, 2, 30, 3000]))
    splits = random.integers(0, most + 1, (world.ranks, world.ranks)) * random.integers(
        0, 2, (world.ranks, world.ranks)
    )
    shape, dtype = [(), (1,), (3,), (2, 5)][seed % 4], DTYPES[seed % len(DTYPES)]
    send, receive = splits[world.rank].tolist(), splits[:, world.rank].tolist()
    size = (sum(send), *shape)
    rows = torch.from_numpy(random.integers(0, 2 if dtype == torch.bool else 200, size)).to(dtype)
    expected = transport_named(world, "c10d").all_to_all(rows, send, receive, name="expected").wait()
    got = transport_named(world, name).all_to_all(rows, send, receive, name="rows").wait()
    return got.dtype == expected.dtype and torch.equal(got, expected)


def several_at_once(world: World, name: str) -> bool:
    """Start three transfers and wait for the last one first."""
    transport = transport_named(world, name)
    counts = [40_000] * world.ranks
    rows = [torch.arange(40_000 * world.ranks) * (k + 1) + world.rank for k in range(3)]
    begun = [transport.all_to_all(values, counts, counts, name=f"rows {k}") for k, values in enumerate(rows)]
    results = [work.wait() for work in reversed(begun)][::-1]
    expected = torch.arange(40_000) + 40_000 * world.rank
    return all(torch.equal(got[:40_000], expected * (k + 1)) for k, got in enumerate(results))


def gathered(world: World, name: str) -> bool:
    """Gather values of several shapes, an empty one included."""
    transport = transport_named(world, name)
    for shape in ((3,), (2, 5), (0, 4), ()):
        got = transport.all_gather(torch.full(shape, float(world.rank)), name="values").wait()
        expected = torch.stack([torch.full(shape, float(rank)) for rank in range(world.ranks)])
        if got.shape != expected.shape or not torch.equal(got, expected):
            return False
    return True


def exchange_until_error(world: World, name: str) -> str:
    """Exchange until an error; return its message."""
    transport = transport_named(world, name)
    counts = [50_000] * world.ranks
    rows = torch.zeros(50_000 * world.ranks)
    try:
        while True:
            transport.all_to_all(rows, counts, counts, name="rows of a step").wait()
    except TransportError as error:
        return str(error)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.close()


@pytest.mark.parametrize("name", TRANSPORTS[1:])
def test_rows_equal_those_of_gloo(ranks: Ranks, name: str) -> None:
    assert ranks.run(exchanges, name, range(60)) == [[]] * len(ranks.processes)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_transfers_can_be_awaited_in_any_order(ranks: Ranks, name: str) -> None:
    assert all(ranks.run(several_at_once, name))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_all_gather_returns_values_of_every_rank(ranks: Ranks, name: str) -> None:
    assert all(ranks.run(gathered, name))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_all_ranks_name_a_rank_killed_during_transfers(name: str) -> None:
    started = Ranks(4)
    try:
        started.run(several_at_once, name)  # all are connected
        started.send(exchange_until_error, name)
        time.sleep(0.5)
        pid = started.processes[3].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        messages = [started.result(rank) for rank in range(3)]
        assert time.monotonic() - begin < TIMEOUT + 6  # and the grace period
        for text in messages:
            assert "rows of a step" in text
            assert "failed on rank" in text
            assert "ranks that do not answer: 3" in text
    finally:
        started.close()
