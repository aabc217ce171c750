"""Every way to move rows that a CPU has, for tests that promise the same of all."""

import torch.distributed as dist

from freescale.transport.base import Transport
from freescale.transport.c10d import C10d
from freescale.transport.chunked import ChunkedTransport
from freescale.transport.one_sided import OneSided
from freescale.transport.shared_memory import SharedMemory
from tests.support.ranks import World

WAYS = ("c10d", "host_staged", "shared_memory", "two_hosts")
"""`two_hosts`: half of the ranks share one memory, half another, and what goes between them is staged."""
DEADLINE = 6.0
_made: dict[str, Transport] = {}
"""Ranks of a test serve many of them, and memory is shared once per name."""


def way(world: World, name: str) -> Transport:
    """A transport over all ranks; made once."""
    if name not in _made:
        assert dist.group.WORLD is not None
        group = C10d(dist.group.WORLD, world.store, timeout=DEADLINE)
        _made[name] = {
            "c10d": lambda: group,
            "host_staged": lambda: ChunkedTransport(group),
            "shared_memory": lambda: OneSided(_memory(group, name, range(world.ranks)), group),
            "two_hosts": lambda: OneSided(_memory(group, name, _same_half(world)), ChunkedTransport(group)),
        }[name]()
    return _made[name]


def _memory(group: C10d, name: str, ranks: range) -> SharedMemory:
    return SharedMemory(group.peers, ranks, name=name, timeout=group.timeout)


def _same_half(world: World) -> range:
    half = world.ranks // 2
    return range(half) if world.rank < half else range(half, world.ranks)
