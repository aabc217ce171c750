"""Starts the ranks of a run on this machine, by torch's elastic launcher."""

import logging
import os
import sys
from collections.abc import Sequence

_SECONDS_TO_SAVE = 300
INTERRUPTED = 130


def launched_instead(words: Sequence[str], *, ranks: int) -> int | None:
    """Where several ranks are asked for and nobody started them: start them, and give their exit code."""
    # Before torch is imported: it warns of DDP's search for unused parameters, which we want (see `train.network`).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from freescale.transport.world import launched

    return launch(words, ranks=ranks) if ranks > 1 and not launched() else None


def launch(words: Sequence[str], *, ranks: int) -> int:
    """Run `freescale WORDS` on so many ranks and give the exit code of the first that failed, or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quieten("torch.distributed.elastic")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="freescale",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=_SECONDS_TO_SAVE,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "freescale", *words)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException:  # passed on to the ranks, which have saved and ended
        return INTERRUPTED
    return 0


def _quieten(package: str) -> None:
    """What failed or was stopped, the ranks themselves have said. Every logger in there has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)
