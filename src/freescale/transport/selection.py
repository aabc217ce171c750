"""Selects a transport for each lane: which ones are available, which measures best, and why.

The slowest rank counts, since a step waits for it, and all ranks select alike. The selection does not change the
training result: every transport moves the same bytes.
"""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

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
from freescale.transport.host_layout import HostLayout
from freescale.transport.host_staged import Copier, StreamCopier
from freescale.transport.pairwise import PairwiseC10d
from freescale.transport.shared_memory import SharedMemory, SharedMemoryTransport
from freescale.transport.two_level import TwoLevelTransport
from freescale.transport.world import World, clone_group, host_of_each_rank, new_group

TRANSPORTS = ("c10d", "host_staged", "shared_memory", "copy_engine")
FLAT, TWO_LEVEL = "flat", "two_level"
_memory_numbers = itertools.count()
"""All ranks create transports in the same order, so the numbers agree."""
_MARGIN = 0.9
"""Another transport must measure below this share of c10d's time; a smaller gain is noise."""
_PROBE_SECONDS = 0.02
"""Approximate length of each measurement."""


@dataclass(frozen=True)
class TransportTiming:
    """A transport measured at one size."""

    transport: str
    sent_bytes: int
    seconds: float
    """Duration of a transfer that all ranks wait for."""
    lost_compute_seconds: float
    """Compute time lost to a transfer that overlaps with compute."""


class TransportSelection(NamedTuple):
    """The transport of each lane."""

    urgent: Transport
    deferred: Transport | None
    reasons: list[str]
    """Human-readable."""
    name: str = "c10d"
    """Name of the deferred transport, or of the urgent one if nothing is deferred."""
    deferred_choices: Mapping[str, Transport] = {}
    """The deferred transport and, for `auto`, the next best one: training steps decide between them."""
    layout: HostLayout | None = None
    """The hosts of the ranks. None with one rank, or if no rows move."""
    urgent_choices: Mapping[str, Transport] = {}
    """The urgent transport of each exchange, flat or two_level, between which training steps decide."""

    @staticmethod
    def of_one(transport: Transport) -> "TransportSelection":
        """Return the selection of a transport that nothing is compared with."""
        return TransportSelection(transport, None, [], urgent_choices={FLAT: transport})

    def for_lane(self, lane: str) -> Transport:
        """Return the transport of a lane."""
        return self.deferred if lane == "deferred" and self.deferred is not None else self.urgent


class TransportFactory:
    """Creates the transports that are available on all ranks. A collective operation: construct it on all ranks.

    `sent_bytes`: approximate bytes that a rank sends per transfer.
    """

    def __init__(self, world: World, *, sent_bytes: int = 0) -> None:
        self._world, self._sent_bytes = world, sent_bytes
        self.layout = host_of_each_rank(world.transport)
        hosts = self.layout.host_of
        reasons = [self._unavailable_reason(name, hosts) for name in TRANSPORTS]
        flags = torch.tensor([bool(reason) for reason in reasons], dtype=torch.int32)
        anywhere = world.transport.reduce_values(flags, name="transports", op=dist.ReduceOp.MAX).tolist()
        checked = zip(TRANSPORTS, reasons, anywhere, strict=True)
        self.unavailable = {name: reason or "another rank cannot" for name, reason, missing in checked if missing}
        """Reasons by name."""
        self.available = [name for name in TRANSPORTS if name not in self.unavailable]

    def create(self, name: str, *, urgent: Transport | None = None) -> Transport:
        """Create a transport; one with `urgent` is for deferred rows and yields to that transport. Collective."""
        if name in self.unavailable:
            what, remedy = (
                f"transport {name} is not possible here",
                f"choose auto or one of {', '.join(self.available)}",
            )
            key = f"transport.{'urgent' if urgent is None else 'deferred'}"
            raise ConfigError(f"{what}: {self.unavailable[name]}", key=key, remedy=remedy)
        group, copier = self._group(name, urgent=urgent is None), Copier(self._world.transport.device)
        if name == "host_staged" and self._world.device.type != "cpu":
            copier = StreamCopier(self._world.device)
        # Deferred transfers are chunked so that they can yield; urgent ones only if they pass through the host.
        is_chunked = urgent is not None or name == "host_staged"
        transport: C10d | ChunkedTransport = (
            ChunkedTransport(group, urgent=urgent, copier=copier) if is_chunked else group
        )
        if name == "shared_memory":
            return SharedMemoryTransport(_memory(group, self.layout), transport)
        if name == "copy_engine":
            from freescale.transport.copy_engine import CopyEngine

            return CopyEngine(self._world.group, transport, name=str(next(_memory_numbers)))
        return transport

    def create_two_level(self, *, urgent: Transport | None = None) -> TwoLevelTransport:
        """Create a transport that sends one message per pair of hosts; see `create`. Collective."""
        if reason := self.two_level_reason():
            raise ConfigError(f"a two-level exchange is not possible here: {reason}", key="tables.exchange")
        group = PairwiseC10d(self._group("c10d", urgent=urgent is None))
        return _two_level(group, self.layout, urgent=urgent)

    def two_level_reason(self) -> str:
        """Return why a two-level exchange is not possible, the same on all ranks; empty if it is."""
        if self._world.device.type != "cpu":
            return "the rows are on a GPU"
        return "" if self.layout.is_consecutive else "the ranks of a host do not have consecutive numbers"

    def _group(self, name: str, *, urgent: bool) -> C10d:
        """Return the group of a lane. On a GPU, urgent rows do not queue behind the dense gradients either."""
        shared, on_cpu = self._world.transport, self._world.device.type == "cpu"
        if name == "host_staged" and not on_cpu:
            return new_group(timeout=shared.timeout)
        return shared if urgent and on_cpu else clone_group(shared, urgent=urgent)

    def _unavailable_reason(self, name: str, hosts: Sequence[int]) -> str:
        """Return why this rank cannot use a transport; empty if it can."""
        if name == "shared_memory":
            if self._world.device.type != "cpu":
                return "the rows are on a GPU"
            if not hasattr(os, "memfd_create"):
                return "this system has no memory without a name"
            return "every rank has a host of its own" if len(set(hosts)) == len(hosts) else ""
        if name == "copy_engine":
            if self._world.device.type == "cpu":
                return "the rows are not on a GPU"
            from freescale.transport.copy_engine import unavailable_reason

            return unavailable_reason(self._world.group, hosts, sent_bytes=self._sent_bytes)
        return ""


def select_transports(
    world: World,
    config: TransportConfig,
    *,
    deferred: bool,
    sent_bytes: int = 1 << 20,
    compared: bool = False,
    exchange: Literal["flat", "two_level", "auto"] = "flat",
) -> TransportSelection:
    """Create the transport of each lane: the configured one, or for `auto` the one that measures best. Collective.

    `sent_bytes`: approximate bytes that a rank sends per transfer; transports are measured with that size.
    `compared`: training steps will compare deferred transports, so create the next best one too. `exchange`: two_level
    creates two-level transports instead of the configured ones; auto creates both where they differ.
    """
    if world.world_size == 1:
        return TransportSelection.of_one(world.transport)
    factory = TransportFactory(world, sent_bytes=sent_bytes)
    if exchange == TWO_LEVEL and len(factory.layout.ranks) > 1:
        return _two_level_lanes(factory, deferred=deferred)
    flat = _flat_lanes(world, config, factory, deferred=deferred, sent_bytes=sent_bytes, compared=compared)
    if exchange == FLAT:
        return flat
    if not factory.layout.sums:
        why = "there is one host" if len(factory.layout.ranks) == 1 else "every rank has a host of its own"
        return flat._replace(reasons=[*flat.reasons, f"transport: the exchange is flat: {why}"])
    if reason := factory.two_level_reason():
        return flat._replace(reasons=[*flat.reasons, f"transport: the exchange is flat: {reason}"])
    two = _two_level_lanes(factory, deferred=deferred)
    return flat._replace(
        reasons=[*flat.reasons, *two.reasons],
        deferred_choices={**flat.deferred_choices, **two.deferred_choices},
        urgent_choices={**flat.urgent_choices, **two.urgent_choices},
    )


def _two_level_lanes(factory: TransportFactory, *, deferred: bool) -> TransportSelection:
    """Create a two-level transport for each lane. Collective."""
    urgent = factory.create_two_level()
    choices = {TWO_LEVEL: factory.create_two_level(urgent=urgent)} if deferred else {}
    reasons = [f"transport: two levels, one message per pair of {len(factory.layout.ranks)} hosts"]
    more = {"layout": factory.layout, "urgent_choices": {TWO_LEVEL: urgent}}
    return TransportSelection(urgent, choices.get(TWO_LEVEL), reasons, TWO_LEVEL, choices, **more)


def _flat_lanes(
    world: World, config: TransportConfig, factory: TransportFactory, *, deferred: bool, sent_bytes: int, compared: bool
) -> TransportSelection:
    """Create the configured transport of each lane, or the one that measures best. Collective."""
    configured = {"urgent": config.urgent} | ({"deferred": config.deferred} if deferred else {})
    created = {name: factory.create(name) for name in factory.available} if "auto" in configured.values() else {}
    timings = probe(created, world.transport, world.device, sizes=[sent_bytes]) if len(created) > 1 else []
    names = {lane: best_transport(timings, lane) if name == "auto" else name for lane, name in configured.items()}
    urgent = created.get(names["urgent"]) or factory.create(names["urgent"])
    reasons = [explain(lane, name, timings if configured[lane] == "auto" else []) for lane, name in names.items()]
    if created and world.device.type != "cpu" and (why := factory.unavailable.get("copy_engine")):
        reasons.append(f"transport: copy_engine is not possible: {why}")
    if not deferred:
        return TransportSelection(urgent, None, reasons, names["urgent"], {}, factory.layout, {FLAT: urgent})
    best, second = names["deferred"], second_best(timings) if config.deferred == "auto" and compared else None
    choices = {name: factory.create(name, urgent=urgent) for name in (best, second) if name is not None}
    return TransportSelection(urgent, choices[best], reasons, best, choices, factory.layout, {FLAT: urgent})


def transport_for_samples(name: str, *, timeout: float) -> tuple[Transport, NDArray[np.int64]]:
    """Create a separate transport for samples; return it with the host of each rank. Collective.

    Samples are in host memory whatever the device, so they use shared memory if rows do.
    """
    group = new_group(timeout=timeout)
    layout = host_of_each_rank(group)
    transport: Transport = group
    if name == TWO_LEVEL:
        transport = _two_level(PairwiseC10d(group), layout)
    elif name == "shared_memory":
        transport = SharedMemoryTransport(_memory(group, layout), group)
    return transport, np.array(layout.host_of)


def _memory(group: C10d, layout: HostLayout) -> SharedMemory:
    """Share memory with the ranks of this host. Collective."""
    ranks = layout.ranks[layout.host_of[group.peers.rank]]
    return SharedMemory(group.peers, ranks, name=str(next(_memory_numbers)), timeout=group.timeout)


def _two_level(group: PairwiseC10d, layout: HostLayout, *, urgent: Transport | None = None) -> TwoLevelTransport:
    """Create a two-level transport; one with `urgent` yields to that transport. Collective."""
    pairs = -(-len(layout.ranks) // min(map(len, layout.ranks)))  # hosts that a leader sends to
    far = group if urgent is None else ChunkedTransport(group, urgent=urgent, pairs=pairs)
    near = SharedMemoryTransport(_memory(group, layout), group, within_host=True)
    return TwoLevelTransport(layout, near, far, connect=group.connect)


def best_transport(timings: Sequence[TransportTiming], lane: str) -> str:
    """Return the fastest transport for a lane; c10d unless another is clearly faster."""
    seconds = _seconds(timings, lane)
    best = min(seconds, key=lambda name: seconds[name], default="c10d")
    return best if best != "c10d" and seconds[best] < _MARGIN * seconds["c10d"] else "c10d"


def second_best(timings: Sequence[TransportTiming]) -> str | None:
    """Return the transport to compare with the best one for deferred transfers: the next best; None without any."""
    seconds, best = _seconds(timings, "deferred"), best_transport(timings, "deferred")
    return min((name for name in seconds if name != best), key=lambda name: seconds[name], default=None)


def explain(lane: str, name: str, timings: Sequence[TransportTiming]) -> str:
    """Describe a selection in one line."""
    if not timings:
        return f"transport: {lane} by {name}"
    what = "a transfer takes" if lane == "urgent" else "a transfer takes from compute"
    listed = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in _seconds(timings, lane).items())
    return f"transport: {lane} by {name}; of {timings[0].sent_bytes >> 10} KiB {what}: {listed}"


def _seconds(timings: Sequence[TransportTiming], lane: str) -> dict[str, float]:
    """Return what counts in a lane: the latency of urgent transfers, the compute that deferred ones cost."""
    return {t.transport: t.seconds if lane == "urgent" else t.lost_compute_seconds for t in timings}


def probe(
    transports: Mapping[str, Transport], control: C10d, device: torch.device, *, sizes: Sequence[int], rounds: int = 3
) -> list[TransportTiming]:
    """Measure every transport at every size, interleaved. `sizes`: bytes that a rank sends in one transfer."""
    compute = ProbeCompute(device)
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    turns = [(size, *item) for _ in range(rounds) for size in sizes for item in transports.items()]
    for size, name, transport in track(turns, "measuring transports", in_background=False):
        sample = _measure(_transfer(transport, size, device), control, compute, device)
        samples.setdefault((name, size), []).append(sample)
    medians = torch.tensor([[median(column) for column in zip(*times, strict=True)] for times in samples.values()])
    slowest = control.reduce_values(medians, name="probe", op=dist.ReduceOp.MAX).tolist()
    return [TransportTiming(*key, *times) for key, times in zip(samples, slowest, strict=True)]


class ProbeCompute:
    """Matrix products to run while bytes move."""

    def __init__(self, device: torch.device) -> None:
        size = 192 if device.type == "cpu" else 2048  # 256 tiles of 128 x 128: more than a GPU has SMs
        self._matrix = torch.rand(size, device=device).expand(size, -1).contiguous()
        self._product = self._matrix @ self._matrix.T

    def rate_until(self, done: Callable[[], bool]) -> float:
        """Return the products per second until a condition holds."""
        count, began = 0, time.perf_counter()
        while not done():
            torch.mm(self._matrix, self._matrix.T, out=self._product)
            if self._product.device.type != "cpu":
                torch.accelerator.current_stream(self._product.device).synchronize()
            count += 1
        return count / (time.perf_counter() - began)

    def rate_for(self, seconds: float) -> float:
        """Return the products per second over a duration."""
        end = time.perf_counter() + seconds
        return self.rate_until(lambda: time.perf_counter() > end)


def _transfer(transport: Transport, size: int, device: torch.device) -> Callable[[], None]:
    """Return an even exchange in which this rank sends so many bytes."""
    world_size = transport.peers.world_size
    counts = [max(1, size // world_size)] * world_size
    rows = torch.zeros(sum(counts), dtype=torch.uint8, device=device)

    def transfer() -> None:
        transport.all_to_all(rows, counts, counts, name="probe").wait()
        if rows.device.type != "cpu":
            torch.accelerator.current_stream(rows.device).synchronize()

    return transfer


def _measure(
    transfer: Callable[[], None], control: C10d, compute: ProbeCompute, device: torch.device
) -> tuple[float, float]:
    """Return the seconds of a transfer, and the compute seconds that it costs."""
    transfer()
    estimate = _time(transfer, control, 1)
    # The same count on every rank, since all take part in every transfer.
    repeats = max(1, control.max(int(_PROBE_SECONDS / max(estimate, 1e-6)), name="probe"))
    seconds = _time(transfer, control, repeats)
    undisturbed = compute.rate_for(seconds * repeats)
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(_on_own_stream, lambda: [transfer() for _ in range(repeats)], device)
        disturbed = compute.rate_until(moving.done)
        moving.result()  # raises its error
    return seconds, max(0.0, 1 - disturbed / undisturbed) * (time.perf_counter() - began) / repeats


def _on_own_stream(run: Callable[[], object], device: torch.device) -> None:
    """Run in a thread that uses this rank's device, and a stream beside that of compute."""
    with nullcontext() if device.type == "cpu" else torch.Stream(device):
        run()


def _time(transfer: Callable[[], None], control: C10d, repeats: int) -> float:
    control.sum(0, name="probe")
    began = time.perf_counter()
    for _ in range(repeats):
        transfer()
    return (time.perf_counter() - began) / repeats
