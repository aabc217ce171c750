"""One-sided all-to-all between the processes of a host: a rank offers receive buffers, and its peers write into them.

Bytes are copied once. Offers are made when a transfer starts and never block. A write waits only for an offer, and a
result only for its writes, so ranks that start the same transfers in the same order cannot deadlock. Parts with an
offer are written when a transfer starts, the others when it is waited for.

Each rank passes blocks of anonymous memory to its peers by file descriptor, so a crash leaves no file. A block is
reused when its last tensor is freed, because touching fresh memory costs as much as a copy.
"""

import mmap
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from freescale.errors import TransportError
from freescale.transport.base import Peers, PendingWork, TracerFactory, Transport, Work
from freescale.transport.c10d import C10d
from freescale.transport.chunked import ChunkedTransport
from freescale.transport.peer_sockets import Message, PeerSockets

_SMALLEST_BITS = 16
_SPARE_BLOCKS = 2
"""Free blocks kept per size."""
_BLOCK, _DROPPED, _OFFER, _FILLED = b"b", b"d", b"o", b"f"
_Completion = Callable[[], None]


class SharedMemoryTransport(Transport):
    """All-to-all by copies into the memory of the ranks of a host.

    `fallback` serves the ranks that the memory does not reach, and all reductions: copies cannot add.
    """

    def __init__(self, memory: "SharedMemory", fallback: C10d | ChunkedTransport, *, within_host: bool = False) -> None:
        """`within_host`: connect the ranks of the memory alone, which are then counted from 0."""
        self.peers, self.timeout = fallback.peers, fallback.timeout
        self._own, self._ranks = self.peers.rank, list(range(self.peers.world_size))
        self._tracer_factory: TracerFactory | None = None
        self._memory, self._fallback = memory, fallback
        place = memory.ranks.index(self._own)
        if within_host:
            self._ranks = memory.ranks
            self.peers = HostPeers(place, len(self._ranks), self.peers.store, self.peers)
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
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str, most: int | None = None
    ) -> PendingWork[Tensor]:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receive likewise."""
        tracer = self._tracer_factory(name, rows.nbytes) if self._tracer_factory is not None else None
        rows = rows.contiguous()
        with self.peers.guard(name):
            out = self._memory.allocate(rows, sum(receive))
        outgoing, incoming = (
            dict(zip(self._ranks, part.split(list(counts)), strict=True))
            for part, counts in ((rows, send), (out, receive))
        )
        complete_far = self._send_far(outgoing, incoming, name, most)
        with self.peers.guard(name):
            for peer in self._near:
                if incoming[peer].numel():
                    self._memory.offer(peer, incoming[peer].view(-1).view(torch.uint8))
                    self._awaited[peer] += 1
                if outgoing[peer].numel():
                    self._unwritten[peer].append(outgoing[peer].view(-1).view(torch.uint8))
                    self._begun[peer] += 1
            incoming[self._own].copy_(outgoing[self._own])
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
        self._write_offered()
        for peer in self._near:
            while self._written[peer] < begun[peer]:
                self._write(peer, until)
        for peer in reversed(self._near):
            while self._arrived[peer] < awaited[peer]:
                self._memory.wait_filled(peer, until=until)
                self._arrived[peer] += 1
        if complete_far is not None:
            complete_far()

    def _write_offered(self) -> None:
        for peer in self._near:
            while self._unwritten[peer] and self._memory.has_offer(peer):
                self._write(peer, time.monotonic())

    def _write(self, peer: int, until: float) -> None:
        """Write the oldest part for a peer to its buffer."""
        buffer = self._memory.take(peer, until=until)
        buffer.copy_(self._unwritten[peer].popleft())
        self._memory.signal_filled(peer)
        self._written[peer] += 1

    def _send_far(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], name: str, most: int | None
    ) -> _Completion | None:
        """Start the transfer of ranks outside this memory, if any; return the callback that stores what arrives."""
        far = [rank for rank in self._ranks if rank not in self._memory.ranks]
        if not far:
            return None
        counts = ([len(part) * (rank in far) for rank, part in parts.items()] for parts in (outgoing, incoming))
        work = self._fallback.all_to_all(torch.cat([outgoing[rank] for rank in far]), *counts, name=name, most=most)

        def complete() -> None:
            received = work.wait().split([len(incoming[rank]) for rank in far])
            for rank, part in zip(far, received, strict=True):
                incoming[rank].copy_(part)

        return complete


@dataclass(frozen=True)
class HostPeers(Peers):
    """The ranks of a host, counted from 0. Errors name them by their number among all ranks."""

    of_all: Peers

    def raise_if_peer_failed(self) -> None:
        """Raise if a wait of another rank failed, on any host."""
        self.of_all.raise_if_peer_failed()

    def transport_error(self, operation: str, error: Exception) -> TransportError:
        """Build the error of an operation that failed on this rank, with the ranks that do not respond."""
        return self.of_all.transport_error(operation, error)


class _SharedBlock(NamedTuple):
    """Memory of this rank that all peers have mapped."""

    number: int
    bits: int
    """Its size is 2**bits bytes."""
    memory: Tensor


class SharedMemory:
    """Memory blocks shared by ranks of one host. Collective: construct it on all of them, once per `name`."""

    def __init__(self, peers: Peers, ranks: Sequence[int], *, name: str, timeout: float) -> None:
        self.ranks = list(ranks)
        self._count = 0
        self._free: defaultdict[int, list[_SharedBlock]] = defaultdict(list)
        self._returned: deque[_SharedBlock] = deque()
        self._own: dict[int, _SharedBlock] = {}
        """Blocks of this rank, by address."""
        self._mapped: dict[tuple[int, int], Tensor] = {}
        """Blocks of peers, by peer and number."""
        self._offers: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        self._filled: Counter[int] = Counter()
        self._sockets = PeerSockets(peers, ranks, name=name, timeout=timeout, on_message=self._on_message)

    def allocate(self, like: Tensor, rows: int) -> Tensor:
        """Allocate memory of this rank for rows like those of a tensor. It is freed with the last reference."""
        shape = (rows, *like.shape[1:])
        size = rows * like.shape[1:].numel() * like.element_size()
        if not size:
            return like.new_empty(shape)
        self._reclaim()
        bits = max(_SMALLEST_BITS, (size - 1).bit_length())
        block = self._free[bits].pop() if self._free[bits] else self._new_block(bits)
        lease = block.memory.numpy()[:size]
        finalize(lease, self._returned.append, block)
        return torch.from_numpy(lease).view(like.dtype).view(shape)

    def offer(self, peer: int, part: Tensor) -> None:
        """Let a peer fill a part of allocated memory, given as bytes."""
        block = self._own[part.untyped_storage().data_ptr()]
        self._sockets.send(peer, _OFFER, block.number, part.data_ptr() - block.memory.data_ptr(), len(part))

    def has_offer(self, peer: int) -> bool:
        """Return whether a peer has offered a part that was not taken yet."""
        if not self._offers[peer]:
            self._sockets.poll()
        return bool(self._offers[peer])

    def take(self, peer: int, *, until: float) -> Tensor:
        """Wait for the oldest part that a peer has offered, and return it."""
        self._sockets.wait_until(lambda: bool(self._offers[peer]), peer, until)
        return self._offers[peer].popleft()

    def signal_filled(self, peer: int) -> None:
        """Signal a peer that the oldest part that it waits for is filled."""
        self._sockets.send(peer, _FILLED)

    def wait_filled(self, peer: int, *, until: float) -> None:
        """Wait until a peer has filled the oldest part that it was offered."""
        self._sockets.wait_until(lambda: self._filled[peer] > 0, peer, until)
        self._filled[peer] -= 1

    def _new_block(self, bits: int) -> _SharedBlock:
        """Create a block and send it to all peers."""
        self._count += 1
        descriptor = os.memfd_create("freescale", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, 1 << bits)
            block = _SharedBlock(self._count, bits, _map(descriptor, bits))
            self._sockets.broadcast(_BLOCK, block.number, bits, descriptor=descriptor)
        finally:
            os.close(descriptor)
        self._own[block.memory.data_ptr()] = block
        return block

    def _reclaim(self) -> None:
        """Make unreferenced blocks free again, or drop them if enough of their size are free."""
        while self._returned:
            block = self._returned.popleft()
            if len(self._free[block.bits]) < _SPARE_BLOCKS:
                self._free[block.bits].append(block)
                continue
            del self._own[block.memory.data_ptr()]
            self._sockets.broadcast(_DROPPED, block.number)

    def _on_message(self, message: Message) -> None:
        peer, tag, (block, first, size), descriptor = message
        if tag == _FILLED:
            self._filled[peer] += 1
        elif tag == _OFFER:
            self._offers[peer].append(self._mapped[peer, block][first : first + size])
        elif tag == _DROPPED:
            del self._mapped[peer, block]
        elif tag == _BLOCK and descriptor is not None:
            self._mapped[peer, block] = _map(descriptor, first)
            os.close(descriptor)


def _map(descriptor: int, bits: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, 1 << bits), dtype=torch.uint8)
