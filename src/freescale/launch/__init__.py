"""Starts the ranks of a command, and starts them again when one is lost. Knows nothing of what they do.

One agent runs on every host. Agents meet at a store that one of them serves; that one decides. The ranks of one start
form a generation: if one is lost, all of them end, and the next generation begins on the hosts that are there.
"""

import os
from collections.abc import Sequence

from freescale.launch.hosts import Hosts
from freescale.progress import progress


def launched_instead(words: Sequence[str], *, ranks: int, hosts: Hosts | None = None, restarts: int = 0) -> int | None:
    """Where nobody started this process as a rank and several are asked for: start them, and give their exit code.

    `hosts`: on which to start so many each; this one without. `restarts`: how often ranks are started anew.
    """
    # Before torch is imported: it warns of DDP's search for unused parameters, which we want (see `train.network`).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if _is_rank(hosts) or (ranks == 1 and hosts is None and not restarts):
        return None
    from freescale.launch.ranks import prepare, wait_until_prepared

    with progress("starting ranks"):
        prepare()  # while this process imports what it needs itself
        from freescale.launch.agent import Agent
        from freescale.launch.meeting import Meeting

        wait_until_prepared()
    meeting = Meeting(hosts or Hosts(), ranks)
    try:
        return Agent(meeting, words, ranks=ranks, restarts=restarts).run()
    finally:
        meeting.close()


def _is_rank(hosts: Hosts | None) -> bool:
    """Whether a launcher (this one, torchrun or SLURM) started this process as one of several ranks.

    A task of SLURM that is told where agents meet is one of these.
    """
    of_slurm = "SLURM_PROCID" in os.environ and "SLURM_STEP_NODELIST" in os.environ
    return "RANK" in os.environ or (of_slurm and hosts is None)
