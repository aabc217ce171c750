"""All transports that run on CPUs, for tests that hold for each."""

import torch.distributed as dist

from freescale.transport.base import Transport
from freescale.transport.c10d import C10d
from freescale.transport.chunked import ChunkedTransport
from freescale.transport.host_layout import HostLayout
from freescale.transport.pairwise import PairwiseC10d
from freescale.transport.shared_memory import SharedMemory, SharedMemoryTransport
from freescale.transport.two_level import TwoLevelTransport
from tests.support.ranks import World

TRANSPORTS = ("c10d", "host_staged", "shared_memory", "two_hosts", "two_level", "two_level_chunked")
"""`two_hosts`, `two_level`: each half of the ranks shares memory, and traffic between the halves is chunked or not."""
TIMEOUT = 6.0
_created: dict[str, Transport] = {}
"""Created once per process: ranks serve many tests, and memory is shared once per name."""


def transport_named(world: World, name: str) -> Transport:
    """Return a transport over all ranks."""
    if name not in _created:
        assert dist.group.WORLD is not None
        group = C10d(dist.group.WORLD, world.store, timeout=TIMEOUT)
        _created[name] = {
            "c10d": lambda: group,
            "host_staged": lambda: ChunkedTransport(group),
            "shared_memory": lambda: SharedMemoryTransport(_memory(group, name, range(world.ranks)), group),
            "two_hosts": lambda: SharedMemoryTransport(
                _memory(group, name, _same_half(world)), ChunkedTransport(group)
            ),
            "two_level": lambda: two_level(world, group, _halves(world), name=name),
            "two_level_chunked": lambda: two_level(world, group, _halves(world), name=name, chunked=True),
        }[name]()
    return _created[name]


def two_level(world: World, group: C10d, layout: HostLayout, *, name: str, chunked: bool = False) -> TwoLevelTransport:
    """Return a two-level transport over hosts that share this machine."""
    pairwise = PairwiseC10d(group)
    memory = SharedMemory(group.peers, layout.ranks[layout.host_of[world.rank]], name=name, timeout=group.timeout)
    near = SharedMemoryTransport(memory, pairwise, within_host=True)
    return TwoLevelTransport(layout, near, ChunkedTransport(pairwise, pairs=1) if chunked else pairwise)


def _halves(world: World) -> HostLayout:
    return HostLayout.of([2 * rank // world.ranks for rank in range(world.ranks)])


def _memory(group: C10d, name: str, ranks: range) -> SharedMemory:
    return SharedMemory(group.peers, ranks, name=name, timeout=group.timeout)


def _same_half(world: World) -> range:
    half = world.ranks // 2
    return range(half) if world.rank < half else range(half, world.ranks)
