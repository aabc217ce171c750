"""Symmetric memory between the processes of a host.

Memory has no name, so none can be left behind: each rank hands blocks of it over by file descriptor. A block is used
again once nobody holds a tensor on it, since fresh memory costs as much as a copy.
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
_KEPT = 2
"""Free blocks of a size."""
_BLOCK, _DROPPED, _OFFER, _FILLED = b"b", b"d", b"o", b"f"


class _Block(NamedTuple):
    """Own memory that all peers have mapped."""

    number: int
    bits: int
    """Its size is a power of two."""
    memory: Tensor


class SharedMemory:
    """Blocks of memory that some ranks of a host map. All of them must come here, once per `name`."""

    def __init__(self, peers: Peers, ranks: Sequence[int], *, name: str, timeout: float) -> None:
        self.ranks = list(ranks)
        self._made = 0
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)
        self._returned: deque[_Block] = deque()
        self._own: dict[int, _Block] = {}
        """By address."""
        self._theirs: dict[tuple[int, int], Tensor] = {}
        """Blocks of peers."""
        self._offers: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        self._filled: Counter[int] = Counter()
        self._links = PeerSockets(peers, ranks, name=name, timeout=timeout, hear=self._hear)

    def room(self, like: Tensor, rows: int) -> Tensor:
        """Memory of this rank for rows such as those of another tensor, until nobody holds it any more."""
        shape = (rows, *like.shape[1:])
        size = rows * like.shape[1:].numel() * like.element_size()
        if not size:
            return like.new_empty(shape)
        self._take_back()
        bits = max(_SMALLEST_BITS, (size - 1).bit_length())
        block = self._free[bits].pop() if self._free[bits] else self._new(bits)
        lease = block.memory.numpy()[:size]
        finalize(lease, self._returned.append, block)
        return torch.from_numpy(lease).view(like.dtype).view(shape)

    def offer(self, peer: int, part: Tensor) -> None:
        """Let a peer fill a part of such room, given as bytes."""
        block = self._own[part.untyped_storage().data_ptr()]
        self._links.say(peer, _OFFER, block.number, part.data_ptr() - block.memory.data_ptr(), len(part))

    def offered(self, peer: int) -> bool:
        """Whether a peer has offered a part that was not taken yet."""
        if not self._offers[peer]:
            self._links.listen()
        return bool(self._offers[peer])

    def take(self, peer: int, *, until: float) -> Tensor:
        """The oldest part that a peer has offered; fails at a moment of the monotonic clock."""
        self._links.wait_until(lambda: bool(self._offers[peer]), peer, until)
        return self._offers[peer].popleft()

    def filled(self, peer: int) -> None:
        """Tell a peer that the oldest part that it waits for is filled."""
        self._links.say(peer, _FILLED)

    def wait(self, peer: int, *, until: float) -> None:
        """Until a peer has filled the oldest part that it was offered; fails at a moment of the monotonic clock."""
        self._links.wait_until(lambda: self._filled[peer] > 0, peer, until)
        self._filled[peer] -= 1

    def moving(self) -> AbstractContextManager[object]:
        """Copies are made by whoever asks for them."""
        return nullcontext()

    def wait_for_copies(self) -> None:
        """They are done when they were asked for."""

    def _new(self, bits: int) -> _Block:
        """Make memory and hand it to all peers."""
        self._made += 1
        number = os.memfd_create("freescale", os.MFD_CLOEXEC)
        try:
            os.ftruncate(number, 1 << bits)
            block = _Block(self._made, bits, _mapped(number, bits))
            self._links.say_to_all(_BLOCK, block.number, bits, memory=number)
        finally:
            os.close(number)
        self._own[block.memory.data_ptr()] = block
        return block

    def _take_back(self) -> None:
        """Blocks that nobody holds any more are free, or dropped if there are enough of their size."""
        while self._returned:
            block = self._returned.popleft()
            if len(self._free[block.bits]) < _KEPT:
                self._free[block.bits].append(block)
                continue
            del self._own[block.memory.data_ptr()]
            self._links.say_to_all(_DROPPED, block.number)

    def _hear(self, message: Message) -> None:
        peer, what, (block, first, size), memory = message
        if what == _FILLED:
            self._filled[peer] += 1
        elif what == _OFFER:
            self._offers[peer].append(self._theirs[peer, block][first : first + size])
        elif what == _DROPPED:
            del self._theirs[peer, block]
        elif what == _BLOCK and memory is not None:
            self._theirs[peer, block] = _mapped(memory, first)
            os.close(memory)


def _mapped(memory: int, bits: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(memory, 1 << bits), dtype=torch.uint8)
