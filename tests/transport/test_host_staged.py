"""Chunks copied asynchronously arrive intact: no staging buffer is sent or reused too early."""

from collections import deque

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from freescale.transport import chunked
from freescale.transport.c10d import C10d
from freescale.transport.chunked import ChunkedTransport
from freescale.transport.host_staged import Copier
from tests.support.ranks import Ranks, World


class LateCopier(Copier):
    """Emulates asynchronous device copies: they happen in order, only when waited for."""

    pinned = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._pending: deque[tuple[Tensor, Tensor]] = deque()
        self._count = self._made = 0

    def begin(self) -> None:
        pass

    def copy(self, into: Tensor, source: Tensor) -> None:
        self._pending.append((into, source))
        self._count += 1

    def mark(self) -> "Mark":
        return Mark(self, self._count)

    def wait_for_copies(self) -> None:
        self.make(self._count)

    def make(self, number: int) -> None:
        while self._made < number:
            into, source = self._pending.popleft()
            into.copy_(source)
            self._made += 1


class Mark:
    def __init__(self, copies: LateCopier, number: int) -> None:
        self._copies, self._number = copies, number

    def synchronize(self) -> None:
        self._copies.make(self._number)


def exchanges(world: World, seeds: int) -> list[int]:
    """Return the seeds whose rows differ from gloo's."""
    chunked.LARGE_CHUNK_BYTES["cpu"] = 400
    assert dist.group.WORLD is not None
    group = C10d(dist.group.WORLD, world.store, timeout=60.0)
    staged = ChunkedTransport(group, copier=LateCopier())
    wrong = []
    for seed in range(seeds):
        splits = np.random.default_rng(seed).integers(0, 60, (world.ranks, world.ranks)) * (seed % 4 > 0)
        send, receive = splits[world.rank].tolist(), splits[:, world.rank].tolist()
        rows = torch.arange(sum(send) * 3).reshape(-1, 3) + 1000 * world.rank
        expected = group.all_to_all(rows, send, receive, name="expected").wait()
        if not torch.equal(staged.all_to_all(rows, send, receive, name="rows").wait(), expected):
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize("count", [2, 4])
def test_asynchronous_copies_arrive_intact(count: int) -> None:
    ranks = Ranks(count)
    try:
        assert ranks.run(exchanges, 40) == [[]] * count
    finally:
        ranks.close()
