"""Staging buffers in host memory between a device and the network: chunks are copied in, sent, and copied back.

The buffers are pinned, so a copy engine moves the bytes while the device computes. They rotate: one is filled while
another is sent and a third is copied from. On a CPU the same code runs with synchronous copies.
"""

from collections import deque
from collections.abc import Sequence
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
    """Makes copies in order. This base makes the synchronous copies of a CPU."""

    pinned = False
    """Whether host memory must be pinned."""

    def begin(self) -> None:
        """Order later copies after the compute issued so far."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Start a copy."""
        into.copy_(source)

    def mark(self) -> CopyEvent:
        """Return an event after the copies started so far."""
        return self

    def synchronize(self) -> None:
        """Return at once: synchronous copies are complete."""

    def wait_for_copies(self) -> None:
        """Order later compute after the copies started so far."""


class StreamCopier(Copier):
    """Copies of a device on a separate stream. Not tested on a GPU."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)

    def begin(self) -> None:
        """Let the copy stream wait for the compute stream; the host does not wait."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Start a copy between pinned memory and the device, by a copy engine."""
        with self._stream:
            into.copy_(source, non_blocking=True)
        for tensor in (into, source):
            if tensor.device == self._device:
                tensor.record_stream(self._stream)

    def mark(self) -> CopyEvent:
        """Record an event on the copy stream."""
        return self._stream.record_event()

    def wait_for_copies(self) -> None:
        """Let the compute stream wait for the copy stream."""
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)


class Staging:
    """Rotating host buffers for chunks, as bytes. They grow to the largest chunk and stay allocated."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self._outgoing, self._incoming = (_BufferRing(pinned=copier.pinned) for _ in range(2))
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
    """Host buffers that are used in rotation."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned, self._index = pinned, 0
        self._memory = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS

    def next(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the next buffer, sized for parts end to end."""
        self._index = (self._index + 1) % _BUFFERS
        size = sum(map(len, parts))
        if len(self._memory[self._index]) < size:
            self._memory[self._index] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[self._index][:size]


def _split_like(rows: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return rows.split([len(part) for part in parts])
