"""How quick a way is on these machines, and what it takes from compute that goes on beside it.

A table of both, the same on every rank: of all ranks the slowest counts, since a step waits for it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from freescale.progress import track
from freescale.transport.c10d import C10d
from freescale.transport.handle import Transport

_SECONDS = 0.02
"""What each measurement may take, roughly."""


@dataclass(frozen=True)
class Measured:
    """One way at one size."""

    way: str
    sent_bytes: int
    seconds: float
    """Of a transfer that everybody waits for."""
    taken_seconds: float
    """Of compute, by a transfer behind it."""


def probe(
    ways: Mapping[str, Transport], control: C10d, device: torch.device, *, sizes: Sequence[int], rounds: int = 3
) -> list[Measured]:
    """Measure every way at every size, in turns. `sizes`: bytes that a rank sends in one transfer."""
    compute = Compute(device)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    turns = [(size, *way) for _ in range(rounds) for size in sizes for way in ways.items()]
    for size, name, transport in track(turns, "measuring transports", in_background=False):
        one = _measured(_transfer(transport, size, device), control, compute)
        found.setdefault((name, size), []).append(one)
    flat = torch.tensor([[median(column) for column in zip(*times, strict=True)] for times in found.values()])
    agreed = control.all_reduce(flat.to(device), name="probe", how=dist.ReduceOp.MAX).wait().tolist()
    return [Measured(*key, *times) for key, times in zip(found, agreed, strict=True)]


class Compute:
    """Something to compute while bytes move: products of matrices, one after another."""

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.rand(192 if device.type == "cpu" else 4096, device=device).expand(192, -1).contiguous()
        self._product = self._matrix @ self._matrix.T

    def until(self, done: Callable[[], bool]) -> float:
        """Products per second until something is done."""
        count, began = 0, time.perf_counter()
        while not done():
            torch.mm(self._matrix, self._matrix.T, out=self._product)
            if self._product.is_cuda:
                torch.accelerator.synchronize()
            count += 1
        return count / (time.perf_counter() - began)

    def alone(self, seconds: float) -> float:
        """Products per second when nothing moves."""
        end = time.perf_counter() + seconds
        return self.until(lambda: time.perf_counter() > end)


def _transfer(transport: Transport, size: int, device: torch.device) -> Callable[[], None]:
    """An even exchange in which this rank sends so many bytes."""
    world_size = transport.peers.world_size
    counts = [max(1, size // world_size)] * world_size
    rows = torch.zeros(sum(counts), dtype=torch.uint8, device=device)

    def once() -> None:
        transport.all_to_all(rows, counts, counts, name="probe").wait()
        if rows.is_cuda:
            torch.accelerator.synchronize()

    return once


def _measured(once: Callable[[], None], control: C10d, compute: Compute) -> tuple[float, float]:
    """Seconds of a transfer, and those that it takes from compute."""
    once()
    one = _clocked(once, control, 1)
    # As often on every rank: all have to take part in every transfer.
    times = max(1, control.largest(int(_SECONDS / max(one, 1e-6)), name="probe"))
    alone = _clocked(once, control, times)
    quiet = compute.alone(alone * times)
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(lambda: [once() for _ in range(times)])
        beside = compute.until(moving.done)
        moving.result()  # raises what went wrong there
    return alone, max(0.0, 1 - beside / quiet) * (time.perf_counter() - began) / times


def _clocked(once: Callable[[], None], control: C10d, times: int) -> float:
    control.total(0, name="probe")
    began = time.perf_counter()
    for _ in range(times):
        once()
    return (time.perf_counter() - began) / times
