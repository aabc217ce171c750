"""How long transfers take on a cluster, alone and at once. Pure.

A transfer asks something of each level of a network: links inside a host, links of a host, the spine. What it asks is
given in seconds of the whole level. Transfers that share a level share its rate; what is deferred stops while anything
urgent is under way.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from freescale.balance.placement import Floats
from freescale.simulate.cluster import Cluster


@dataclass(frozen=True)
class Demand:
    """What a transfer asks: seconds before anything moves, and seconds of each level."""

    latency: float
    levels: tuple[float, float, float]
    shares: Floats | None = None
    """Of that time, after how much each rank is done; without, all are at its end."""

    def slower(self, share: float) -> "Demand":
        """The same, by a way that reaches only a share of the rates."""
        near, far, spine = (seconds / share for seconds in self.levels)
        return replace(self, levels=(near, far, spine))

    def ends(self, begin: float, end: float, world_size: int) -> Floats:
        """When each rank is done, if the last one is at `end`."""
        moves = min(end, begin + self.latency)
        return moves + (end - moves) * (np.ones(world_size) if self.shares is None else self.shares)


class Topology:
    """Some ranks of a cluster, host by host."""

    def __init__(self, cluster: Cluster, world_size: int, rng: np.random.Generator) -> None:
        self._cluster, self._world_size, self._rng = cluster, world_size, rng
        self._local = min(world_size, round(cluster.ranks_per_host))
        self._leaf = min(world_size, round(cluster.hosts_per_leaf) * self._local)

    def all_to_all(self, size: Floats, *, comes: bool = False, whole: bool = True) -> Demand:
        """Every rank sends so many bytes, spread over all ranks alike; or gets them so, if it `comes` to them.

        `whole`: not cut into pieces.
        """
        c, world_size, local = self._cluster, self._world_size, self._local
        if world_size == 1:
            return Demand(0.0, (0.0, 0.0, 0.0))
        beyond = (world_size - local) / world_size
        own, others = self._of_hosts(size) * beyond, np.full(world_size, float(size.mean()) * local * beyond)
        if world_size == 2 * local:  # of two hosts, each gets what the other sends
            others = own[::-1].copy()
        got, sent = (own, others) if comes else (others, own)
        # A rank is done when it has what comes to it, and that comes last from whoever sends the most.
        done = np.minimum(got, local * size * beyond) if comes else got
        if c.one_way and whole:
            done = done + 6 / (world_size + 4) * self._behind_others() * sent
        if not comes:
            done = np.maximum(done, _largest_other(sent, local) * self._served())
        levels = float(size.max()) * (local - 1) / world_size / c.near, float(done.max()) / c.far
        spine = float(size.mean()) * local * (world_size - self._leaf) / world_size * c.oversubscription / c.far
        shares = done / max(float(done.max()), 1e-300) if levels[1] > max(levels[0], spine) else None
        return Demand(c.latency + c.message * (world_size - 1), (*levels, spine), shares)

    def all_reduce(self, size: float) -> Demand:
        """So many bytes are added up over all ranks; every link of a ring carries each nearly twice."""
        c, world_size = self._cluster, self._world_size
        twice = 2 * size * (world_size - 1) / world_size / c.ring
        far, leaf = twice / c.far * (world_size > self._local), twice * c.oversubscription / c.far / c.hosts_per_leaf
        levels = (twice / c.near * (self._local > 1), far, leaf * (world_size > self._leaf))
        return Demand(c.latency * math.ceil(math.log2(max(2, world_size))), levels)

    def _of_hosts(self, size: Floats) -> Floats:
        """Of each rank: what all ranks of its host have together."""
        first = np.arange(0, self._world_size, self._local)
        return np.add.reduceat(size, first).repeat(self._local)[: self._world_size]

    def _behind_others(self) -> Floats:
        """Of each rank: how far what it waits for goes behind what it sends. Each pair of ranks tosses a coin.

        As measured of gloo: all of it between two ranks, a quarter on average between four.
        """
        if self._world_size == 2:
            first = self._rng.integers(2)
            return np.array([first, 1 - first], dtype=np.float64)
        return (self._rng.binomial(self._world_size - 1, 0.5, self._world_size) / (self._world_size - 1)) ** 2

    def _served(self) -> Floats:
        """Of what a rank sends to all others alike: after how much each has its part. Gloo serves them one by one."""
        uneven = self._cluster.one_way and self._world_size > 2
        return self._rng.uniform(0.75, 1.0, self._world_size) if uneven else np.ones(self._world_size)

    def all_gather(self, size: float) -> Demand:
        """Every rank gets so many bytes of every other."""
        return self.all_to_all(np.full(self._world_size, size * self._world_size))


@dataclass(eq=False)
class Flow:
    """A transfer under way."""

    demand: Demand
    begin: float
    """When its last rank has come."""
    deferred: bool
    """Whether it stops for what is urgent."""
    holds_up: bool = True
    """Whether what is deferred stops for it."""
    behind: "Flow | None" = None
    """A transfer of the same group, which goes first."""
    left: float = 1.0
    """Of it, as a share."""
    grace: float = 0.0
    """Seconds of pieces that are already under way when something urgent begins."""
    used: float = 0.0
    """Of those, while that goes on."""


def _largest_other(sent: Floats, local: int) -> Floats:
    """Of each rank: the most that a rank of another host sends."""
    of_host = sent[::local]
    first = int(of_host.argmax())
    second = float(np.delete(of_host, first).max(initial=0.0))
    found = np.full(len(sent), of_host[first])
    found[first * local : (first + 1) * local] = second
    return found


class Network:
    """Transfers under way at once. Time moves on from one end of a transfer to the next."""

    def __init__(self) -> None:
        self.now, self._flows = 0.0, list[Flow]()

    def add(self, flow: Flow) -> None:
        """One more, from when it begins; which is not before now."""
        self._flows.append(flow)

    def next_end(self) -> Flow:
        """Go on until a transfer ends, and give it. `now` is when."""
        while True:
            moving = [flow for flow in self._flows if self._starts(flow) <= self.now]
            waiting = [self._starts(flow) for flow in self._flows if self._starts(flow) > self.now]
            rates, urgent = _rates(moving), _urgent(moving)
            going = list(zip(moving, rates, strict=True))
            ends = [self.now + f.left * max(f.demand.levels) / rate if rate else math.inf for f, rate in going]
            stops = [self.now + (f.grace - f.used) / rate for f, rate in going if f.deferred and rate and urgent]
            then = min([*ends, *waiting, *stops])
            for (flow, rate), end in zip(going, ends, strict=True):
                flow.left = 0.0 if end <= then else flow.left - (then - self.now) * rate / max(flow.demand.levels)
                spent = self.now + (flow.grace - flow.used) / rate <= then if rate else False
                used = flow.grace if spent else flow.used + (then - self.now) * rate  # exactly, or time stands still
                flow.used = used if urgent else 0.0
            self.now = then
            for flow in moving:
                if flow.left <= 0.0:
                    self._flows.remove(flow)
                    return flow

    def _starts(self, flow: Flow) -> float:
        return math.inf if flow.behind in self._flows else flow.begin + flow.demand.latency


def _urgent(flows: list[Flow]) -> bool:
    return any(flow.holds_up and not flow.deferred for flow in flows)


def _rates(flows: list[Flow]) -> list[float]:
    """Of each transfer, against what it has alone: a level is shared by all that use it."""
    urgent = _urgent(flows)
    held = [urgent and flow.deferred and max(flow.demand.levels) > 0 for flow in flows]
    goes = [not hold or flow.grace - flow.used > 1e-9 for flow, hold in zip(flows, held, strict=True)]
    uses = np.array([flow.demand.levels for flow in flows]).reshape(-1, 3)
    uses = uses / np.maximum(uses.max(axis=1, keepdims=True), 1e-300)
    load = np.maximum(uses[goes].sum(axis=0), 1.0)
    return [float(min(1.0 / load[use > 0], default=1.0)) * go for use, go in zip(uses, goes, strict=True)]
