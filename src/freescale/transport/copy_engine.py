"""Symmetric memory between GPUs of one NVLink domain, on torch's symmetric memory. The one CUDA-only transport.

Copies to a peer's memory on a separate stream run on copy engines, so the SMs keep computing. The hosts exchange where
to write. The devices signal that a buffer may be written and that it is filled, so no host waits for a device.
`shared_memory` runs the same protocol on CPUs. Not tested on a GPU; run `freescale selftest --device cuda` on yours.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from freescale.errors import TransportError
from freescale.transport.base import Peers
from freescale.transport.peer_sockets import Message, PeerSockets

ARENA_BYTES = 1 << 30
"""Memory per GPU and lane for received rows; each is freed with its last reference."""
_ALIGNED = 512
_OFFERED, _FILLED = 0, 1
"""Signal channels."""
_NOT_KERNELS = ("memcpy", "memset", "signal")


class CopyEngine:
    """Memory of the GPUs of a group. Collective: construct it on all ranks, one per lane: lanes share no signals."""

    def __init__(self, group: dist.ProcessGroup, peers: Peers, *, name: str, timeout: float) -> None:
        self.ranks = list(range(group.size()))
        self._timeout_ms = int(timeout * 1e3)
        self._device = torch.device("cuda", torch.cuda.current_device())
        # Only this backend of torch has working signals between any two ranks.
        symmetric.set_backend("CUDA")
        self._arena = symmetric.empty(ARENA_BYTES, dtype=torch.uint8, device=self._device)
        self._shared = symmetric.rendezvous(self._arena, group)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._leased: dict[int, int] = {}
        """Begin and end of the ranges in use."""
        self._offers: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._sockets = PeerSockets(peers, self.ranks, name=name, timeout=timeout, on_message=self._on_message)

    def allocate(self, like: Tensor, rows: int) -> Tensor:
        """Allocate memory of this rank for rows like those of a tensor. It is freed with the last reference."""
        size = rows * like.shape[1:].numel() * like.element_size()
        if not size:
            return like.new_empty((rows, *like.shape[1:]))
        first = self._reserve(-(-size // _ALIGNED) * _ALIGNED)
        lease = _Lease(self._arena.data_ptr() + first, size)
        finalize(lease, self._leased.pop, first)
        return torch.as_tensor(lease, device=self._device).view(like.dtype).view(rows, *like.shape[1:])

    def offer(self, peer: int, part: Tensor) -> None:
        """Let a peer fill a part of allocated memory, once the compute that used it before is done."""
        self._sockets.send(peer, b"o", part.data_ptr() - self._arena.data_ptr(), len(part))
        self._shared.put_signal(peer, _OFFERED, self._timeout_ms)

    def has_offer(self, peer: int) -> bool:
        """Return whether a peer has offered a part that was not taken yet."""
        if not self._offers[peer]:
            self._sockets.poll()
        return bool(self._offers[peer])

    def take(self, peer: int, *, until: float) -> Tensor:
        """Wait for the oldest part that a peer has offered, and return it."""
        self._sockets.wait_until(lambda: bool(self._offers[peer]), peer, until)
        first, size = self._offers[peer].popleft()
        self._shared.wait_signal(peer, _OFFERED, self._timeout_ms)
        return self._shared.get_buffer(peer, [size], torch.uint8, first)

    def signal_filled(self, peer: int) -> None:
        """Signal a peer after the copies issued so far."""
        self._shared.put_signal(peer, _FILLED, self._timeout_ms)

    def wait_filled(self, peer: int, *, until: float) -> None:  # noqa: ARG002
        """Let the copy stream wait for a peer. The device fails after the timeout of this memory."""
        self._shared.wait_signal(peer, _FILLED, self._timeout_ms)

    def copy_context(self) -> AbstractContextManager[object]:
        """Issue copies after the compute so far, concurrent with later compute."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def wait_for_copies(self) -> None:
        """Let the compute stream wait for the copies; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _reserve(self, size: int) -> int:
        """Reserve the first free range of the arena."""
        first = 0
        for begin, end in sorted(self._leased.items()):
            if begin - first >= size:
                break
            first = end
        if first + size > len(self._arena):
            used = sum(end - begin for begin, end in self._leased.items())
            what = f"{size:,} received bytes do not fit into the {len(self._arena):,} reserved for them"
            remedy = "choose another transport than copy_engine, or a smaller batch"
            raise TransportError(what, where=f"{used:,} of them are in use", remedy=remedy)
        self._leased[first] = first + size
        return first

    def _on_message(self, message: Message) -> None:
        self._offers[message.peer].append((message.numbers[0], message.numbers[1]))


class _Lease:
    """Device bytes for a tensor, which references this object while it lives."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def unavailable_reason(group: dist.ProcessGroup, hosts: Sequence[int]) -> str:
    """Return why the GPUs of a group cannot write to each other's memory; empty if they can."""
    if not torch.cuda.is_available():
        return "no GPU is here"
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if torch.cuda.device_count() < group.size():
        return f"{group.size()} ranks share {torch.cuda.device_count()} GPUs"
    own = torch.cuda.current_device()
    far = [d for d in range(group.size()) if d != own and not torch.cuda.can_device_access_peer(own, d)]
    return f"GPU {own} cannot write to GPUs {far}" if far else ""


def kernels_launched_by(transfer: Callable[[], object]) -> list[str]:
    """Return the kernels that a transfer runs on this GPU, except signals. Detects a silent fallback to SMs."""
    from torch.profiler import ProfilerActivity, profile

    transfer()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        transfer()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = {event.name for event in events if not any(word in event.name.lower() for word in _NOT_KERNELS)}
    return sorted(kernels)
