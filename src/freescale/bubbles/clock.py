"""Clocks of hosts and devices, and their alignment between hosts.

A mark is a point in time. On a CPU it is the time itself. On a GPU it is an event on a stream, which can be read once
the device has passed it; reading it one step later does not block.
"""

import contextlib
import hashlib
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from freescale.connections import BackgroundWork, GlooWire, Tree, TreeCollectives, Wire

_ROUNDS = 5
_MOVE_BASE_MS = 1000.0


class HostClock:
    """The monotonic clock of the host: a mark is its own time."""

    mark: Callable[[], Any] = staticmethod(time.monotonic_ns)
    """Return a mark of the current time."""

    def read(self, mark: Any) -> int:
        """Return the time of a mark in nanoseconds of the monotonic clock. Blocks until it has passed."""
        return mark


class DeviceClock(HostClock):
    """Marks on a device stream: the time when all earlier work of the stream is done."""

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._base = self.mark()
        self._base.synchronize()
        self._base_ns = time.monotonic_ns()

    def mark(self) -> Any:
        """Record an event."""
        event = self._event()
        event.record()
        return event

    def read(self, mark: Any) -> int:
        """Measure from a base event with a known time. The base advances, since the distance is a 32-bit float.

        Blocks a host that runs more than a step ahead of its device.
        """
        mark.synchronize()
        elapsed = self._base.elapsed_time(mark)
        ns = self._base_ns + round(elapsed * 1e6)
        if elapsed > _MOVE_BASE_MS:
            self._base, self._base_ns = mark, ns
        return ns


def build_clock(device: torch.device | None) -> HostClock:
    """Return the clock of a device; by default the accelerator, else the CPU."""
    device = _resolve_device(device)
    if device.type == "cpu":
        return HostClock()
    return DeviceClock(lambda: torch.Event(device, enable_timing=True))


def device_name(device: torch.device | None) -> str:
    """Return the product name of a device, or `cpu`."""
    device = _resolve_device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _resolve_device(device: torch.device | None) -> torch.device:
    return device or torch.accelerator.current_accelerator() or torch.device("cpu")


class ClockOffset(NamedTuple):
    """What to add to this rank's clock to get rank 0's, and the error bound, in nanoseconds."""

    add: int = 0
    bound: int = 0
    widest: int = 0
    """The largest bound of any rank."""


def clock_id() -> int:
    """Return an id of the clock that this process reads: per boot and time namespace."""
    name = platform.node()
    with contextlib.suppress(OSError):  # not Linux
        name += Path("/proc/sys/kernel/random/boot_id").read_text()
    with contextlib.suppress(OSError):  # no time namespaces
        name += str(Path("/proc/self/ns/time").readlink())
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


class ClockAlignment:
    """Measures every rank's clock offset from rank 0. `measure` is collective.

    One process per clock measures, along a binomial tree, so that a thousand hosts take ten rounds. It keeps the
    fastest of a few round trips: the peer read its clock at some point of it, so half of it is the error bound. Bounds
    add up along the tree. The drift since the last measurement is added to the bound.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout: float = 600.0) -> None:
        self._wire, self._timeout = GlooWire(group), timeout
        self._tree = TreeCollectives(self._wire)
        gathering = BackgroundWork(lambda: self._tree.all_gather(torch.tensor(clock_id())), name="gathering of clocks")
        names = gathering.wait(timeout).tolist()
        first = {name: rank for rank, name in reversed([*enumerate(names)])}
        self._leaders = sorted(first.values())
        self._leader = first[names[self._wire.rank]]
        self._before: int | None = None

    def measure(self) -> ClockOffset:
        """Return the current offset."""
        if len(self._leaders) == 1:
            return ClockOffset()
        return BackgroundWork(self._measure, name="clock alignment").wait(self._timeout)

    def _measure(self) -> ClockOffset:
        offset = torch.tensor([0, 0])
        if self._wire.rank == self._leader:
            offset = measure_along_tree(self._wire, self._leaders)
            now = int(offset[0])
            offset[1] += 0 if self._before is None else abs(now - self._before)
            self._before = now
        offsets = self._tree.all_gather(offset)
        return ClockOffset(*offsets[self._leader].tolist(), widest=int(offsets[:, 1].max()))


def measure_along_tree(wire: Wire, leaders: Sequence[int]) -> torch.Tensor:
    """Measure a leader against its parent, whose offset is known, then serve its children, large subtrees first."""
    tree, place = Tree(len(leaders)), leaders.index(wire.rank)
    offset = _query(wire, leaders[tree.parent(place)]) if place else torch.tensor([0, 0])
    for child in reversed(tree.children(place)):
        _serve(wire, leaders[child], offset)
    return offset


def _query(wire: Wire, peer: int) -> torch.Tensor:
    best, answer = torch.tensor([0, 2**62]), torch.zeros(2, dtype=torch.int64)
    for _ in range(_ROUNDS):
        sent = time.monotonic_ns()
        wire.send(answer, peer)
        wire.receive(answer, peer)
        received = time.monotonic_ns()
        peer_ns, peer_bound = answer.tolist()
        bound = peer_bound + (received - sent + 1) // 2
        if bound < int(best[1]):
            best = torch.tensor([peer_ns - (sent + received) // 2, bound])
    return best


def _serve(wire: Wire, peer: int, offset: torch.Tensor) -> None:
    answer = torch.zeros(2, dtype=torch.int64)
    for _ in range(_ROUNDS):
        wire.receive(answer, peer)
        answer[0], answer[1] = time.monotonic_ns() + int(offset[0]), offset[1]
        wire.send(answer, peer)
