"""Starts the ranks of a command, and restarts them when one is lost. Independent of what the ranks do.

One agent runs on every host. Agents find each other at a rendezvous store that one of them serves; that agent decides
for all. If a rank is lost, all ranks end, and the agents restart them on the hosts that are alive.
"""

import os

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
