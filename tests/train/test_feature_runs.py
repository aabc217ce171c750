"""Runs with features are evaluated, exported and used for predictions like those without."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from freescale.checkpoint import export
from freescale.config import RunConfig
from freescale.train.build import build
from freescale.train.metrics_logger import read_entries
from freescale.train.trained_model import export_model, load_config, load_trained_model, write_predictions
from tests.support.feature_log import with_features, write_feature_log
from tests.support.ranks import Ranks, World
from tests.support.training import joined

LENGTHS = [3, 9, 1, 20, 6, 2] * 12


def trained(world: World, config: RunConfig, folder: str) -> None:
    from freescale import config as configs

    trainer = build(config, joined(world), Path(folder))
    trainer.fit()
    trainer.close()
    if world.rank == 0:
        configs.save(config, Path(folder) / "config.toml")


def used(world: World, run: str, folder: str, predicts: bool) -> None:
    """Export a run and write predictions."""
    model = load_trained_model(Path(run), load_config(Path(run)), joined(world))
    export_model(model, Path(folder) / "export")
    if predicts:
        write_predictions(model, Path(folder) / "top", count=3)


@pytest.mark.parametrize("task", ["retrieval", "ranking"])
def test_a_run_with_features_is_evaluated_exported_and_used(
    groups: dict[int, Ranks], tmp_path: Path, task: str
) -> None:
    write_feature_log(tmp_path / "data", LENGTHS, candidates=False)
    anchors = "labeled" if task == "ranking" else "none"
    config = with_features(tmp_path / "data", anchors=anchors, task=task, train={"max_steps": 6, "epochs": 6})
    groups[2].run(trained, config, str(tmp_path / "run"))
    groups[4].run(used, str(tmp_path / "run"), str(tmp_path), task == "retrieval")
    (entry,) = [entry for entry in read_entries(tmp_path / "run") if entry["kind"] == "evaluate"]
    expected = (
        {"hr@10", "users"} if task == "retrieval" else {"ne/label_click", "gauc/label_click", "mse/label_seconds"}
    )
    assert expected <= set(entry)
    tensors = export.read(tmp_path / "export")
    widths = {"item": 8, "artist": 8, "tags": 4, "price": 4, "region": 12, "devices": 8}
    assert {name: tensors[f"tables.{name}"].shape[1] for name in widths} == widths
    assert "features.statistics_age" in tensors, "the statistics of numbers belong to the model"
    if task == "retrieval":
        assert pq.read_table(tmp_path / "top").num_rows == len(LENGTHS)
