"""Which ranks share a host, and which rank of a host leads its traffic with another host. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class HostLayout:
    """The hosts of a run. Hosts are numbered in the order of their first ranks."""

    host_of: tuple[int, ...]
    """The host of each rank."""

    @staticmethod
    def of(names: Sequence[object]) -> "HostLayout":
        """Return the layout for the name of each rank's host."""
        number = {name: at for at, name in enumerate(dict.fromkeys(names))}
        return HostLayout(tuple(number[name] for name in names))

    @cached_property
    def ranks(self) -> list[list[int]]:
        """The ranks of each host, ascending."""
        of_hosts: list[list[int]] = [[] for _ in range(max(self.host_of) + 1)]
        for rank, host in enumerate(self.host_of):
            of_hosts[host].append(rank)
        return of_hosts

    @property
    def is_consecutive(self) -> bool:
        """Whether the ranks of each host have consecutive numbers."""
        return list(self.host_of) == sorted(self.host_of)

    @property
    def sums(self) -> list[list[int]]:
        """The ranks whose gradients are added before those of others. Empty where that is the order of ranks."""
        return self.ranks if 1 < len(self.ranks) < len(self.host_of) else []

    def leader(self, host: int, other: int, turn: int) -> int:
        """Return the rank of a host that sends to another host and receives from it. Turns have different ones."""
        ranks = self.ranks[host]
        return ranks[(host + other + turn) % len(ranks)]

    def led(self, rank: int, turn: int) -> list[int]:
        """Return the other hosts that a rank leads the traffic with, ascending."""
        host = self.host_of[rank]
        return [o for o in range(len(self.ranks)) if o != host and self.leader(host, o, turn) == rank]
