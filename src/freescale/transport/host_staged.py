"""Staging buffers between rows and the network: chunks are copied in, sent, and copied back.

The buffers rotate: one is filled while another is sent and a third is copied from. They are where the group can send
from. For a GPU whose rows take the CPU network they are pinned host memory, so a copy engine moves the bytes while the
device computes.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

_BUFFERS = 3
"""Chunks in flight at once: copied out, sent, copied in."""


class CopyEvent(Protocol):
    """Marks the end of copies, like `torch.Event`."""

    def synchronize(self) -> None:
        """Wait for the copies."""


class Copier:
    """Makes copies on one device, in the order of its current stream. No host has to wait for them."""

    pinned = False
    """Whether host memory must be pinned."""

    def __init__(self, device: torch.device) -> None:
        self.buffer_device = device
        """Where the buffers of the chunks are: where the group can send from."""

    def begin(self) -> None:
        """Order later copies after the compute issued so far."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Start a copy."""
        into.copy_(source)

    def mark(self) -> CopyEvent:
        """Return an event after the copies started so far."""
        return self

    def synchronize(self) -> None:
        """Return at once: what uses the buffers follows the copies, on a CPU and on a stream."""

    def wait_for_copies(self) -> None:
        """Order later compute after the copies started so far."""


class StreamCopier(Copier):
    """Copies between a device and pinned host memory, on a separate stream. Not tested on a GPU."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        # Streams of normal priority come from a pool that torch's futures use too: DDP's callbacks would delay copies.
        self._device, self._stream = device, torch.Stream(device, priority=-1)

    def begin(self) -> None:
        """Let the copy stream wait for the compute stream; the host does not wait."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Start a copy between pinned memory and the device, by a copy engine."""
        with self._stream:
            into.copy_(source, non_blocking=True)
        for tensor in (into, source):
            if tensor.device.type != "cpu":
                tensor.record_stream(self._stream)

    def mark(self) -> CopyEvent:
        """Record an event on the copy stream."""
        return self._stream.record_event()

    def wait_for_copies(self) -> None:
        """Let the compute stream wait for the copy stream."""
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)


class Staging:
    """Rotating buffers for chunks, as bytes. They grow to the largest chunk and stay allocated."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self._outgoing, self._incoming = (_BufferRing(copier) for _ in range(2))
        self._copied_back: deque[CopyEvent] = deque(maxlen=_BUFFERS - 1)

    def stage(self, parts: Sequence[Tensor]) -> tuple[Tensor, CopyEvent]:
        """Start copying parts end to end into a send buffer. Two earlier buffers may still be in flight."""
        staged = self._outgoing.next(parts)
        for into, part in zip(_split_like(staged, parts), parts, strict=True):
            self.copier.copy(into, part)
        return staged, self.copier.mark()

    def receive_buffer(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a buffer for parts to arrive in, end to end."""
        if len(self._copied_back) == _BUFFERS - 1:
            self._copied_back[0].synchronize()  # the last use of this buffer precedes that event
        return self._incoming.next(parts)

    def unstage(self, received: Tensor, parts: Sequence[Tensor]) -> None:
        """Start copying received bytes to their destinations."""
        for part, chunk in zip(parts, _split_like(received, parts), strict=True):
            self.copier.copy(part, chunk)
        self._copied_back.append(self.copier.mark())


class _BufferRing:
    """Buffers that are used in rotation."""

    def __init__(self, copier: Copier) -> None:
        self._index = 0
        self._allocate = partial(torch.empty, dtype=torch.uint8, device=copier.buffer_device, pin_memory=copier.pinned)
        self._memory = [self._allocate(0)] * _BUFFERS

    def next(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the next buffer, sized for parts end to end."""
        self._index = (self._index + 1) % _BUFFERS
        size = sum(map(len, parts))
        if len(self._memory[self._index]) < size:
            self._memory[self._index] = self._allocate(size)
        return self._memory[self._index][:size]


def _split_like(rows: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return rows.split([len(part) for part in parts])
