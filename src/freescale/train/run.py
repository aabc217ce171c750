"""A run in its folder, from nothing or from its newest checkpoint, to a trained model.

runs/NAME/config.toml      the whole config
runs/NAME/metrics.jsonl    a line per entry
runs/NAME/checkpoints/     see `checkpoint.store`
runs/latest                a link to the newest run
"""

import contextlib
from pathlib import Path

from freescale import config as configs
from freescale.checkpoint import store
from freescale.errors import INTERRUPTED, UsageError
from freescale.progress import progress
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
    if newest is not None and not resume and not again:
        remedy = "add --resume, or choose another --out"
        raise UsageError(f"there is a run in {folder} already", where=str(newest), remedy=remedy)
    if newest is None and resume and not again:
        raise UsageError(f"there is no complete checkpoint in {folder} to resume", remedy="leave out --resume")
    with progress("building the model"):
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
    latest = folder.parent / "latest"
    with contextlib.suppress(OSError):  # a file system without links loses a convenience, nothing else
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)
