"""Collectives along a tree give every rank the result of all, with few connections."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import Queue

import pytest
import torch
from torch import Tensor

from freescale.connections import BackgroundWork, Tree, TreeCollectives

SIZES = (1, 2, 3, 5, 8, 11, 16, 33)


class Line:
    """The messages of one rank, to threads that are the other ranks."""

    def __init__(self, rank: int, ranks: int, queues: dict[tuple[int, int], "Queue[Tensor]"]) -> None:
        self.rank, self.ranks, self._queues = rank, ranks, queues
        self.peers: Counter[int] = Counter()

    def send(self, values: Tensor, to: int) -> None:
        self.peers[to] += 1
        self._queues[self.rank, to].put(values.clone())

    def receive(self, values: Tensor, source: int) -> None:
        self.peers[source] += 1
        values.copy_(self._queues[source, self.rank].get(timeout=20))


def on_threads(ranks: int, run: Callable[[TreeCollectives, int], Tensor]) -> tuple[list[Tensor], list[Line]]:
    """Run a collective on threads; return the results and what each rank has sent and received."""
    queues: dict[tuple[int, int], Queue[Tensor]] = {(a, b): Queue() for a in range(ranks) for b in range(ranks)}
    lines = [Line(rank, ranks, queues) for rank in range(ranks)]
    works = [
        BackgroundWork(lambda line=line: run(TreeCollectives(line), line.rank), name="collective") for line in lines
    ]
    return [work.wait(20) for work in works], lines


@pytest.mark.parametrize("ranks", SIZES)
def test_every_rank_gathers_the_values_of_all(ranks: int) -> None:
    found, lines = on_threads(ranks, lambda tree, rank: tree.all_gather(torch.tensor([rank, 10 * rank])))
    expected = torch.tensor([[rank, 10 * rank] for rank in range(ranks)])
    assert all(torch.equal(rows, expected) for rows in found)
    assert sum(sum(line.peers.values()) for line in lines) == 4 * (ranks - 1), "up and down each edge, at both ends"
    assert max(len(line.peers) for line in lines) <= max(1, (ranks - 1).bit_length())


@pytest.mark.parametrize("ranks", SIZES)
def test_every_rank_has_the_bitwise_same_sum(ranks: int) -> None:
    values = torch.randn(ranks, 5, generator=torch.Generator().manual_seed(ranks), dtype=torch.float64)
    found, _ = on_threads(ranks, lambda tree, rank: tree.all_reduce(values[rank].clone(), torch.add))
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], values.sum(0), rtol=1e-12, atol=1e-12)
    largest, _ = on_threads(ranks, lambda tree, rank: tree.all_reduce(values[rank].clone(), torch.maximum))
    assert all(torch.equal(one, values.amax(0)) for one in largest)


def test_a_tree_reaches_every_rank_once_and_leaves_a_host_once() -> None:
    tree = Tree(16_384)
    edges = [(tree.parent(rank), rank) for rank in range(1, tree.ranks)]
    assert sorted((rank, child) for rank in range(tree.ranks) for child in tree.children(rank)) == sorted(edges)
    depth = [0] * tree.ranks
    for parent, rank in edges:
        depth[rank] = depth[parent] + 1
    assert max(depth) == 14
    leaving = Counter(rank // 8 for parent, rank in edges if parent // 8 != rank // 8)
    assert leaving == dict.fromkeys(range(1, 2048), 1)


def test_a_wait_ends_in_time_and_stops_when_told_that_another_failed() -> None:
    forever, begin = threading.Event(), time.monotonic()
    work = BackgroundWork(forever.wait, name="exchange")
    with pytest.raises(RuntimeError, match="did not end the exchange within 0 s"):
        work.wait(0.2)

    def check() -> None:
        raise RuntimeError("another rank has given up")

    with pytest.raises(RuntimeError, match="another rank has given up"):
        work.wait(60.0, check)
    assert time.monotonic() - begin < 10
    forever.set()
    assert work.wait(10)


def test_an_error_is_raised_where_the_result_is_waited_for() -> None:
    def fail() -> None:
        raise OSError("the link is down")

    with pytest.raises(RuntimeError, match="the link is down"):
        BackgroundWork(fail, name="exchange").wait(10)
