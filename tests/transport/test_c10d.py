"""C10d delivers uneven exchanges unchanged, and names a lost or stuck rank by the timeout."""

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from freescale.errors import TransportError
from freescale.transport.c10d import C10d
from tests.support.ranks import RankError, Ranks, World

TIMEOUT = 20.0


def transport(world: World, timeout: float = 60.0) -> C10d:
    assert dist.group.WORLD is not None
    return C10d(dist.group.WORLD, world.store, timeout=timeout)


def exchange(world: World, seed: int, dtype: torch.dtype, width: int) -> bool:
    """Random uneven splits, zeros among them; every row encodes its sender, receiver and index."""
    splits = np.random.default_rng(seed).integers(0, 5, (world.ranks, world.ranks)) * (seed % 3)

    def rows(source: int, target: int) -> torch.Tensor:
        values = torch.arange(splits[source, target] * width) + 7 * source + 3 * target
        return values.reshape(-1, width).to(dtype)

    mine = torch.cat([rows(world.rank, target) for target in range(world.ranks)])
    send, receive = splits[world.rank].tolist(), splits[:, world.rank].tolist()
    got = transport(world).all_to_all(mine, send, receive, name="rows").wait()
    return torch.equal(got, torch.cat([rows(source, world.rank) for source in range(world.ranks)]))


def gather_and_reduce(world: World) -> tuple[list[Any], list[Any]]:
    one = transport(world)
    gathered = one.all_gather(torch.tensor([world.rank, 10 * world.rank]), name="lengths").wait()
    reduced = one.all_reduce(torch.tensor([1.5, float(world.rank)]), name="gradients").wait()
    return gathered.tolist(), reduced.tolist()


def wait_for_all(world: World, stuck: int, timeout: float) -> str:
    """Reduce together; one rank is stuck, and the others say what they were messages."""
    if world.rank == stuck:
        time.sleep(timeout + 4)
        return "slept"
    try:
        transport(world, timeout).all_reduce(torch.ones(4), name=f"gradients of step {stuck}").wait()
    except TransportError as error:
        return str(error)
    return "arrived"


def wait_for_one_that_gave_up(world: World, timeout: float) -> tuple[float, str]:
    """Rank 0 fails on a transfer of another transport; rank 1 waits for it. Return the seconds and the error."""
    one, begin = transport(world, timeout), time.monotonic()
    try:
        if world.rank == 0:
            with one.peers.guard("rows"):
                raise RuntimeError("the link is down")
        one.all_reduce(torch.ones(4), name="gradients").wait()
    except TransportError as error:
        return time.monotonic() - begin, str(error)
    return time.monotonic() - begin, "arrived"


def sum_gradients(world: World, stuck: int) -> str:
    """Train a step by DDP, whose own wait for gradients fails: one rank is stuck, and another transfer times out."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    assert isinstance(group, dist.ProcessGroup)
    model = DistributedDataParallel(nn.Linear(8, 1), process_group=group)
    used = C10d(group, world.store)
    model.register_comm_hook(used, C10d.all_reduce_gradients)
    loss = model(torch.ones(1, 8)).sum()
    if world.rank == stuck:
        time.sleep(6)
        return "slept"
    before = used.all_reduce(torch.ones(1), name="count")
    try:
        with used.guard("dense gradients"):
            loss.backward()
    except TransportError as error:
        return str(error)
    return f"arrived: {before}"


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(request.param)
    yield started
    started.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_uneven_all_to_all_delivers_rows_unchanged(ranks: Ranks, dtype: torch.dtype) -> None:
    for seed in range(12):
        assert all(ranks.run(exchange, seed, dtype, 1 + seed % 4)), seed


def test_all_gather_and_all_reduce_include_every_rank(ranks: Ranks) -> None:
    count = len(ranks.processes)
    for gathered, reduced in ranks.run(gather_and_reduce):
        assert gathered == [[rank, 10 * rank] for rank in range(count)]
        assert reduced == [1.5 * count, sum(range(count))]


def test_errors_of_ranks_are_raised_with_their_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(exchange, "no seed", torch.float32, 1)
    assert all(f"rank {rank}:" in str(caught.value) for rank in range(len(ranks.processes)))


def test_all_ranks_name_a_stuck_rank_by_the_timeout() -> None:
    started = Ranks(3)
    try:
        begin = time.monotonic()
        messages = started.run(wait_for_all, 1, 2.0)
        assert time.monotonic() - begin < 60
        assert messages[1] == "slept"
        for rank in (0, 2):
            assert f"gradients of step 1 failed on rank {rank} of 3: ranks that do not answer: 1" in messages[rank]
            assert "remedy:" in messages[rank]
    finally:
        started.close()


def test_a_waiting_rank_notices_that_another_has_given_up() -> None:
    started = Ranks(2)
    try:
        (_, gave_up), (seconds, noticed) = started.run(wait_for_one_that_gave_up, TIMEOUT)
        assert seconds < TIMEOUT / 2
        assert "rows failed on rank 0 of 2: every rank answers" in gave_up
        assert "gradients failed on rank 1 of 2: every rank answers" in noticed
        assert "given up because of rank 0: rows, " in noticed
    finally:
        started.close()


def test_a_stuck_rank_is_named_when_ddp_waits_for_it() -> None:
    started = Ranks(3)
    try:
        messages = started.run(sum_gradients, 1)
        for rank in (0, 2):
            assert f"dense gradients failed on rank {rank} of 3: ranks that do not answer: 1" in messages[rank]
    finally:
        started.close()


def test_all_ranks_name_a_killed_rank() -> None:
    started = Ranks(3)
    try:
        started.run(gather_and_reduce)  # the group is connected
        started.send(wait_for_all, 2, 30.0)
        time.sleep(0.5)
        pid = started.processes[2].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        messages = [started.result(rank) for rank in (0, 1)]
        assert time.monotonic() - begin < 30
        for text in messages:
            assert "ranks that do not answer: 2" in text
    finally:
        started.close()
