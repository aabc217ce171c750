"""Where moments come from, and what one host's clock shows when another's shows something else.

A mark is a moment. On a CPU it is read at once. On a GPU it is an event in the queue of the device, which can be read
when the device has come past it; whoever reads marks a step later never waits.
"""

import contextlib
import hashlib
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_ROUNDS = 5
_MOVE_BASE_MS = 1000.0


class HostClock:
    """Gives moments: those of the process itself, each of which is its own time."""

    mark: Callable[[], Any] = staticmethod(time.monotonic_ns)
    """Notes this moment."""

    def read(self, mark: Any) -> int:
        """Nanoseconds of a moment, on the host's monotonic clock. Waits until it has passed."""
        return mark


class DeviceClock(HostClock):
    """Moments of a device's queue: when the work that was queued before them is done."""

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._base = self.mark()
        self._base.synchronize()
        self._base_ns = time.monotonic_ns()

    def mark(self) -> Any:
        """Queue an event."""
        event = self._event()
        event.record()
        return event

    def read(self, mark: Any) -> int:
        """Count from an event whose time is known. That one moves along, since the distance is a 32-bit float.

        A host that runs more than a step ahead of its device is held back here.
        """
        mark.synchronize()
        passed = self._base.elapsed_time(mark)
        found = self._base_ns + round(passed * 1e6)
        if passed > _MOVE_BASE_MS:
            self._base, self._base_ns = mark, found
        return found


def build_clock(device: torch.device | None) -> HostClock:
    """The clock that shows what a device is doing: the one given, else the accelerator, else the CPU."""
    device = _resolve_device(device)
    if device.type == "cpu":
        return HostClock()
    return DeviceClock(lambda: torch.Event(device, enable_timing=True))


def device_name(device: torch.device | None) -> str:
    """What its maker calls it; cpu, if it is one."""
    device = _resolve_device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _resolve_device(device: torch.device | None) -> torch.device:
    return device or torch.accelerator.current_accelerator() or torch.device("cpu")


class ClockOffset(NamedTuple):
    """What to add to this rank's clock to get rank 0's, and how wrong that may be. Nanoseconds."""

    add: int = 0
    bound: int = 0
    widest: int = 0
    """The largest bound of any rank."""


def clock_id() -> int:
    """The same number for all processes that read the same clock: of one boot, in one time namespace."""
    name = platform.node()
    with contextlib.suppress(OSError):  # not Linux
        name += Path("/proc/sys/kernel/random/boot_id").read_text()
    with contextlib.suppress(OSError):  # no time namespaces
        name += str(Path("/proc/self/ns/time").readlink())
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


class ClockAlignment:
    """Finds every rank's offset from rank 0. All ranks of the group call `measure` together.

    One process per clock asks, along a binomial tree, so that a thousand hosts take ten rounds. Who asks takes the
    quickest of a few answers: the answer was given at some moment of the round trip, so half of that is the bound, and
    bounds add up along the tree. Clocks drift: what the offset moved since the last time is added to the bound.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, group.rank()
        names = _all_gather(torch.tensor([clock_id()]), group)[:, 0].tolist()
        self._leaders = [rank for rank, name in enumerate(names) if names.index(name) == rank]
        self._leader = names.index(names[self._rank])
        self._before: int | None = None

    def measure(self) -> ClockOffset:
        """Ask again."""
        if len(self._leaders) == 1:
            return ClockOffset()
        found = torch.tensor([0, 0])
        if self._rank == self._leader:
            found = self._along_the_tree(self._leaders.index(self._rank))
            now = int(found[0])
            found[1] += 0 if self._before is None else abs(now - self._before)
            self._before = now
        every = _all_gather(found, self._group)
        return ClockOffset(*every[self._leader].tolist(), widest=int(every[:, 1].max()))

    def _along_the_tree(self, place: int) -> torch.Tensor:
        """Ask the one who knows already, then answer those who do not yet."""
        found, distance = torch.tensor([0, 0]), 1
        while distance < len(self._leaders):
            if distance <= place < 2 * distance:
                found = self._ask(self._leaders[place - distance])
            elif place < distance and place + distance < len(self._leaders):
                self._answer(self._leaders[place + distance], found)
            distance *= 2
        return found

    def _ask(self, who: int) -> torch.Tensor:
        best, answer = torch.tensor([0, 2**62]), torch.zeros(2, dtype=torch.int64)
        for _ in range(_ROUNDS):
            sent = time.monotonic_ns()
            dist.send(answer, group=self._group, group_dst=who)
            dist.recv(answer, group=self._group, group_src=who)
            got = time.monotonic_ns()
            there, their_bound = answer.tolist()
            bound = their_bound + (got - sent + 1) // 2
            if bound < int(best[1]):
                best = torch.tensor([there - (sent + got) // 2, bound])
        return best

    def _answer(self, who: int, found: torch.Tensor) -> None:
        answer = torch.zeros(2, dtype=torch.int64)
        for _ in range(_ROUNDS):
            dist.recv(answer, group=self._group, group_src=who)
            answer[0], answer[1] = time.monotonic_ns() + int(found[0]), found[1]
            dist.send(answer, group=self._group, group_dst=who)


def _all_gather(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values, group=group)
    return torch.stack(parts)
