"""Trains a config on the workers of Ray Train's TorchTrainer: Ray starts and restarts them, FreeScale trains.

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from freescale.integrations.ray import train_on_worker

    TorchTrainer(
        train_on_worker,
        train_loop_config={"source": "run.toml"},
        scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
        run_config=RunConfig(name="mine", storage_path="/shared", failure_config=FailureConfig(max_failures=10)),
    ).fit()

Only this module imports Ray: pip install 'freescale[ray]'.
"""

from pathlib import Path
from typing import Any

import ray.train  # type: ignore[import-not-found]
import ray.train.torch  # type: ignore[import-not-found]
import torch.distributed as dist

from freescale.checkpoint.run_folder import RunLock, step_of
from freescale.config import resolve
from freescale.errors import UsageError
from freescale.train.build import train
from freescale.train.metrics_logger import read_entries
from freescale.transport.world import from_group

FOLDER = "freescale"
"""The folder of the run, inside that of the Ray run."""


def train_on_worker(settings: dict[str, Any]) -> None:
    """Train on this worker, from the newest checkpoint if there is one.

    `settings["source"]`: a recipe or a TOML file. `settings["flags"]`: overrides, such as ["--train.epochs", "3"].
    """
    config = resolve(settings["source"], settings.get("flags", ()), prog="train_on_worker")
    out, group = _folder(), dist.group.WORLD
    assert group is not None, "Ray initializes it before it calls this function"
    world = from_group(group, ray.train.torch.get_device(), timeout=config.train.timeout)
    with RunLock(out, waits=True) as lock:
        if world.is_rank_zero:
            lock.acquire()
        train(config, world, out, resume=False, autoresume=True, on_checkpoint=_report)


def _folder() -> Path:
    """Return the folder of the run in Ray's storage, where Ray can refer to checkpoints without a copy."""
    storage = ray.train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind != "local":
        what, remedy = f"Ray's storage is {kind}, and a run needs a file system", "set storage_path to a shared folder"
        raise UsageError(what, where=str(storage.experiment_fs_path), remedy=remedy)
    return Path(storage.experiment_fs_path) / FOLDER


def _report(checkpoint: Path) -> None:
    """Report a complete checkpoint and the metrics up to its step. Ray wants this call from all workers alike."""
    if ray.train.get_context().get_world_rank():
        ray.train.report({})
        return
    mode = ray.train.CheckpointUploadMode.NO_UPLOAD
    reference = ray.train.Checkpoint.from_directory(str(checkpoint))
    metrics = {**_newest_metrics(checkpoint), "step": step_of(checkpoint)}
    ray.train.report(metrics, checkpoint=reference, checkpoint_upload_mode=mode)


def _newest_metrics(checkpoint: Path) -> dict[str, Any]:
    """Return the newest value of each metric that was logged up to a checkpoint."""
    newest: dict[str, Any] = {}
    for entry in read_entries(checkpoint.parents[1]):
        if entry["kind"] in ("train", "evaluate", "validate") and entry["step"] <= step_of(checkpoint):
            newest |= entry
    newest.pop("kind", None)
    return newest
