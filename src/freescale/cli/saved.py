"""What the commands on a trained model share: its run, on one rank or many."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from freescale.checkpoint.run_folder import RunLock
from freescale.cli import preflight
from freescale.cli.options import Flag
from freescale.errors import storage_errors
from freescale.launch.launcher import launch_ranks
from freescale.progress import progress

if TYPE_CHECKING:
    from freescale.train.trained_model import TrainedModel


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Which trained model, and over how many ranks."""

    run: tyro.conf.Positional[Path]
    """Folder of a training, such as runs/latest."""
    data: str | None = None
    """Another data set than the one it was trained on; it must have the same items."""
    nproc: int = 1
    """Ranks to start on this machine. Each holds its share of the tables."""
    quiet: Flag = False
    """Show no progress, only results, notes and errors."""


def on_ranks(
    options: RunOptions, words: Sequence[str], work: Callable[["TrainedModel"], None], *, out: Path | None = None
) -> int:
    """Open the run on every rank and let each do its part of the work. `out`: the folder that it writes."""
    preflight.use(options.run, options.data)
    with RunLock(out or options.run) as lock:
        code = launch_ranks(words, nproc=options.nproc, lock=lock if out is not None else None)
        return code if code is not None else _open_and_work(options, work, out)


def _open_and_work(options: RunOptions, work: Callable[["TrainedModel"], None], out: Path | None) -> int:
    """What every rank does."""
    with progress("starting"):
        from freescale.train.trained_model import load_config, load_trained_model
        from freescale.transport.world import destroy_world, init_world

        config = load_config(options.run, options.data)
        world = init_world(timeout=config.train.timeout)
    with progress(f"loading {options.run}"):
        saved = load_trained_model(options.run, config, world)
    with storage_errors(out) if out is not None else nullcontext():
        work(saved)
    destroy_world()
    return 0
