"""Few connections between many ranks: gloo groups that connect on demand, and collectives along a tree.

gloo connects all pairs of ranks of a group when it is created, and its rings take as many steps as there are ranks.
Both are fine for a few ranks. Beyond that, a pair connects when it first sends. Control traffic, such as hosts, clocks
and records, goes along a binomial tree: 28 steps for 16,384 ranks, and half of the ranks have one connection.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
EAGER_RANKS = 32
"""Up to so many ranks all pairs connect at once: then a rank that dies is noticed also before its first message."""
_LAZY = "TORCH_GLOO_LAZY_INIT"
_POLL_SECONDS = 1.0
_TAG = 77
"""Of messages along a tree, apart from those of other users of a group."""


def connects_on_demand(ranks: int) -> bool:
    """Return whether the pairs of a gloo group of so many ranks connect when they first send."""
    return os.environ.get(_LAZY, str(int(ranks > EAGER_RANKS))).lower() in ("1", "true", "t", "yes", "y")


@contextmanager
def few_connections(ranks: int) -> Iterator[None]:
    """Create gloo groups of so many ranks inside, which connect all pairs or connect on demand."""
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = str(int(connects_on_demand(ranks)))
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]


@dataclass(frozen=True)
class Tree:
    """A binomial tree of ranks with rank 0 at its root. Pure.

    The parent of a rank is its number without the lowest bit. So ranks whose numbers differ in low bits only, like
    those of a host, are a subtree, and one message of it leaves the host.
    """

    ranks: int

    def parent(self, rank: int) -> int:
        """Return the parent of a rank; rank 0 is its own."""
        return rank & (rank - 1) if rank else 0

    def children(self, rank: int) -> list[int]:
        """Return the children of a rank, those with small subtrees first."""
        lowest = rank & -rank if rank else self.ranks
        steps = [1 << bit for bit in range(lowest.bit_length()) if 1 << bit < lowest]
        return [rank + step for step in steps if rank + step < self.ranks]

    def subtree(self, rank: int) -> slice:
        """Return a rank and all below it."""
        return slice(rank, min(self.ranks, rank + (rank & -rank))) if rank else slice(0, self.ranks)


class Wire(Protocol):
    """Sends messages to other ranks. A call returns when the message is sent or received."""

    rank: int
    ranks: int

    def send(self, values: Tensor, to: int) -> None:
        """Send values to a rank."""

    def receive(self, values: Tensor, source: int) -> None:
        """Receive values of a rank, in place."""


class GlooWire:
    """The messages of a gloo group. `tag`: users that send at the same time have different ones."""

    def __init__(self, group: dist.ProcessGroup, *, tag: int = 0) -> None:
        self.rank, self.ranks = group.rank(), group.size()
        self._group, self._tag = group, _TAG + tag

    def send(self, values: Tensor, to: int) -> None:
        """Send values to a rank."""
        dist.send(values, group=self._group, group_dst=to, tag=self._tag)

    def receive(self, values: Tensor, source: int) -> None:
        """Receive values of a rank, in place."""
        dist.recv(values, group=self._group, group_src=source, tag=self._tag)


class TreeCollectives:
    """Collectives of a few values on the CPU, along a tree. They block: see `BackgroundWork`."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._tree = wire, Tree(wire.ranks)

    def reduce(self, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Combine values of all ranks, in the same order each time. Only rank 0 returns the whole."""
        received = torch.empty_like(values)
        for child in self._tree.children(self._wire.rank):
            self._wire.receive(received, child)
            values = combine(values, received)
        if self._wire.rank:
            self._wire.send(values, self._tree.parent(self._wire.rank))
        return values

    def broadcast(self, values: Tensor) -> Tensor:
        """Return the values of rank 0. Those of other ranks are overwritten."""
        if self._wire.rank:
            self._wire.receive(values, self._tree.parent(self._wire.rank))
        for child in reversed(self._tree.children(self._wire.rank)):
            self._wire.send(values, child)
        return values

    def all_reduce(self, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the values of all ranks, combined in the same order each time."""
        return self.broadcast(self.reduce(values, combine))

    def all_gather(self, values: Tensor) -> Tensor:
        """Gather equally shaped values of all ranks into [ranks, ...]."""
        rank, tree = self._wire.rank, self._tree
        rows = values.new_zeros((tree.ranks, *values.shape))
        rows[rank] = values
        for child in tree.children(rank):
            self._wire.receive(rows[tree.subtree(child)], child)
        if rank:
            self._wire.send(rows[tree.subtree(rank)], tree.parent(rank))
        return self.broadcast(rows)


class BackgroundWork(Generic[T]):
    """A function that runs in a daemon thread, since a first message of gloo waits for its receiver beyond timeouts."""

    def __init__(self, run: Callable[[], T], *, name: str) -> None:
        self._run, self._name = run, name
        self._results: list[T | Exception] = []
        self._thread = threading.Thread(target=self._work, name=f"freescale-{name}", daemon=True)
        self._thread.start()

    def wait(self, seconds: float, check: Callable[[], None] = lambda: None) -> T:
        """Return the result; raise its error, or RuntimeError after so many seconds. `check`: called every second."""
        until = time.monotonic() + seconds
        while not self._results:
            self._thread.join(min(_POLL_SECONDS, max(0.0, until - time.monotonic())))
            if self._results:
                break
            if time.monotonic() >= until:
                raise RuntimeError(f"gloo did not end the {self._name} within {seconds:.0f} s")
            check()
        result = self._results[0]
        if isinstance(result, Exception):
            raise RuntimeError(str(result)) from result
        return result

    def _work(self) -> None:
        try:
            self._results.append(self._run())
        except Exception as error:  # raised again where the result is waited for
            self._results.append(error)
