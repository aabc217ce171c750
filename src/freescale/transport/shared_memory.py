"""Symmetric memory between the processes of a host.

Each rank passes blocks of anonymous memory to its peers by file descriptor, so a crash leaves no file. A block is
reused when its last tensor is freed, because touching fresh memory costs as much as a copy.
"""

import mmap
import os
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from freescale.transport.base import Peers
from freescale.transport.peer_sockets import Message, PeerSockets

_SMALLEST_BITS = 16
_SPARE_BLOCKS = 2
"""Free blocks kept per size."""
_BLOCK, _DROPPED, _OFFER, _FILLED = b"b", b"d", b"o", b"f"


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

    def copy_context(self) -> AbstractContextManager[object]:
        """Do nothing: the calling thread makes the copies."""
        return nullcontext()

    def wait_for_copies(self) -> None:
        """Do nothing: copies are synchronous."""

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
