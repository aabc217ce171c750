"""Moves samples in groups of ranks: a few between groups, then the others inside of them. See `rank_groups`.

A rank talks to the ranks of its group and to those of its column, which has about one rank of every group. Lengths are
gathered inside the group. Between groups travel the sums of each, and the samples that change groups.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from freescale.balance.group_planner import GroupPlanner
from freescale.balance.placement import Ints, Placement
from freescale.balance.sample_exchange import Groups, SampleExchange, SamplePacking, sum_by_rank
from freescale.connections import few_connections
from freescale.data.batch import Events
from freescale.errors import TransportError
from freescale.transport.base import Peers, TracerFactory, Transport
from freescale.transport.c10d import C10d
from freescale.transport.shared_memory import SharedMemory, SharedMemoryTransport

_memory_numbers = itertools.count()
"""Distinguish shared memories in the store. All ranks count alike, because creating one is collective."""


class GroupedSampleExchange(SampleExchange):
    """Balances batch after batch in groups. All ranks take part, each with any number of samples."""

    def __init__(self, inside: Transport, across: Transport, plan: GroupPlanner) -> None:
        super().__init__(inside, plan)
        self._across, self._group_plan = across, plan
        column = plan.groups.column(plan.rank)
        self._first_of_group = np.unique(plan.groups.group[column], return_index=True)[1]
        """A rank of each group, by its place in the column."""
        self._partners = np.searchsorted(column, plan.groups.partners(plan.rank))

    def add_tracer(self, tracer: TracerFactory) -> None:
        """Trace every transfer of samples and sums."""
        super().add_tracer(tracer)
        self._across.add_tracer(tracer)

    def exchange(self, groups: Groups) -> tuple[dict[str, Events], Placement]:
        """Return the samples that this rank computes, and the placement of its group."""
        return super().exchange(self._exchange_between_groups(groups))

    def _exchange_between_groups(self, groups: Groups) -> Groups:
        """Return the samples of this rank after groups have given samples to each other."""
        own = self._group_plan.rank_row({name: events.lengths.numpy() for name, events in groups.items()})
        rank_rows = self._transport.all_gather(torch.from_numpy(own), name="sums of ranks").wait().numpy()
        of_group = torch.from_numpy(self._group_plan.group_row(rank_rows))
        group_rows = self._across.all_gather(of_group, name="sums of groups").wait().numpy()[self._first_of_group]
        given = self._group_plan.give(rank_rows, group_rows)
        return groups if given is None else self._send(groups, given[0], self._partners[given[1]])

    def _send(self, groups: Groups, samples: Ints, to: Ints) -> dict[str, Events]:
        """Send samples to ranks of the column, which do not expect them. Return those that stay or arrive."""
        order = np.argsort(to, kind="stable")
        samples, to, ranks = samples[order], to[order], self._across.peers.world_size
        sent, ones = torch.from_numpy(np.bincount(to, minlength=ranks)), [1] * ranks
        received = self._across.all_to_all(sent, ones, ones, name="sample counts").wait()
        lengths = torch.stack([events.lengths for events in groups.values()], dim=1)
        leaving, counts = lengths[torch.from_numpy(samples)], (sent.tolist(), received.tolist())
        arriving = self._across.all_to_all(leaving, *counts, name="sample lengths").wait().numpy()
        packed, origin = SamplePacking(groups), np.repeat(np.arange(ranks), counts[1])
        outgoing = sum_by_rank(leaving.numpy() @ packed.bytes_per_row, to, ranks)
        incoming = sum_by_rank(arriving @ packed.bytes_per_row, origin, ranks)
        got = self._across.all_to_all(packed.pack(samples, to), outgoing, incoming, name="samples").wait()
        return packed.join(np.setdiff1d(np.arange(len(lengths)), samples), got, arriving, origin)


@dataclass(frozen=True)
class PartialPeers(Peers):
    """Some of the ranks of a run. Errors name the ranks by their numbers in the run."""

    run: Peers

    def raise_if_peer_failed(self) -> None:
        """Raise if a wait of any rank of the run failed."""
        self.run.raise_if_peer_failed()

    def transport_error(self, operation: str, error: Exception) -> TransportError:
        """Build the error of an operation that failed on this rank."""
        return self.run.transport_error(operation, error)


def open_grouped_exchange(
    run: C10d, plan: GroupPlanner, *, shared_memory: bool, timeout: float
) -> GroupedSampleExchange:
    """Open the transports of this rank's group and of its column. Collective.

    `shared_memory`: between the ranks of a host, samples are copied.
    """
    groups, rank = plan.groups, plan.rank
    near = _open_transport(run, [groups.members(number) for number in range(len(groups.sizes))], timeout=timeout)
    inside: Transport = near
    if shared_memory:
        here, name = np.flatnonzero(plan.hosts == plan.hosts[groups.place[rank]]), f"samples {next(_memory_numbers)}"
        inside = SharedMemoryTransport(SharedMemory(near.peers, here.tolist(), name=name, timeout=timeout), near)
    return GroupedSampleExchange(inside, _open_transport(run, groups.columns, timeout=timeout), plan)


def _open_transport(run: C10d, parts: Sequence[Ints], *, timeout: float) -> C10d:
    """Create a gloo group of each part of the ranks, for transfers concurrent with training. Return this rank's.

    All ranks name all groups, so that names count up: those of `use_local_synchronization` can be in the store already.
    """
    with run.peers.guard("opening groups"), few_connections(max(map(len, parts))):
        opened = [dist.new_group(ranks.tolist(), timeout=timedelta(seconds=timeout), backend="gloo") for ranks in parts]
    ((ranks, group),) = [
        (ranks, group)
        for ranks, group in zip(parts, opened, strict=True)
        if isinstance(group, dist.ProcessGroup) and run.peers.rank in ranks
    ]
    transport = C10d(group, run.peers.store, timeout=timeout)
    store = dist.PrefixStore(f"freescale/ranks {ranks[0]}", run.peers.store)
    transport.peers = PartialPeers(group.rank(), group.size(), store, run.peers)
    return transport
