"""Uneven all-to-all over symmetric memory: a rank offers room for what it awaits, and its peers write straight into it.

Bytes are copied once. Offers are made when a transfer begins and wait for nothing; writing waits only for an offer, and
a result only for what was written. So nobody blocks anybody for good as long as all ranks begin the same transfers in
the same order. What has been offered already is written when a transfer begins, the rest when somebody waits for it.

Who implements the memory decides what a write and a signal are: a copy inside the memory of a host (`shared_memory`),
or one by the copy engine of a GPU (`copy_engine`).
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from freescale.transport.base import PendingWork, TracerFactory, Transport, Work
from freescale.transport.c10d import C10d
from freescale.transport.chunked import ChunkedTransport

_Place = Callable[[], None]


class SymmetricMemory(Protocol):
    """Room that peers can reach and the signals about it, seen from one rank. Offers and signals keep their order."""

    ranks: list[int]
    """Who shares it, this rank among them."""

    def room(self, like: Tensor, rows: int) -> Tensor:
        """Memory of this rank for rows such as those of another tensor, until nobody holds it any more."""

    def offer(self, peer: int, part: Tensor) -> None:
        """Let a peer fill a part of such room, given as bytes."""

    def offered(self, peer: int) -> bool:
        """Whether a peer has offered a part that was not taken yet."""

    def take(self, peer: int, *, until: float) -> Tensor:
        """The oldest part that a peer has offered; fails at a moment of the monotonic clock."""

    def filled(self, peer: int) -> None:
        """Tell a peer that the oldest part that it waits for is filled by what was copied so far."""

    def wait(self, peer: int, *, until: float) -> None:
        """Until a peer has filled the oldest part that it was offered; fails at a moment of the monotonic clock."""

    def moving(self) -> AbstractContextManager[object]:
        """Copies and signals that are asked for inside happen where they take the least from compute."""

    def wait_for_copies(self) -> None:
        """Whoever computes may use from here on what was moved so far."""


class OneSided(Transport):
    """Transfers between ranks that reach each other's memory.

    `beyond` carries what goes to ranks that the memory does not reach, and what has to be added up: copies add nothing.
    """

    def __init__(self, memory: SymmetricMemory, beyond: C10d | ChunkedTransport) -> None:
        self.peers, self.timeout = beyond.peers, beyond.timeout
        self._tracer_factory: TracerFactory | None = None
        self._memory, self._beyond = memory, beyond
        self._is_near = [rank in memory.ranks for rank in range(self.peers.world_size)]
        place = memory.ranks.index(self.peers.rank)
        self._near = [*memory.ranks[place + 1 :], *memory.ranks[:place]]
        """The others; each rank begins with the one behind it, so that not all fall upon one."""
        self._going: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        """Parts that are still to be written, by peer."""
        self._begun: Counter[int] = Counter()
        self._written: Counter[int] = Counter()
        self._awaited: Counter[int] = Counter()
        self._arrived: Counter[int] = Counter()
        """Parts so far, by peer: two counts of those that go there, and two of those that come from there."""

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Tell somebody of every transfer that begins, here and beyond."""
        self._tracer_factory = tracer
        self._beyond.add_tracer(tracer)

    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str
    ) -> PendingWork[Tensor]:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receive likewise."""
        tracer = self._tracer_factory(name, rows.nbytes) if self._tracer_factory is not None else None
        rows = rows.contiguous()
        with self.peers.during(name):
            out = self._memory.room(rows, sum(receive))
        mine, theirs = rows.split(list(send)), out.split(list(receive))
        far = self._send_far(mine, theirs, name)
        with self.peers.during(name), self._memory.moving():
            for peer in self._near:
                if theirs[peer].numel():
                    self._memory.offer(peer, theirs[peer].view(-1).view(torch.uint8))
                    self._awaited[peer] += 1
                if mine[peer].numel():
                    self._going[peer].append(mine[peer].view(-1).view(torch.uint8))
                    self._begun[peer] += 1
            theirs[self.peers.rank].copy_(mine[self.peers.rank], non_blocking=True)
            self._write_what_is_offered()
        ends = partial(self._finish, self._begun.copy(), self._awaited.copy(), far)
        return PendingWork(name, self, tracer, ends, lambda: out)

    def all_reduce(self, values: Tensor, *, name: str) -> Work[Tensor]:
        """Add up values over all ranks, in place."""
        return self._beyond.all_reduce(values, name=name)

    def busy(self, rate: float = 0.0) -> bool:
        """Whether anything goes beyond; what is near is written by whoever begins a transfer or waits for it."""
        return self._beyond.busy(rate)

    def _finish(self, begun: Counter[int], awaited: Counter[int], far: _Place | None, seconds: float) -> None:
        """Write so many parts to each peer, wait for so many of each, and put in place what comes from afar."""
        until = time.monotonic() + seconds
        with self._memory.moving():
            self._write_what_is_offered()
            for peer in self._near:
                while self._written[peer] < begun[peer]:
                    self._write(peer, until)
            for peer in reversed(self._near):
                while self._arrived[peer] < awaited[peer]:
                    self._memory.wait(peer, until=until)
                    self._arrived[peer] += 1
        self._memory.wait_for_copies()
        if far is not None:
            far()

    def _write_what_is_offered(self) -> None:
        for peer in self._near:
            while self._going[peer] and self._memory.offered(peer):
                self._write(peer, time.monotonic())

    def _write(self, peer: int, until: float) -> None:
        """The oldest part for a peer, to where it wants it."""
        place = self._memory.take(peer, until=until)
        place.copy_(self._going[peer].popleft(), non_blocking=True)
        self._memory.filled(peer)
        self._written[peer] += 1

    def _send_far(self, mine: Sequence[Tensor], theirs: Sequence[Tensor], name: str) -> _Place | None:
        """Begin what goes to ranks beyond this memory, if there are any; gives what puts in place what comes."""
        far = [rank for rank, near in enumerate(self._is_near) if not near]
        if not far:
            return None
        sides = ([len(part) * (rank in far) for rank, part in enumerate(parts)] for parts in (mine, theirs))
        arriving = self._beyond.all_to_all(torch.cat([mine[rank] for rank in far]), *sides, name=name)

        def place() -> None:
            pieces = arriving.wait().split([len(theirs[rank]) for rank in far])
            for rank, piece in zip(far, pieces, strict=True):
                theirs[rank].copy_(piece)

        return place
