"""Symmetric memory between GPUs of one NVLink domain, on torch's own. The only file that speaks to CUDA by name.

Copies into a peer's memory on a stream of their own are done by the copy engines, so the cores of the GPU compute on.
Where to write is said between hosts; that it may be written, and that it is, is signalled between devices, so no host
waits for a device. The CPU twin that runs the same protocol is `shared_memory`. Not run by us: no GPU was at hand;
`freescale selftest --device cuda` runs it on yours.
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
"""Of every GPU, for a lane: what arrives lies here until nobody holds it any more."""
_ALIGNED = 512
_OFFERED, _FILLED = 0, 1
"""Channels of signals."""
_NOT_KERNELS = ("memcpy", "memset", "signal")


class CopyEngine:
    """Room in memory of the GPUs of a group, all of which must come here. Use one per lane: signals are its own."""

    def __init__(self, group: dist.ProcessGroup, peers: Peers, *, name: str, timeout: float) -> None:
        self.ranks = list(range(group.size()))
        self._timeout_ms = int(timeout * 1e3)
        self._device = torch.device("cuda", torch.cuda.current_device())
        # Of torch's backends only this one has signals between any two ranks that do what they say.
        symmetric.set_backend("CUDA")
        self._arena = symmetric.empty(ARENA_BYTES, dtype=torch.uint8, device=self._device)
        self._shared = symmetric.rendezvous(self._arena, group)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._leased: dict[int, int] = {}
        """First and last byte of what is in use."""
        self._offers: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._links = PeerSockets(peers, self.ranks, name=name, timeout=timeout, hear=self._hear)

    def room(self, like: Tensor, rows: int) -> Tensor:
        """Memory of this rank for rows such as those of another tensor, until nobody holds it any more."""
        size = rows * like.shape[1:].numel() * like.element_size()
        if not size:
            return like.new_empty((rows, *like.shape[1:]))
        first = self._gap(-(-size // _ALIGNED) * _ALIGNED)
        lease = _Lease(self._arena.data_ptr() + first, size)
        finalize(lease, self._leased.pop, first)
        return torch.as_tensor(lease, device=self._device).view(like.dtype).view(rows, *like.shape[1:])

    def offer(self, peer: int, part: Tensor) -> None:
        """Let a peer fill a part of such room, once what used that room before is computed."""
        self._links.say(peer, b"o", part.data_ptr() - self._arena.data_ptr(), len(part))
        self._shared.put_signal(peer, _OFFERED, self._timeout_ms)

    def offered(self, peer: int) -> bool:
        """Whether a peer has offered a part that was not taken yet."""
        if not self._offers[peer]:
            self._links.listen()
        return bool(self._offers[peer])

    def take(self, peer: int, *, until: float) -> Tensor:
        """The oldest part that a peer has offered; fails at a moment of the monotonic clock."""
        self._links.wait_until(lambda: bool(self._offers[peer]), peer, until)
        first, size = self._offers[peer].popleft()
        self._shared.wait_signal(peer, _OFFERED, self._timeout_ms)
        return self._shared.get_buffer(peer, [size], torch.uint8, first)

    def filled(self, peer: int) -> None:
        """Tell a peer, behind the copies that were asked for so far."""
        self._shared.put_signal(peer, _FILLED, self._timeout_ms)

    def wait(self, peer: int, *, until: float) -> None:  # noqa: ARG002
        """Let what is asked for next wait for a peer. The device gives up at the timeout of this memory."""
        self._shared.wait_signal(peer, _FILLED, self._timeout_ms)

    def moving(self) -> AbstractContextManager[object]:
        """Behind what was computed so far, beside what will be."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def wait_for_copies(self) -> None:
        """The stream that computes waits for the copies, no host does."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _gap(self, size: int) -> int:
        """Take the first bytes of the arena that are free."""
        first = 0
        for begin, end in sorted(self._leased.items()):
            if begin - first >= size:
                break
            first = end
        if first + size > len(self._arena):
            used = sum(end - begin for begin, end in self._leased.items())
            what = f"{size:,} bytes that arrive do not fit into the {len(self._arena):,} kept for that"
            remedy = "choose another transport than copy_engine, or a smaller batch"
            raise TransportError(what, where=f"{used:,} of them are in use", remedy=remedy)
        self._leased[first] = first + size
        return first

    def _hear(self, message: Message) -> None:
        self._offers[message.peer].append((message.numbers[0], message.numbers[1]))


class _Lease:
    """Bytes of a device for a tensor, which keeps this object for as long as it lives."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def unavailable_reason(group: dist.ProcessGroup, hosts: Sequence[int]) -> str:
    """Why the GPUs of a group cannot reach each other's memory; nothing if they can."""
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
    """Kernels that ran on this GPU during a transfer, but for those that signal: a fall-back is silent otherwise."""
    from torch.profiler import ProfilerActivity, profile

    transfer()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        transfer()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    moved = {event.name for event in events if not any(word in event.name.lower() for word in _NOT_KERNELS)}
    return sorted(moved)
