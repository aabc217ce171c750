"""Starts the ranks of a command, and restarts them when one is lost. Independent of what the ranks do.

One agent runs on every host. Agents find each other at a rendezvous store that one of them serves; that agent decides
for all. If a rank is lost, all ranks end, and the agents restart them on the hosts that are alive.
"""

import os
import re
from dataclasses import dataclass

from freescale.errors import UsageError

AGENT = "FREESCALE_AGENT"
"""Environment variable of ranks that our agent started: its process id."""


def is_rank(*, is_agent: bool = False) -> bool:
    """Return whether a launcher (this one, torchrun or SLURM) started this process as one of several ranks.

    `is_agent`: the command names a rendezvous, so a SLURM task is an agent and not a rank.
    """
    slurm_task = "SLURM_PROCID" in os.environ and "SLURM_STEP_NODELIST" in os.environ
    return "RANK" in os.environ or (slurm_task and not is_agent)


def is_forked() -> bool:
    """Return whether our own agent started this process. The agent holds the lock and ran the checks without torch."""
    return AGENT in os.environ and "RANK" in os.environ


@dataclass(frozen=True)
class Hosts:
    """How many hosts take part, and the address of the rendezvous store."""

    least: int = 1
    most: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    """0: any free port, for a single host."""

    @staticmethod
    def parse(hosts: str, endpoint: str) -> "Hosts | None":
        """Parse `--hosts 2:4 --rdzv-endpoint 10.0.0.1:29400`; None if neither is given."""
        if not hosts and not endpoint:
            return None
        count, place = re.fullmatch(r"(\d+)(?::(\d+))?", hosts), re.fullmatch(r"(.+):(\d+)", endpoint)
        if count is None or place is None or not 0 < int(count[1]) <= int(count[2] or count[1]):
            values = f"--hosts {hosts or '(nothing)'} --rdzv-endpoint {endpoint or '(nothing)'}"
            raise UsageError(
                f"{values} does not name a number of hosts and an address",
                remedy="on every host the same, for example: --hosts 2:4 --rdzv-endpoint 10.0.0.1:29400",
            )
        return Hosts(int(count[1]), int(count[2] or count[1]), place[1], int(place[2]))
