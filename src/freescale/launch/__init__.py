"""Starts the ranks of a command, and starts them again when one is lost. Knows nothing of what they do.

One agent runs on every host. Agents meet at a store that one of them serves; that one decides. The ranks of one start
form a generation: if one is lost, all of them end, and the next generation begins on the hosts that are there.
"""

import os
from collections.abc import Sequence

from freescale.launch.hosts import Hosts


def launched_instead(words: Sequence[str], *, ranks: int, hosts: Hosts | None = None, restarts: int = 0) -> int | None:
    """Where nobody started this process as a rank and several are asked for: start them, and give their exit code.

    `hosts`: on which to start so many each; this one without. `restarts`: how often ranks are started anew.
    """
    # Before torch is imported: it warns of DDP's search for unused parameters, which we want (see `train.network`).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from freescale.launch.agent import Agent
    from freescale.launch.meeting import Meeting
    from freescale.launch.ranks import end_with_parent
    from freescale.transport.world import launched

    end_with_parent()
    if launched() or (ranks == 1 and hosts is None and not restarts):
        return None
    hosts = hosts or Hosts()
    meeting = Meeting(hosts, ranks)
    try:
        return Agent(meeting, words, ranks=ranks, restarts=restarts).run()
    finally:
        meeting.close()
