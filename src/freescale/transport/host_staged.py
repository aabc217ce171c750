"""Memory of the host between a device and the network: pieces are copied into it, sent, and copied back.

The buffers are pinned, so that a copy engine moves the bytes while the device computes, and they go round: one is
copied into while another is sent and a third is copied from. On a CPU the same lines run, and a copy is done when it is
asked for.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_ROUND = 3
"""Pieces under way at once: copied out, travelling, copied in."""


class CopyEvent(Protocol):
    """The end of some copies."""

    def synchronize(self) -> None:
        """Wait for it."""


class Copier:
    """Makes copies, one after another: those of a CPU, each of which is over when it was asked for."""

    pinned = False
    """Whether memory of the host must be pinned for it."""

    def begin(self) -> None:
        """Copies from here on see what was computed so far."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Begin a copy."""
        into.copy_(source)

    def mark(self) -> CopyEvent:
        """The end of those that have begun so far."""
        return self

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def wait_for_copies(self) -> None:
        """Whoever computes may use from here on what was copied so far."""


class StreamCopier(Copier):
    """Copies of a device, on a stream of their own. Not run by us: no GPU was at hand."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)

    def begin(self) -> None:
        """By order of the streams; no host waits."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Between pinned memory and the device, which copy engines do."""
        with self._stream:
            into.copy_(source, non_blocking=True)
        for tensor in (into, source):
            if tensor.device == self._device:
                tensor.record_stream(self._stream)

    def mark(self) -> CopyEvent:
        """An event behind them."""
        return self._stream.record_event()

    def wait_for_copies(self) -> None:
        """The stream that computes waits for this one."""
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)


class Staging:
    """Buffers of the host that pieces pass through, as bytes, in turns. They grow to the largest piece and stay."""

    def __init__(self, copier: Copier) -> None:
        self.copier = copier
        self._going, self._coming = (_Buffers(pinned=copier.pinned) for _ in range(2))
        self._copied_back: deque[CopyEvent] = deque(maxlen=_ROUND - 1)

    def out(self, parts: Sequence[Tensor]) -> tuple[Tensor, CopyEvent]:
        """Begin to lay parts end to end where they can be sent from. Of those before, two may still travel."""
        staged = self._going.next(parts)
        for into, part in zip(_split_like(staged, parts), parts, strict=True):
            self.copier.copy(into, part)
        return staged, self.copier.mark()

    def room(self, parts: Sequence[Tensor]) -> Tensor:
        """Where parts may arrive, end to end."""
        if len(self._copied_back) == _ROUND - 1:
            self._copied_back[0].synchronize()  # this buffer was last used one piece earlier than that
        return self._coming.next(parts)

    def back(self, arrived: Tensor, parts: Sequence[Tensor]) -> None:
        """Begin to copy what arrived to where it is wanted."""
        for part, piece in zip(parts, _split_like(arrived, parts), strict=True):
            self.copier.copy(part, piece)
        self._copied_back.append(self.copier.mark())


class _Buffers:
    """Memory of the host that is used in turns."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned, self._turn = pinned, 0
        self._memory = [torch.empty(0, dtype=torch.uint8)] * _ROUND

    def next(self, parts: Sequence[Tensor]) -> Tensor:
        """Room for parts, end to end."""
        self._turn = (self._turn + 1) % _ROUND
        size = sum(map(len, parts))
        if len(self._memory[self._turn]) < size:
            self._memory[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[self._turn][:size]


def _split_like(rows: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return rows.split([len(part) for part in parts])
