"""The time of transfers on a cluster, alone and concurrently. Pure.

A transfer uses each level of the network: links inside a host, links of a host, the spine. Its use is given in seconds
of the whole level. Concurrent transfers share the rate of a level; deferred transfers stop while an urgent one runs.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from freescale.balance.placement import Floats
from freescale.simulate.cluster import Cluster

_STAGES_INSIDE = 4  # of a round of a two-level exchange


@dataclass(frozen=True)
class TransferCost:
    """The cost of a transfer: seconds before the first byte, and seconds of each level."""

    latency: float
    levels: tuple[float, float, float]
    shares: Floats | None = None
    """The share of the transfer after which each rank is done; None: all at its end."""

    def at_efficiency(self, share: float) -> "TransferCost":
        """Return the cost for a transport that reaches only a share of the rates."""
        near, far, spine = (seconds / share for seconds in self.levels)
        return replace(self, levels=(near, far, spine))

    def ends(self, begin: float, end: float, world_size: int) -> Floats:
        """Return the time at which each rank is done, if the last one is done at `end`."""
        start = min(end, begin + self.latency)
        return start + (end - start) * (np.ones(world_size) if self.shares is None else self.shares)


class Topology:
    """The ranks of a cluster, host by host, and the costs of their collectives."""

    def __init__(self, cluster: Cluster, world_size: int, rng: np.random.Generator) -> None:
        self._cluster, self._world_size, self._rng = cluster, world_size, rng
        self._local = min(world_size, round(cluster.ranks_per_host))
        self._leaf = min(world_size, round(cluster.hosts_per_leaf) * self._local)

    def all_to_all(
        self, size: Floats, *, incoming: bool = False, chunked: bool = False, served: Floats | None = None
    ) -> TransferCost:
        """Return the cost if every rank sends this many bytes to all ranks; `incoming`: receives them.

        `served`: what each rank has of the other direction, over the mean; evenly by default.
        """
        c, world_size, local = self._cluster, self._world_size, self._local
        if world_size == 1:
            return TransferCost(0.0, (0.0, 0.0, 0.0))
        beyond = (world_size - local) / world_size
        own, mean = self._sum_by_host(size) * beyond, float(size.mean()) * local * beyond
        others = np.full(world_size, mean) if served is None else self._sum_by_host(served) / local * mean
        if world_size == 2 * local:  # of two hosts, each receives what the other sends
            others = own[::-1].copy()
        got, sent = (own, others) if incoming else (others, own)
        # A rank is done when it has received everything; the last bytes come from the rank that sends the most.
        done = np.minimum(got, local * size * beyond) if incoming else got
        if incoming:  # a rank that receives the mean waits for the busiest sender
            done = np.maximum(done, np.minimum(done, mean) * float(sent.max()) / max(mean, 1e-300))
        if c.one_way and not chunked:
            done = done + 6 / (world_size + 4) * self._queueing() * sent
        if not incoming:
            done = np.maximum(done, _largest_other(sent, local) * self._service_order())
        levels = float(size.max()) * (local - 1) / world_size / c.near, float(done.max()) / c.far
        spine = float(size.mean()) * local * (world_size - self._leaf) / world_size * c.oversubscription / c.far
        shares = done / max(float(done.max()), 1e-300) if levels[1] > max(levels[0], spine) else None
        return TransferCost(self.latency, (*levels, spine), shares)

    def two_level(
        self,
        merged: Floats,
        *,
        passed: Floats,
        rounds: int,
        incoming: bool = False,
        chunked: bool = False,
        served: Floats | None = None,
    ) -> TransferCost:
        """Return the cost if each pair of hosts exchanges one message per round, sent by a rank that leads for it.

        merged: bytes of the rows that each rank requests for its host. passed: bytes that it passes on inside of the
        host for its own rows. A round has four stages inside of a host, with small messages: own rows to those that
        merge them, how much ranks have for the leaders, rows to the leaders, and rows from them.
        """
        c, local, hosts = self._cluster, self._local, -(-self._world_size // self._local)
        if hosts == 1:
            near = self.all_to_all(passed, incoming=incoming, chunked=chunked)
            return replace(near, latency=rounds * near.latency)
        between = self.all_to_all(merged, incoming=incoming, chunked=chunked, served=served)
        inside = 0.0 if local == 1 else c.latency + c.message * (local - 1)
        stages = c.latency + c.message * -(-(hosts - 1) // local) + _STAGES_INSIDE * inside
        moved = float((passed + 2 * merged).max()) * (local - 1) / local / c.near
        return replace(between, latency=rounds * stages + moved, levels=(0.0, *between.levels[1:]))

    def part(self, ranks: int) -> "Topology":
        """Return the topology of so many neighbouring ranks."""
        return self if ranks == self._world_size else Topology(self._cluster, ranks, self._rng)

    @property
    def latency(self) -> float:
        """Seconds of an all-to-all without bytes."""
        return self._cluster.latency + self._cluster.message * (self._world_size - 1)

    def all_reduce(self, size: float) -> TransferCost:
        """Return the cost of a ring all-reduce: every link carries each byte nearly twice."""
        c, world_size = self._cluster, self._world_size
        twice = 2 * size * (world_size - 1) / world_size / c.ring
        far, leaf = twice / c.far * (world_size > self._local), twice * c.oversubscription / c.far / c.hosts_per_leaf
        levels = (twice / c.near * (self._local > 1), far, leaf * (world_size > self._leaf))
        return TransferCost(c.latency * math.ceil(math.log2(max(2, world_size))), levels)

    def _sum_by_host(self, size: Floats) -> Floats:
        """Return for each rank the sum over the ranks of its host."""
        first = np.arange(0, self._world_size, self._local)
        return np.add.reduceat(size, first).repeat(self._local)[: self._world_size]

    def _queueing(self) -> Floats:
        """Return for each rank the share of its sends that delay its receives; random for each pair of ranks.

        As measured with gloo: all of it between two ranks, a quarter on average between four.
        """
        if self._world_size == 2:
            first = self._rng.integers(2)
            return np.array([first, 1 - first], dtype=np.float64)
        return (self._rng.binomial(self._world_size - 1, 0.5, self._world_size) / (self._world_size - 1)) ** 2

    def _service_order(self) -> Floats:
        """Return the share of a rank's sends after which each peer has its part. Gloo serves peers one by one."""
        uneven = self._cluster.one_way and self._world_size > 2
        return self._rng.uniform(0.75, 1.0, self._world_size) if uneven else np.ones(self._world_size)

    def all_gather(self, size: float) -> TransferCost:
        """Return the cost if every rank receives this many bytes from every other."""
        return self.all_to_all(np.full(self._world_size, size * self._world_size))


@dataclass(eq=False)
class Flow:
    """An active transfer."""

    cost: TransferCost
    begin: float
    """The arrival of the last rank."""
    deferred: bool
    """Whether it stops for urgent transfers."""
    stops_deferred: bool = True
    """Whether deferred transfers stop for it."""
    after: "Flow | None" = None
    """A transfer of the same group that precedes it."""
    remaining: float = 1.0
    """Remaining share."""
    grace: float = 0.0
    """Seconds of chunks that are already in flight when an urgent transfer begins."""
    grace_used: float = 0.0
    """Seconds of `grace` used during the current urgent transfer."""


def _largest_other(sent: Floats, local: int) -> Floats:
    """Return for each rank the largest send of another host."""
    of_host = sent[::local]
    first = int(of_host.argmax())
    second = float(np.delete(of_host, first).max(initial=0.0))
    largest = np.full(len(sent), of_host[first])
    largest[first * local : (first + 1) * local] = second
    return largest


class NetworkModel:
    """Concurrent transfers. Time advances from the end of one transfer to the next."""

    def __init__(self) -> None:
        self.now, self._flows = 0.0, list[Flow]()

    def add(self, flow: Flow) -> None:
        """Add a transfer that begins now or later."""
        self._flows.append(flow)

    def next_end(self) -> Flow:
        """Advance `now` to the end of the next transfer and return it."""
        while True:
            moving = [flow for flow in self._flows if self._starts(flow) <= self.now]
            waiting = [self._starts(flow) for flow in self._flows if self._starts(flow) > self.now]
            rates, urgent = _rates(moving), _has_urgent(moving)
            active = list(zip(moving, rates, strict=True))
            ends = [self.now + f.remaining * max(f.cost.levels) / rate if rate else math.inf for f, rate in active]
            stops = [self.now + (f.grace - f.grace_used) / rate for f, rate in active if f.deferred and rate and urgent]
            next_time = min([*ends, *waiting, *stops])
            for (flow, rate), end in zip(active, ends, strict=True):
                flow.remaining = (
                    0.0 if end <= next_time else flow.remaining - (next_time - self.now) * rate / max(flow.cost.levels)
                )
                spent = self.now + (flow.grace - flow.grace_used) / rate <= next_time if rate else False
                grace_used = (
                    flow.grace if spent else flow.grace_used + (next_time - self.now) * rate
                )  # exact, or the clock would not advance
                flow.grace_used = grace_used if urgent else 0.0
            self.now = next_time
            for flow in moving:
                if flow.remaining <= 0.0:
                    self._flows.remove(flow)
                    return flow

    def _starts(self, flow: Flow) -> float:
        return math.inf if flow.after in self._flows else flow.begin + flow.cost.latency


def _has_urgent(flows: list[Flow]) -> bool:
    return any(flow.stops_deferred and not flow.deferred for flow in flows)


def _rates(flows: list[Flow]) -> list[float]:
    """Return the rate of each transfer relative to running alone: transfers share a level evenly."""
    urgent = _has_urgent(flows)
    stopped = [urgent and flow.deferred and max(flow.cost.levels) > 0 for flow in flows]
    moves_on = [
        not is_stopped or flow.grace - flow.grace_used > 1e-9 for flow, is_stopped in zip(flows, stopped, strict=True)
    ]
    uses = np.array([flow.cost.levels for flow in flows]).reshape(-1, 3)
    uses = uses / np.maximum(uses.max(axis=1, keepdims=True), 1e-300)
    load = np.maximum(uses[moves_on].sum(axis=0), 1.0)
    return [
        float(min(1.0 / load[use > 0], default=1.0)) * moving_now
        for use, moving_now in zip(uses, moves_on, strict=True)
    ]
