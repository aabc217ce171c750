"""Symmetric memory of virtual GPUs: a file that all ranks map, and barriers of binary signals.

Signals are torch's: putting one waits until the last one was taken, and taking one waits for it. They and the copies of
their stream run in the order of that stream on a thread of its own, as on a device: no host waits for them.
"""

import mmap
import os
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.vgpu import device as vgpu

_CHANNELS = 16
_POLL_SECONDS = 1e-5


class QueuedTask:
    """A task of a stream: a transfer that the next use of a tensor waits for."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class StreamQueue:
    """Runs what is launched on one stream, in order, on a thread."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[tuple[Future[None], Callable[[], object]]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True, name="vgpu-stream").start()

    def submit(self, task: Callable[[], object]) -> "QueuedTask":
        future: Future[None] = Future()
        self._tasks.put((future, task))
        return QueuedTask(future)

    def _work(self) -> None:
        failure: Exception | None = None
        while True:
            future, task = self._tasks.get()
            try:
                if failure is None:
                    task()
            except Exception as error:  # on a device, nothing later runs either
                failure = error
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)


class SharedHandle:
    """What `rendezvous` returns: the memory and the signals of all ranks."""

    def __init__(self, arena: int, memory: list[mmap.mmap], signals: list[mmap.mmap], rank: int) -> None:
        self._arena, self._memory, self._signals, self.rank = arena, memory, signals, rank
        self.world_size = len(memory)

    def get_buffer(self, peer: int, sizes: list[int], dtype: torch.dtype, first: int) -> Tensor:
        """Return memory of a peer."""
        return vgpu.on_device(torch.frombuffer(self._memory[peer], dtype=dtype, count=sizes[0], offset=first))

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Put a signal to every other rank, then take theirs, on the current stream."""
        vgpu.launches[vgpu.thread_name(), vgpu.source_line(), "barrier"] += 1
        vgpu.gpu.memory.check_arena(self._arena)
        task = run_on_stream(lambda: self._signal_all(channel, timeout_ms / 1e3))
        for storage in list(_allocated[self._arena]):  # peers write to these until the barrier
            storage.transfers = [*getattr(storage, "transfers", ()), task]

    def put_signal(self, peer: int, channel: int, timeout_ms: int) -> None:
        vgpu.launches[vgpu.thread_name(), vgpu.source_line(), "put_signal"] += 1
        run_on_stream(lambda: self._put(peer, channel, time.monotonic() + timeout_ms / 1e3))

    def wait_signal(self, peer: int, channel: int, timeout_ms: int) -> None:
        vgpu.launches[vgpu.thread_name(), vgpu.source_line(), "wait_signal"] += 1
        run_on_stream(lambda: self._take(peer, channel, time.monotonic() + timeout_ms / 1e3))

    def _signal_all(self, channel: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for peer in others:
            self._put(peer, channel, until)
        for peer in others:
            self._take(peer, channel, until)

    def _put(self, peer: int, channel: int, until: float) -> None:
        self._swap(self._signals[peer], self._place(self.rank, channel), 0, 1, until)

    def _take(self, peer: int, channel: int, until: float) -> None:
        self._swap(self._signals[self.rank], self._place(peer, channel), 1, 0, until)

    def _place(self, sender: int, channel: int) -> int:
        return sender * _CHANNELS + channel

    @staticmethod
    def _swap(pad: mmap.mmap, place: int, expected: int, new: int, until: float) -> None:
        # Each byte has one writer for 0 -> 1 and one for 1 -> 0, so no atomic operation is needed.
        while pad[place] != expected:
            if time.monotonic() > until:
                raise RuntimeError(f"signal {place} did not become {expected} in time")
            time.sleep(_POLL_SECONDS)
        pad[place] = new


def run_on_stream(task: Callable[[], None]) -> QueuedTask:
    """Run a task in the order of the current stream, which gets a queue of its own."""
    stream = vgpu.gpu.guard.current_stream()
    if stream not in vgpu.queues:
        vgpu.queues[stream] = StreamQueue()
    queued = vgpu.queues[stream].submit(task)
    vgpu.progress.add(stream, queued)
    return queued


_allocated: defaultdict[int, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
"""Storages of allocated memory, by arena."""


def install(folder: str) -> None:
    """Replace torch's symmetric memory. `folder`: shared by the ranks of a run."""
    from freescale.transport import copy_engine

    arenas: dict[int, tuple[int, mmap.mmap]] = {}

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        own = _map(f"{folder}/memory-{len(arenas)}-{vgpu.gpu.own_index}", size)
        _map(f"{folder}/signals-{len(arenas)}-{vgpu.gpu.own_index}", size=1 << 16)
        memory = vgpu.on_device(torch.frombuffer(own, dtype=dtype))
        arenas[memory.data_ptr()] = len(arenas), own
        return memory

    def rendezvous(memory: Tensor, group: dist.ProcessGroup) -> SharedHandle:
        number, _ = arenas[memory.data_ptr()]
        names = [f"{number}-{rank}" for rank in range(group.size())]
        parts = [[_map(f"{folder}/{kind}-{name}") for name in names] for kind in ("memory", "signals")]
        return SharedHandle(number, parts[0], parts[1], group.rank())

    def bytes_at(memory: Tensor, first: int, size: int, on_free: Callable[[], None]) -> Tensor:
        arena, own = arenas[memory.data_ptr()]
        part = vgpu.on_device(torch.frombuffer(own, dtype=torch.uint8, count=size, offset=first))
        finalize(part.untyped_storage(), on_free)
        vgpu.gpu.memory.mark_arena(part, arena)
        _allocated[arena].add(part.untyped_storage())
        return part

    symmetric = copy_engine.symmetric
    symmetric.set_backend, symmetric.empty, symmetric.rendezvous = lambda _: None, empty, rendezvous  # type: ignore[assignment]
    copy_engine.bytes_at = bytes_at
    copy_engine.ARENA_BYTES = 1 << 24
    torch.cuda.can_device_access_peer = lambda *_: True  # type: ignore[assignment]


def _map(path: str, size: int = 0) -> mmap.mmap:
    """Map a file; create it with a size, or wait until its rank has created it."""
    if size:
        with open(f"{path}.new", "wb") as file:
            file.truncate(size)
        os.rename(f"{path}.new", path)
    until = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.01)
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)
