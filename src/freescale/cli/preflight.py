"""Checks that a command runs before it imports torch, which takes seconds. Ranks check the same where it matters."""

import argparse
from dataclasses import fields, replace
from pathlib import Path

from freescale import config as configs
from freescale.checkpoint.run_folder import complete_checkpoints, is_restart, require_complete, require_start
from freescale.data.dataset import Dataset
from freescale.data.feature_schema import FeatureSchema
from freescale.data.validation import Quarantine
from freescale.launch import is_forked
from freescale.train.metric_sinks import MonitoringOptions


def check_train(config: configs.RunConfig, out: Path, options: argparse.Namespace, *, joins: bool) -> None:
    """Check what a training needs. `joins`: this host may join a run that other hosts have started."""
    if is_forked():
        return
    monitoring(options).check()
    if options.until:
        config.require_continuous()
    check_data(config)
    if not joins and not is_restart() and not options.until:
        newest = next(reversed(complete_checkpoints(out / "checkpoints")), None)
        require_start(out, newest, resume=options.resume, autoresume=options.autoresume)


def monitoring(options: argparse.Namespace) -> MonitoringOptions:
    """Return where the metrics of a training go."""
    return MonitoringOptions(**{field.name: getattr(options, field.name) for field in fields(MonitoringOptions)})


def check_trained_model(run: Path, path: str | None) -> None:
    """Check what a command on a trained model needs. `path`: another data set than the run's."""
    if is_forked():
        return
    config = configs.load_run(run)
    require_complete(run)
    check_data(replace(config, data=replace(config.data, path=path or config.data.path, test_path="")))


def check_data(config: configs.RunConfig) -> None:
    """Check that the data sets of a config can be opened."""
    if is_forked():
        return
    data = config.data
    columns = [*data.columns, *FeatureSchema.from_config(config).columns()]
    for path in filter(None, (data.path, data.test_path)):
        Dataset(path, features=columns, longest=data.longest, quarantine=Quarantine(data.on_bad))
