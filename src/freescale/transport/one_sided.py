"""One-sided all-to-all over symmetric memory: a rank offers receive buffers, and its peers write directly into them.

Bytes are copied once. Offers are made when a transfer starts and never block. A write waits only for an offer, and a
result only for its writes, so ranks that start the same transfers in the same order cannot deadlock. Parts with an
offer are written when a transfer starts, the others when it is waited for.

The memory implements writes and signals: in host memory (`shared_memory`) or by GPU copy engines (`copy_engine`).
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

_Completion = Callable[[], None]


class SymmetricMemory(Protocol):
    """Memory that peers can write to, with signals, seen from one rank. Offers and signals keep their order.

    `until` is a time of the monotonic clock at which a wait fails.
    """

    ranks: list[int]
    """The ranks that share it, this one included."""

    def allocate(self, like: Tensor, rows: int) -> Tensor:
        """Allocate memory of this rank for rows like those of a tensor. It is freed with the last reference."""

    def offer(self, peer: int, part: Tensor) -> None:
        """Let a peer fill a part of allocated memory, given as bytes."""

    def has_offer(self, peer: int) -> bool:
        """Return whether a peer has offered a part that was not taken yet."""

    def take(self, peer: int, *, until: float) -> Tensor:
        """Wait for the oldest part that a peer has offered, and return it."""

    def signal_filled(self, peer: int) -> None:
        """Signal a peer that the copies so far fill the oldest part that it waits for."""

    def wait_filled(self, peer: int, *, until: float) -> None:
        """Wait until a peer has filled the oldest part that it was offered."""

    def copy_context(self) -> AbstractContextManager[object]:
        """Issue the copies and signals inside where they take the least from compute."""

    def wait_for_copies(self) -> None:
        """Order later compute after the copies so far."""


class OneSided(Transport):
    """Transfers between ranks that can write to each other's memory.

    `fallback` serves the ranks that the memory does not reach, and all reductions: copies cannot add.
    """

    def __init__(self, memory: SymmetricMemory, fallback: C10d | ChunkedTransport) -> None:
        self.peers, self.timeout = fallback.peers, fallback.timeout
        self._tracer_factory: TracerFactory | None = None
        self._memory, self._fallback = memory, fallback
        self._is_near = [rank in memory.ranks for rank in range(self.peers.world_size)]
        place = memory.ranks.index(self.peers.rank)
        self._near = [*memory.ranks[place + 1 :], *memory.ranks[:place]]
        """The peers; each rank starts with the next one, so that not all write to the same rank."""
        self._unwritten: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        """Parts still to be written, by peer."""
        self._begun: Counter[int] = Counter()
        self._written: Counter[int] = Counter()
        self._awaited: Counter[int] = Counter()
        self._arrived: Counter[int] = Counter()
        """Parts so far, by peer: sent ones begun and written, received ones awaited and arrived."""

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Trace every transfer from now on, those of the fallback included."""
        self._tracer_factory = tracer
        self._fallback.add_tracer(tracer)

    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str
    ) -> PendingWork[Tensor]:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receive likewise."""
        tracer = self._tracer_factory(name, rows.nbytes) if self._tracer_factory is not None else None
        rows = rows.contiguous()
        with self.peers.guard(name):
            out = self._memory.allocate(rows, sum(receive))
        outgoing, incoming = rows.split(list(send)), out.split(list(receive))
        complete_far = self._send_far(outgoing, incoming, name)
        with self.peers.guard(name), self._memory.copy_context():
            for peer in self._near:
                if incoming[peer].numel():
                    self._memory.offer(peer, incoming[peer].view(-1).view(torch.uint8))
                    self._awaited[peer] += 1
                if outgoing[peer].numel():
                    self._unwritten[peer].append(outgoing[peer].view(-1).view(torch.uint8))
                    self._begun[peer] += 1
            incoming[self.peers.rank].copy_(outgoing[self.peers.rank], non_blocking=True)
            self._write_offered()
        block = partial(self._finish, self._begun.copy(), self._awaited.copy(), complete_far)
        return PendingWork(name, self, tracer, block, lambda: out)

    def all_reduce(self, values: Tensor, *, name: str) -> Work[Tensor]:
        """Sum values over all ranks, in place."""
        return self._fallback.all_reduce(values, name=name)

    def busy(self, rate: float = 0.0) -> bool:
        """Return whether the fallback may be moving bytes; the caller itself writes to near ranks."""
        return self._fallback.busy(rate)

    def _finish(
        self, begun: Counter[int], awaited: Counter[int], complete_far: _Completion | None, seconds: float
    ) -> None:
        """Write and await so many parts of each peer, then complete the transfer of far ranks."""
        until = time.monotonic() + seconds
        with self._memory.copy_context():
            self._write_offered()
            for peer in self._near:
                while self._written[peer] < begun[peer]:
                    self._write(peer, until)
            for peer in reversed(self._near):
                while self._arrived[peer] < awaited[peer]:
                    self._memory.wait_filled(peer, until=until)
                    self._arrived[peer] += 1
        self._memory.wait_for_copies()
        if complete_far is not None:
            complete_far()

    def _write_offered(self) -> None:
        for peer in self._near:
            while self._unwritten[peer] and self._memory.has_offer(peer):
                self._write(peer, time.monotonic())

    def _write(self, peer: int, until: float) -> None:
        """Write the oldest part for a peer to its buffer."""
        buffer = self._memory.take(peer, until=until)
        buffer.copy_(self._unwritten[peer].popleft(), non_blocking=True)
        self._memory.signal_filled(peer)
        self._written[peer] += 1

    def _send_far(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], name: str) -> _Completion | None:
        """Start the transfer of ranks outside this memory, if any; return the callback that stores what arrives."""
        far = [rank for rank, near in enumerate(self._is_near) if not near]
        if not far:
            return None
        counts = ([len(part) * (rank in far) for rank, part in enumerate(parts)] for parts in (outgoing, incoming))
        work = self._fallback.all_to_all(torch.cat([outgoing[rank] for rank in far]), *counts, name=name)

        def complete() -> None:
            received = work.wait().split([len(incoming[rank]) for rank in far])
            for rank, part in zip(far, received, strict=True):
                incoming[rank].copy_(part)

        return complete
