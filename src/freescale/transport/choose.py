"""Which way bytes take: what is possible here, what measures best, and why; all ranks choose alike.

A choice changes no result: every way moves the same bytes.
"""

import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from freescale.config.schema import TransportConfig
from freescale.errors import ConfigError
from freescale.transport.c10d import C10d
from freescale.transport.handle import Transport
from freescale.transport.host_staged import Copies, OnStream
from freescale.transport.one_sided import OneSided
from freescale.transport.pieces import Pieces
from freescale.transport.probe import Measured, probe
from freescale.transport.shared_memory import SharedMemory
from freescale.transport.world import World, apart, beside, hosts_of

WAYS = ("c10d", "host_staged", "shared_memory", "copy_engine")
_memories = itertools.count()
"""All ranks open ways in the same order, so their numbers agree."""
_WORTH = 0.9
"""What another way must come below, as a part of c10d's figure: less is noise."""


class Chosen(NamedTuple):
    """What moves rows in each lane."""

    urgent: Transport
    deferred: Transport | None
    why: list[str]
    """For people."""
    way: str = "c10d"
    """Of what is deferred, by name."""

    def of(self, lane: str) -> Transport:
        """What moves rows in a lane."""
        return self.deferred if lane == "deferred" and self.deferred is not None else self.urgent


class Ways:
    """What is possible on all ranks, and what is not and why. All ranks must come."""

    def __init__(self, world: World) -> None:
        self._world = world
        hosts = hosts_of(world.transport).tolist()
        self._near = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
        reasons = [self._why_not(way, hosts) for way in WAYS]
        flags = torch.tensor([bool(reason) for reason in reasons], dtype=torch.int32, device=world.device)
        nobody = world.transport.all_reduce(flags, name="ways", how=dist.ReduceOp.MAX).wait().tolist()
        found = zip(WAYS, reasons, nobody, strict=True)
        self.impossible = {way: reason or "another rank cannot" for way, reason, missing in found if missing}
        """By name, with the reason."""
        self.possible = [way for way in WAYS if way not in self.impossible]

    def make(self, way: str, *, urgent: Transport | None = None) -> Transport:
        """Open a way for what is urgent, or for what gives way to it. All ranks must come."""
        if way in self.impossible:
            what, remedy = f"transport {way} is not possible here", f"choose auto or one of {', '.join(self.possible)}"
            key = f"transport.{'urgent' if urgent is None else 'deferred'}"
            raise ConfigError(f"{what}: {self.impossible[way]}", key=key, remedy=remedy)
        group = self._world.transport if urgent is None else beside(self._world.transport)
        copies = Copies()
        if way == "host_staged" and self._world.device.type != "cpu":
            group, copies = apart(timeout=group.timeout), OnStream(self._world.device)
        # What gives way is cut into pieces. What is urgent is so only where it has to pass through the host.
        cut = urgent is not None or way == "host_staged"
        whole: C10d | Pieces = Pieces(group, urgent=urgent, copies=copies) if cut else group
        name = str(next(_memories))
        if way == "shared_memory":
            return OneSided(SharedMemory(group.peers, self._near, name=name, timeout=group.timeout), whole)
        if way == "copy_engine":
            from freescale.transport.copy_engine import CopyEngine

            return OneSided(CopyEngine(self._world.group, group.peers, name=name, timeout=group.timeout), whole)
        return whole

    def _why_not(self, way: str, hosts: Sequence[int]) -> str:
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
            from freescale.transport.copy_engine import why_not

            return why_not(self._world.group, hosts)
        return ""


def choose(world: World, config: TransportConfig, *, deferred: bool, sent_bytes: int = 1 << 20) -> Chosen:
    """Open a way for each lane: the one that is asked for, or the one that measures best. All ranks must come.

    `sent_bytes`: what a rank sends in a transfer, roughly; it is what the ways are measured with.
    """
    if world.world_size == 1:
        return Chosen(world.transport, None, [])
    ways = Ways(world)
    asked = {"urgent": config.urgent} | ({"deferred": config.deferred} if deferred else {})
    opened = {name: ways.make(name) for name in ways.possible} if "auto" in asked.values() else {}
    table = probe(opened, world.transport, world.device, sizes=[sent_bytes]) if len(opened) > 1 else []
    picked = {lane: pick(table, lane) if name == "auto" else name for lane, name in asked.items()}
    urgent = opened.get(picked["urgent"]) or ways.make(picked["urgent"])
    why = [explain(lane, way, table if asked[lane] == "auto" else []) for lane, way in picked.items()]
    if not deferred:
        return Chosen(urgent, None, why, picked["urgent"])
    return Chosen(urgent, ways.make(picked["deferred"], urgent=urgent), why, picked["deferred"])


def for_samples(way: str, *, timeout: float) -> tuple[Transport, NDArray[np.int64]]:
    """What moves samples, beside all else, and the host of each rank. All ranks must come.

    Samples are in memory of the hosts, wherever the model is: they take shared memory if that is the way of rows.
    """
    group = apart(timeout=timeout)
    hosts = hosts_of(group)
    if way != "shared_memory":
        return group, hosts
    near = np.flatnonzero(hosts == hosts[group.peers.rank]).tolist()
    memory = SharedMemory(group.peers, near, name=str(next(_memories)), timeout=timeout)
    return OneSided(memory, group), hosts


def pick(table: Sequence[Measured], lane: str) -> str:
    """The way with the best figure of a lane; c10d unless another is clearly better."""
    figures = _figures(table, lane)
    best = min(figures, key=lambda way: figures[way], default="c10d")
    return best if best != "c10d" and figures[best] < _WORTH * figures["c10d"] else "c10d"


def explain(lane: str, way: str, table: Sequence[Measured]) -> str:
    """A line about a choice."""
    if not table:
        return f"transport: {lane} by {way}"
    what = "a transfer takes" if lane == "urgent" else "a transfer takes from compute"
    shown = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in _figures(table, lane).items())
    return f"transport: {lane} by {way}; of {table[0].sent_bytes >> 10} KiB {what}: {shown}"


def _figures(table: Sequence[Measured], lane: str) -> dict[str, float]:
    """What counts in a lane: somebody waits for what is urgent; what is deferred should leave compute alone."""
    return {one.way: one.seconds if lane == "urgent" else one.taken_seconds for one in table}
