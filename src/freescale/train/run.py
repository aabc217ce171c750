"""A run in its folder, from nothing or from its newest checkpoint, to a trained model.

runs/NAME/config.toml      the whole config
runs/NAME/config.step-N.toml  the config up to step N, where a resume changed it
runs/NAME/metrics.jsonl    a line per entry
runs/NAME/checkpoints/     see `checkpoint.store`
runs/latest                a link to the newest run
"""

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from freescale import config as configs
from freescale.checkpoint import store
from freescale.checkpoint.listing import require_start
from freescale.errors import INTERRUPTED, UsageError
from freescale.log import warning_once
from freescale.progress import progress
from freescale.train.build import build
from freescale.train.saving import Parts
from freescale.transport.world import World, destroy_world, restart_count


def train(
    config: configs.RunConfig,
    world: World,
    folder: Path,
    *,
    resume: bool,
    accept_changes: bool = False,
    tensorboard: bool = False,
    quiet: bool = False,
) -> int:
    """Train a config in a folder; gives the exit code of the command."""
    newest = store.newest(folder / "checkpoints", world.transport)
    again = restart_count() > 0
    if not again:
        require_start(folder, newest, resume=resume)
    with progress("building the model"):
        trainer = build(config, world, folder, tensorboard=tensorboard, quiet=quiet)
    if newest is not None:
        trainer.saving.resume(partial(_compare, trainer.parts, accept_changes=accept_changes))
    elif again:
        trainer.saving.go_on("there is no checkpoint yet: training begins again")
    if world.is_rank_zero:
        _save_config(config, folder / "config.toml", step=trainer.at.done)
        _link(folder)
    finished = trainer.fit()
    trainer.close(finished=finished)
    destroy_world()
    return 0 if finished else INTERRUPTED


def _compare(parts: Parts, checkpoint: Path, facts: Mapping[str, Any], *, accept_changes: bool) -> None:
    """Say what differs from the config that a checkpoint was trained with; refuse what would change the result."""
    changes = configs.differences(configs.parse(facts["config"], where=str(checkpoint)), parts.config)
    if parts.world.is_rank_zero and changes:
        warning_once(f"resuming with a changed config: {', '.join(map(str, changes))}")
    changed = [str(change) for change in changes if change.changes_result]
    if "data" in facts and parts.data.contents != facts["data"]["contents"]:
        changed.append(f"the contents of {parts.config.data.path}")
    if changed and not accept_changes:
        what = f"resuming would change the training result: {', '.join(changed)}"
        remedy = "leave these out to continue the same training, or add --accept-changes to continue with them"
        raise UsageError(what, where=str(checkpoint), remedy=remedy)


def _save_config(config: configs.RunConfig, path: Path, *, step: int) -> None:
    """Write the config; one that it replaces is kept under the step up to which it was trained with."""
    if path.exists() and configs.differences(configs.load(path), config):
        path.replace(path.with_name(f"config.step-{step:08d}.toml"))
    configs.save(config, path)


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
