"""An all-to-all in which each pair of hosts exchanges one message.

1. Inside each host, every rank passes its rows for another host to the rank that leads for that pair of hosts.
2. The leaders of each pair of hosts exchange one message.
3. Inside each host, the leaders pass the rows on.

Leaders rotate with the pair of hosts, and with the turn of a transfer. Rows of the own host are passed on in the first
stage. A leader learns from the ranks of its host how many rows they send and receive, so hosts exchange no counts.
"""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.transport.base import TracerFactory, Transport, Work
from freescale.transport.host_layout import HostLayout


class TwoLevelTransport(Transport):
    """Relays rows through the leaders of hosts. The ranks of each host have consecutive numbers.

    `near` connects the ranks of this host, counted from 0. `far` connects all ranks, pair by pair. `connect`: called
    with the ranks that this one will exchange messages with, by all ranks in the same order.
    """

    def __init__(
        self,
        layout: HostLayout,
        near: Transport,
        far: Transport,
        *,
        connect: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> None:
        self.peers, self.timeout = far.peers, far.timeout
        self.layout, self.near, self.far = layout, near, far
        self._ranks, self._connect = layout.ranks[layout.host_of[self.peers.rank]], connect
        self._set_turn(0)

    def _set_turn(self, turn: int) -> None:
        self.turn = turn
        host = self.layout.host_of[self.peers.rank]
        self._led_by = [self.layout.led(rank, turn) for rank in self._ranks]
        """By rank of this host, the hosts that it leads the traffic with."""
        self._led = self.layout.led(self.peers.rank, turn)
        self._partners = [self.layout.leader(other, host, turn) for other in self._led]
        """Those of this rank, and the leader of each."""
        self._connect(self._partners)

    def rotated(self, turn: int) -> "TwoLevelTransport":
        """Return this transport with the leaders of another turn."""
        other = copy(self)
        other._set_turn(turn)
        return other

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Trace every stage from now on."""
        self.near.add_tracer(tracer)
        self.far.add_tracer(tracer)

    def all_reduce(self, values: Tensor, *, name: str) -> Work[Tensor]:
        """Sum values over all ranks, in place."""
        return self.far.all_reduce(values, name=name)

    def busy(self, rate: float = 0.0) -> bool:
        """Return whether rows may be moving between hosts."""
        return self.far.busy(rate)

    def all_to_all(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        *,
        name: str,
        most: int | None = None,  # noqa: ARG002  leaders know the size of each message
    ) -> Work[Tensor]:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receive likewise."""
        to_lead, arriving = self._gather_sizes(send, receive, name)
        own = self.layout.host_of[self.peers.rank]
        passed = self._pass_to_leaders(rows, send, receive, to_lead, name)
        work = self._exchange(passed, to_lead, arriving, name)
        hosts = self._by_host(receive)

        def finish() -> Tensor:
            blocks = self._pass_on(work.wait(), arriving, hosts, name)
            blocks[own] = torch.cat([of_rank[0] for of_rank in passed])
            return torch.cat([part for _, part in sorted(blocks.items())])

        return RelayedWork(finish)

    def _by_host(self, counts: Sequence[int]) -> list[list[int]]:
        """Cut a number per rank by host."""
        return [[counts[rank] for rank in ranks] for ranks in self.layout.ranks]

    def _gather_sizes(
        self, send: Sequence[int], receive: Sequence[int], name: str
    ) -> tuple[list[dict[int, list[int]]], list[dict[int, int]]]:
        """Return how many rows each rank of this host has for each rank of the hosts that this rank leads for, and how
        many it receives of each of these hosts.
        """
        sent, received = self._by_host(send), [sum(counts) for counts in self._by_host(receive)]
        messages = [[[*sent[host], received[host]] for host in led] for led in self._led_by]
        numbers = [[number for of_host in message for number in of_host] for message in messages]
        sizes = [len(self.layout.ranks[host]) + 1 for host in self._led]
        values, counts = torch.tensor([*chain.from_iterable(numbers)], dtype=torch.int64), [*map(len, numbers)]
        work = self.near.all_to_all(values, counts, [sum(sizes)] * len(self._ranks), name=f"sizes of {name}")
        to_lead, arriving = [], []
        for of_rank in work.wait().view(len(self._ranks), -1).tolist():
            ends = [0, *accumulate(sizes)]
            cut = {host: of_rank[a:b] for host, a, b in zip(self._led, ends, ends[1:], strict=False)}
            to_lead.append({host: numbers[:-1] for host, numbers in cut.items()})
            arriving.append({host: numbers[-1] for host, numbers in cut.items()})
        return to_lead, arriving

    def _pass_to_leaders(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        to_lead: list[dict[int, list[int]]],
        name: str,
    ) -> list[list[Tensor]]:
        """Pass rows on inside the host.

        Return for each rank of the host its rows for this rank, then for each rank of the hosts that this rank leads.
        """
        by_host = [*rows.split([sum(counts) for counts in self._by_host(send)])]
        own = self.layout.host_of[self.peers.rank]
        for_rank = by_host[own].split([send[rank] for rank in self._ranks])
        parts = [[part, *(by_host[host] for host in led)] for part, led in zip(for_rank, self._led_by, strict=True)]
        sizes = [
            [receive[rank], *chain.from_iterable(led.values())] for rank, led in zip(self._ranks, to_lead, strict=True)
        ]
        joined, counts = torch.cat([*chain.from_iterable(parts)]), [sum(map(len, of_rank)) for of_rank in parts]
        received = self.near.all_to_all(joined, counts, [*map(sum, sizes)], name=f"{name} to leaders").wait()
        return [[*of_rank.split(cut)] for of_rank, cut in zip(received.split([*map(sum, sizes)]), sizes, strict=True)]

    def _exchange(
        self,
        passed: list[list[Tensor]],
        to_lead: list[dict[int, list[int]]],
        arriving: list[dict[int, int]],
        name: str,
    ) -> Work[Tensor]:
        """Start to exchange rows with other hosts: by destination, then by source."""
        send, receive, first = [0] * self.peers.world_size, [0] * self.peers.world_size, 1
        parts = [passed[0][0][:0]]
        for host, partner in zip(self._led, self._partners, strict=True):
            for place in range(first, first + len(self.layout.ranks[host])):
                parts += [of_rank[place] for of_rank in passed if len(of_rank[place])]
            first += len(self.layout.ranks[host])
            send[partner] = sum(sum(led[host]) for led in to_lead)
            receive[partner] = sum(sizes[host] for sizes in arriving)
        return self.far.all_to_all(torch.cat(parts), send, receive, name=f"{name} between hosts")

    def _pass_on(
        self, received: Tensor, arriving: list[dict[int, int]], hosts: list[list[int]], name: str
    ) -> dict[int, Tensor]:
        """Pass the rows of other hosts on inside this one. Return this rank's by host, in the order of sources."""
        sizes = [[of_rank[host] for of_rank in arriving] for host in self._led]
        cut = [of_host.split(size) for of_host, size in zip(received.split([*map(sum, sizes)]), sizes, strict=True)]
        by_rank = [[of_host[place] for of_host in cut] for place in range(len(self._ranks))]
        joined = torch.cat([received[:0], *chain.from_iterable(by_rank)])
        led = [[sum(hosts[host]) for host in of_rank] for of_rank in self._led_by]
        counts = [sum(map(len, parts)) for parts in by_rank], [*map(sum, led)]
        got = self.near.all_to_all(joined, *counts, name=f"{name} from leaders").wait()
        blocks: dict[int, Tensor] = {}
        for of_rank, of_hosts, sizes_of_hosts in zip(got.split(counts[1]), self._led_by, led, strict=True):
            blocks |= zip(of_hosts, of_rank.split(sizes_of_hosts), strict=True)
        return blocks


class RelayedWork(NamedTuple):
    """Rows that are passed on to this rank when it waits for them."""

    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Wait for the rows between hosts, then pass them on."""
        return self.finish()

    wait_on_host = wait
