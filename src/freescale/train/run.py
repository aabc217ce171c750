"""A run in its folder, from nothing or from its newest checkpoint, to a trained model.

runs/NAME/config.toml      the whole config
runs/NAME/metrics.jsonl    a line per entry
runs/NAME/checkpoints/     see `checkpoint.store`
runs/latest                a link to the newest run
"""

import contextlib
import os
from pathlib import Path

from freescale import config as configs
from freescale.checkpoint import store
from freescale.checkpoint.listing import require_start
from freescale.errors import INTERRUPTED
from freescale.train.build import build
from freescale.transport.world import World, generation, leave


def train(
    config: configs.RunConfig,
    world: World,
    folder: Path,
    *,
    resume: bool,
    tensorboard: bool = False,
    quiet: bool = False,
) -> int:
    """Train a config in a folder; gives the exit code of the command."""
    newest = store.newest(folder / "checkpoints", world.transport)
    again = generation() > 0
    if not again:
        require_start(folder, newest, resume=resume)
    trainer = build(config, world, folder, tensorboard=tensorboard, quiet=quiet)
    if newest is not None:
        trainer.saving.resume()
    elif again:
        trainer.saving.go_on("there is no checkpoint yet: training begins again")
    if world.leads:
        configs.save(config, folder / "config.toml")
        _link(folder)
    finished = trainer.fit()
    trainer.close(finished=finished)
    leave()
    return 0 if finished else INTERRUPTED


def _link(folder: Path) -> None:
    """Let `latest` point to a run, at once: several runs may end up beside each other."""
    run = folder.resolve()  # --out may be `latest` itself
    beside = run.with_name(f".latest-{os.getpid()}")
    with contextlib.suppress(OSError):  # a file system without links loses a convenience, nothing else
        beside.symlink_to(run.name)
        try:
            beside.replace(run.with_name("latest"))
        finally:
            beside.unlink(missing_ok=True)
