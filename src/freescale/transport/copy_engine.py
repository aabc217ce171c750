"""All-to-all by GPU copy engines within one NVLink domain, on torch's symmetric memory. The one CUDA-only transport.

Copies to a peer's memory on a separate stream run on copy engines, so the SMs keep computing. The hosts exchange where
to write, and no host waits for a device. On the copy stream a transfer is: a barrier, after which the receive buffers
of all ranks may be written; the copies; a barrier, after which they are filled. All ranks put their transfers on the
stream in the same order, so any number of transfers may be in flight: torch's signals are binary, and a barrier leaves
none of them set. Not tested on a GPU; run `freescale selftest --device cuda` on yours.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from freescale.errors import TransportError
from freescale.transport.base import DEVICE_SLACK_SECONDS, PendingWork, TracerFactory, Transport, Work
from freescale.transport.c10d import C10d
from freescale.transport.chunked import ChunkedTransport, as_bytes
from freescale.transport.peer_sockets import Message, PeerSockets

ARENA_BYTES = 1 << 30
"""Memory per GPU and lane for received rows; each is freed with its last reference."""
_RESERVE = 4
"""How many transfers of average size must fit into this memory."""
_ALIGNED = 512
_WRITABLE, _FILLED = 0, 1
"""Signal channels of the barriers."""
_NOT_KERNELS = ("memcpy", "memset", "signal", "barrier")


@dataclass
class _Transfer:
    """A transfer that has begun."""

    outgoing: list[Tensor]
    """Bytes by rank."""
    own: Tensor
    """Where the bytes for this rank itself go."""
    begun: torch.Event
    """After the compute that made the rows and that used the receive buffer before."""
    filled: torch.Event | None = None
    """After the last barrier, once the transfer is on the copy stream."""


class CopyEngine(Transport):
    """Transfers between the GPUs of a group. Collective: construct it on all ranks, one per lane.

    `fallback` serves reductions: copies cannot add.
    """

    def __init__(self, group: dist.ProcessGroup, fallback: C10d | ChunkedTransport, *, name: str) -> None:
        self.peers, self.timeout = fallback.peers, fallback.timeout
        self._fallback = fallback
        self._tracer_factory: TracerFactory | None = None
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        self._device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        self._arena = Arena(group, self._device)
        self._stream = torch.Stream(self._device, priority=-1)
        self._waiting: deque[_Transfer] = deque()
        """Transfers that wait for offers, in order."""
        self._last: torch.Event | None = None
        self._offers: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        ranks = range(self.peers.world_size)
        self._sockets = PeerSockets(self.peers, ranks, name=name, timeout=self.timeout, on_message=self._on_message)

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Trace every transfer from now on, those of the fallback included."""
        self._tracer_factory = tracer
        self._fallback.add_tracer(tracer)

    def all_to_all(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        *,
        name: str,
        most: int | None = None,  # noqa: ARG002  a transfer is not cut
    ) -> PendingWork[Tensor]:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receive likewise."""
        tracer = self._tracer_factory(name, rows.nbytes) if self._tracer_factory is not None else None
        rows = rows.contiguous()
        rows.record_stream(self._stream)  # copies may run after the last reference is gone
        out, reusable = self._arena.allocate(rows, sum(receive))
        for event in reusable:
            torch.accelerator.current_stream(self._device).wait_event(event)
        outgoing, incoming = ([as_bytes(part) for part in x.split(list(n))] for x, n in ((rows, send), (out, receive)))
        begun = torch.accelerator.current_stream(self._device).record_event()
        transfer = _Transfer(outgoing, incoming[self.peers.rank], begun)
        with self.peers.guard(name):
            for peer, part in enumerate(incoming):
                if peer != self.peers.rank and len(part):
                    self._sockets.send(peer, b"o", self._arena.offset(part), len(part))
            self._waiting.append(transfer)
            self._sockets.poll()
            while self._waiting and self._missing_offer(self._waiting[0]) is None:
                self._launch(self._waiting.popleft())
        finish, is_filled = partial(self._finish, transfer), partial(self._is_filled, transfer)
        return PendingWork(name, self, tracer, finish, lambda: out, is_filled)

    def all_reduce(self, values: Tensor, *, name: str) -> Work[Tensor]:
        """Sum values over all ranks, in place."""
        return self._fallback.all_reduce(values, name=name)

    def busy(self, rate: float = 0.0) -> bool:
        """Return whether a transfer may be moving bytes."""
        return (self._last is not None and not self._last.query()) or self._fallback.busy(rate)

    def _finish(self, transfer: _Transfer, seconds: float) -> None:
        """Launch transfers up to this one, and let the compute stream wait for it; the host does not wait."""
        until = time.monotonic() + seconds
        while transfer.filled is None:
            while (peer := self._missing_offer(self._waiting[0])) is not None:
                self._sockets.wait_until(partial(self._has_offer, peer), peer, until)
            self._launch(self._waiting.popleft())
        torch.accelerator.current_stream(self._device).wait_event(transfer.filled)

    def _is_filled(self, transfer: _Transfer) -> bool:
        return transfer.filled is not None and transfer.filled.query()

    def _has_offer(self, peer: int) -> bool:
        return bool(self._offers[peer])

    def _missing_offer(self, transfer: _Transfer) -> int | None:
        """Return a peer that has not yet offered memory for its part, if any."""
        sent = [peer for peer, part in enumerate(transfer.outgoing) if peer != self.peers.rank and len(part)]
        return next((peer for peer in sent if not self._offers[peer]), None)

    def _launch(self, transfer: _Transfer) -> None:
        """Put a transfer on the copy stream."""
        self._stream.wait_event(transfer.begun)
        with self._stream:
            self._arena.barrier(_WRITABLE, self.timeout)
            if len(transfer.own):
                transfer.own.copy_(transfer.outgoing[self.peers.rank], non_blocking=True)
            others = [*range(self.peers.rank + 1, self.peers.world_size), *range(self.peers.rank)]
            for peer in others:  # each rank begins with the next one, so that not all write to the same rank
                if len(part := transfer.outgoing[peer]):
                    self._arena.memory_of(peer, *self._offers[peer].popleft()).copy_(part, non_blocking=True)
            self._arena.barrier(_FILLED, self.timeout)
        transfer.filled = self._last = self._stream.record_event()
        transfer.outgoing.clear()

    def _on_message(self, message: Message) -> None:
        self._offers[message.peer].append((message.numbers[0], message.numbers[1]))


class Arena:
    """Symmetric memory of this rank for received rows. Collective: construct it on all ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # Only this backend of torch has working signals between any two ranks.
        symmetric.set_backend("CUDA")
        self._device = device
        self._memory = symmetric.empty(ARENA_BYTES, dtype=torch.uint8, device=device)
        self._shared: Any = symmetric.rendezvous(self._memory, group)
        self._used: dict[int, int] = {}
        """Begin and end of the ranges in use."""
        self._freed: deque[tuple[int, torch.Event]] = deque()
        """Begin of ranges that any thread has freed since, and the event after their last use."""

    def allocate(self, like: Tensor, rows: int) -> tuple[Tensor, list[torch.Event]]:
        """Allocate rows like those of a tensor, and return the events to wait for before they may be written.

        The memory is freed with the last reference, after the work that the current stream has at that time.
        """
        size = rows * like.shape[1:].numel() * like.element_size()
        if not size:
            return like.new_empty((rows, *like.shape[1:])), []
        events = []
        while self._freed:
            begin, event = self._freed.popleft()
            del self._used[begin]
            events.append(event)
        first = self._reserve(-(-size // _ALIGNED) * _ALIGNED)
        values = bytes_at(self._memory, first, size, partial(self._free, first))
        return values.view(like.dtype).view(rows, *like.shape[1:]), events

    def offset(self, part: Tensor) -> int:
        """Return where allocated memory is in the arena."""
        return part.data_ptr() - self._memory.data_ptr()

    def memory_of(self, peer: int, first: int, size: int) -> Tensor:
        """Return bytes of a peer's arena."""
        return self._shared.get_buffer(peer, [size], torch.uint8, first)

    def barrier(self, channel: int, seconds: float) -> None:
        """Let the current stream wait for those of all ranks. The device fails some time after so many seconds.

        The host waits for so long and names the missing ranks; an error of the device would end the process first.
        """
        self._shared.barrier(channel, int((seconds + DEVICE_SLACK_SECONDS) * 1e3))

    def _free(self, first: int) -> None:
        self._freed.append((first, torch.accelerator.current_stream(self._device).record_event()))

    def _reserve(self, size: int) -> int:
        """Reserve the first free range of the arena."""
        first = 0
        for begin, end in sorted(self._used.items()):
            if begin - first >= size:
                break
            first = end
        if first + size > len(self._memory):
            used = sum(end - begin for begin, end in self._used.items())
            what = f"{size:,} received bytes do not fit into the {len(self._memory):,} reserved for them"
            remedy = "choose another transport than copy_engine, or a smaller batch"
            raise TransportError(what, where=f"{used:,} of them are in use", remedy=remedy)
        self._used[first] = first + size
        return first


class _Lease:
    """Device bytes for a tensor, which references this object while it lives."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def bytes_at(memory: Tensor, first: int, size: int, on_free: Callable[[], None]) -> Tensor:
    """Return some bytes of the memory of a device. `on_free` is called when the last tensor over them is gone."""
    lease = _Lease(memory.data_ptr() + first, size)
    finalize(lease, on_free)
    return torch.as_tensor(lease, device=memory.device)


def unavailable_reason(group: dist.ProcessGroup, hosts: Sequence[int], *, sent_bytes: int) -> str:
    """Return why the GPUs of a group cannot write to each other's memory; empty if they can.

    `sent_bytes`: approximate bytes that a rank sends per transfer. Longer batches and several transfers must fit too.
    """
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if (visible := torch.accelerator.device_count()) < group.size():
        return f"a rank sees {visible} of the GPUs of {group.size()} ranks; a GPU per task hides the others"
    if _RESERVE * sent_bytes > ARENA_BYTES:
        return f"transfers of {sent_bytes:,} bytes need more than the {ARENA_BYTES:,} reserved for received rows"
    own = torch.accelerator.current_device_index()
    far = [d for d in range(group.size()) if d != own and not torch.cuda.can_device_access_peer(own, d)]
    return f"GPU {own} cannot write to GPUs {far}" if far else ""


def kernels_launched_by(transfer: Callable[[], object]) -> list[str]:
    """Return the kernels that a transfer runs on this GPU, except signals. Detects a silent fallback to SMs."""
    from torch.profiler import ProfilerActivity, profile

    transfer()
    torch.accelerator.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        transfer()
        torch.accelerator.synchronize()
    events = [event for event in profiled.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = {event.name for event in events if not any(word in event.name.lower() for word in _NOT_KERNELS)}
    return sorted(kernels)
