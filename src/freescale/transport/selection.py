"""Which way bytes take: what is possible here, what measures best, and why; all ranks choose alike.

A choice changes no result: every way moves the same bytes.
"""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from freescale.config.schema import TransportConfig
from freescale.errors import ConfigError
from freescale.progress import track
from freescale.transport.base import Transport
from freescale.transport.c10d import C10d
from freescale.transport.chunked import ChunkedTransport
from freescale.transport.host_staged import Copier, StreamCopier
from freescale.transport.one_sided import OneSided
from freescale.transport.shared_memory import SharedMemory
from freescale.transport.world import World, clone_group, host_of_each_rank, new_group

TRANSPORTS = ("c10d", "host_staged", "shared_memory", "copy_engine")
_memories = itertools.count()
"""All ranks open ways in the same order, so their numbers agree."""
_WORTH = 0.9
"""What another way must come below, as a part of c10d's figure: less is noise."""


@dataclass(frozen=True)
class TransportTiming:
    """One way at one size."""

    transport: str
    sent_bytes: int
    seconds: float
    """Of a transfer that everybody waits for."""
    lost_compute_seconds: float
    """Of compute, by a transfer behind it."""


class TransportSelection(NamedTuple):
    """What moves rows in each lane."""

    urgent: Transport
    deferred: Transport | None
    reasons: list[str]
    """For people."""
    name: str = "c10d"
    """Of what is deferred, by name."""

    def for_lane(self, lane: str) -> Transport:
        """What moves rows in a lane."""
        return self.deferred if lane == "deferred" and self.deferred is not None else self.urgent


class TransportFactory:
    """What is possible on all ranks, and what is not and why. All ranks must come."""

    def __init__(self, world: World) -> None:
        self._world = world
        hosts = host_of_each_rank(world.transport).tolist()
        self._near = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        reasons = [self._unavailable_reason(way, hosts) for way in TRANSPORTS]
        flags = torch.tensor([bool(reason) for reason in reasons], dtype=torch.int32, device=world.device)
        nobody = world.transport.all_reduce(flags, name="transports", op=dist.ReduceOp.MAX).wait().tolist()
        found = zip(TRANSPORTS, reasons, nobody, strict=True)
        self.unavailable = {way: reason or "another rank cannot" for way, reason, missing in found if missing}
        """By name, with the reason."""
        self.available = [way for way in TRANSPORTS if way not in self.unavailable]

    def create(self, way: str, *, urgent: Transport | None = None) -> Transport:
        """Open a way for what is urgent, or for what gives way to it. All ranks must come."""
        if way in self.unavailable:
            what, remedy = (
                f"transport {way} is not possible here",
                f"choose auto or one of {', '.join(self.available)}",
            )
            key = f"transport.{'urgent' if urgent is None else 'deferred'}"
            raise ConfigError(f"{what}: {self.unavailable[way]}", key=key, remedy=remedy)
        group = self._world.transport if urgent is None else clone_group(self._world.transport)
        copier = Copier()
        if way == "host_staged" and self._world.device.type != "cpu":
            group, copier = new_group(timeout=group.timeout), StreamCopier(self._world.device)
        # What gives way is cut into pieces. What is urgent is so only where it has to pass through the host.
        cut = urgent is not None or way == "host_staged"
        whole: C10d | ChunkedTransport = ChunkedTransport(group, urgent=urgent, copier=copier) if cut else group
        name = str(next(_memories))
        if way == "shared_memory":
            return OneSided(SharedMemory(group.peers, self._near, name=name, timeout=group.timeout), whole)
        if way == "copy_engine":
            from freescale.transport.copy_engine import CopyEngine

            return OneSided(CopyEngine(self._world.group, group.peers, name=name, timeout=group.timeout), whole)
        return whole

    def _unavailable_reason(self, way: str, hosts: Sequence[int]) -> str:
        """Why this rank cannot go a way; nothing if it can."""
        if way == "shared_memory":
            if self._world.device.type != "cpu":
                return "the rows are on a GPU"
            if not hasattr(os, "memfd_create"):
                return "this system has no memory without a name"
            return "every rank has a host of its own" if len(set(hosts)) == len(hosts) else ""
        if way == "copy_engine":
            if self._world.device.type != "cuda":
                return "the rows are not on a GPU"
            from freescale.transport.copy_engine import unavailable_reason

            return unavailable_reason(self._world.group, hosts)
        return ""


def select_transports(
    world: World, config: TransportConfig, *, deferred: bool, sent_bytes: int = 1 << 20
) -> TransportSelection:
    """Open a way for each lane: the one that is asked for, or the one that measures best. All ranks must come.

    `sent_bytes`: what a rank sends in a transfer, roughly; it is what the ways are measured with.
    """
    if world.world_size == 1:
        return TransportSelection(world.transport, None, [])
    ways = TransportFactory(world)
    asked = {"urgent": config.urgent} | ({"deferred": config.deferred} if deferred else {})
    opened = {name: ways.create(name) for name in ways.available} if "auto" in asked.values() else {}
    table = probe(opened, world.transport, world.device, sizes=[sent_bytes]) if len(opened) > 1 else []
    picked = {lane: best_transport(table, lane) if name == "auto" else name for lane, name in asked.items()}
    urgent = opened.get(picked["urgent"]) or ways.create(picked["urgent"])
    reasons = [explain(lane, way, table if asked[lane] == "auto" else []) for lane, way in picked.items()]
    if not deferred:
        return TransportSelection(urgent, None, reasons, picked["urgent"])
    return TransportSelection(urgent, ways.create(picked["deferred"], urgent=urgent), reasons, picked["deferred"])


def transport_for_samples(way: str, *, timeout: float) -> tuple[Transport, NDArray[np.int64]]:
    """What moves samples, beside all else, and the host of each rank. All ranks must come.

    Samples are in memory of the hosts, wherever the model is: they take shared memory if that is the way of rows.
    """
    group = new_group(timeout=timeout)
    hosts = host_of_each_rank(group)
    if way != "shared_memory":
        return group, hosts
    near = np.flatnonzero(hosts == hosts[group.peers.rank]).tolist()
    memory = SharedMemory(group.peers, near, name=str(next(_memories)), timeout=timeout)
    return OneSided(memory, group), hosts


def best_transport(table: Sequence[TransportTiming], lane: str) -> str:
    """The way with the best figure of a lane; c10d unless another is clearly better."""
    figures = _figures(table, lane)
    best = min(figures, key=lambda way: figures[way], default="c10d")
    return best if best != "c10d" and figures[best] < _WORTH * figures["c10d"] else "c10d"


def explain(lane: str, way: str, table: Sequence[TransportTiming]) -> str:
    """A line about a choice."""
    if not table:
        return f"transport: {lane} by {way}"
    what = "a transfer takes" if lane == "urgent" else "a transfer takes from compute"
    shown = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in _figures(table, lane).items())
    return f"transport: {lane} by {way}; of {table[0].sent_bytes >> 10} KiB {what}: {shown}"


def _figures(table: Sequence[TransportTiming], lane: str) -> dict[str, float]:
    """What counts in a lane: somebody waits for what is urgent; what is deferred should leave compute alone."""
    return {one.transport: one.seconds if lane == "urgent" else one.lost_compute_seconds for one in table}


_SECONDS = 0.02
"""What each measurement may take, roughly."""


def probe(
    ways: Mapping[str, Transport], control: C10d, device: torch.device, *, sizes: Sequence[int], rounds: int = 3
) -> list[TransportTiming]:
    """Measure every way at every size, in turns. `sizes`: bytes that a rank sends in one transfer."""
    compute = ProbeCompute(device)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    turns = [(size, *way) for _ in range(rounds) for size in sizes for way in ways.items()]
    for size, name, transport in track(turns, "measuring transports", in_background=False):
        one = _measured(_transfer(transport, size, device), control, compute)
        found.setdefault((name, size), []).append(one)
    flat = torch.tensor([[median(column) for column in zip(*times, strict=True)] for times in found.values()])
    agreed = control.all_reduce(flat.to(device), name="probe", op=dist.ReduceOp.MAX).wait().tolist()
    return [TransportTiming(*key, *times) for key, times in zip(found, agreed, strict=True)]


class ProbeCompute:
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


def _measured(once: Callable[[], None], control: C10d, compute: ProbeCompute) -> tuple[float, float]:
    """Seconds of a transfer, and those that it takes from compute."""
    once()
    one = _clocked(once, control, 1)
    # As often on every rank: all have to take part in every transfer.
    times = max(1, control.max(int(_SECONDS / max(one, 1e-6)), name="probe"))
    alone = _clocked(once, control, times)
    quiet = compute.alone(alone * times)
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(lambda: [once() for _ in range(times)])
        beside = compute.until(moving.done)
        moving.result()  # raises what went wrong there
    return alone, max(0.0, 1 - beside / quiet) * (time.perf_counter() - began) / times


def _clocked(once: Callable[[], None], control: C10d, times: int) -> float:
    control.sum(0, name="probe")
    began = time.perf_counter()
    for _ in range(times):
        once()
    return (time.perf_counter() - began) / times
