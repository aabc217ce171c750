"""What users run beside training works on virtual GPUs: checkpoints, metrics, prediction, export, bench."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from freescale.balance.cost import Cost
from freescale.bench import step_comparison
from freescale.bench.emulated import EmulatedCompute
from freescale.checkpoint import export
from freescale.train.build import build
from freescale.train.trained_model import export_model, load_config, load_trained_model, write_predictions
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, held, joined, small
from tests.support.vgpu.checks import reports_of

STEPS = 6


def trained(world: World, data: str, folder: str, steps: int) -> tuple[Arrays, list[str]]:
    """Train up to a step, from a checkpoint if there is one; return weights and reports."""
    from freescale import config as configs

    config = small(data, train={"max_steps": steps, "save_every": STEPS // 2}, tables={"overlap": "on"})
    trainer = build(config, joined(world), Path(folder))
    if list(Path(folder).glob("checkpoints/step-*")):
        trainer.checkpoints.resume()
    if world.rank == 0:
        configs.save(config, Path(folder) / "config.toml")
    with reports_of(world) as found:
        trainer.fit()
        trainer.close()
    return held(trainer), found


@pytest.mark.parametrize("first", ["cpu", "gpu"])
def test_a_checkpoint_written_on_either_device_resumes_on_the_other(
    gpus: Ranks, groups: dict[int, Ranks], log: Path, tmp_path: Path, first: str
) -> None:
    places = {"cpu": groups[2], "gpu": gpus}
    second = "gpu" if first == "cpu" else "cpu"
    whole = places["cpu"].run(trained, str(log), str(tmp_path / "whole"), STEPS)
    places[first].run(trained, str(log), str(tmp_path / "run"), STEPS // 2)
    for rank, (weights, found) in enumerate(places[second].run(trained, str(log), str(tmp_path / "run"), STEPS)):
        assert found == []
        assert weights.keys() == whole[rank][0].keys()
        for name, values in weights.items():
            np.testing.assert_allclose(values, whole[rank][0][name], rtol=1e-9, atol=1e-12, err_msg=name)


def used(world: World, run: str, out: str) -> tuple[list[str], dict[str, float]]:
    """Evaluate, predict and export a trained model."""
    here = joined(world)
    config = load_config(Path(run))
    with reports_of(world) as found:
        model = load_trained_model(Path(run), config, here)
        write_predictions(model, Path(out) / "top", count=5)
        export_model(model, Path(out) / "export")
    return found, {}


def test_predictions_and_exports_are_those_of_the_cpu(
    gpus: Ranks, groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    groups[2].run(trained, str(log), str(run), STEPS)
    for name, ranks in (("cpu", groups[2]), ("gpu", gpus)):
        assert [found for found, _ in ranks.run(used, str(run), str(tmp_path / name))] == [[], []]
    on_cpu, on_gpu = (pq.read_table(tmp_path / name / "top").sort_by("user_id") for name in ("cpu", "gpu"))
    assert on_cpu["item_id"] == on_gpu["item_id"]
    ours, theirs = (export.read(tmp_path / name / "export") for name in ("gpu", "cpu"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def evaluated(world: World, data: str, folder: str) -> tuple[list[str], dict[str, float]]:
    """Train and evaluate; return reports and metrics."""
    config = small(data, train={"max_steps": STEPS})
    trainer = build(config, joined(world), Path(folder))
    with reports_of(world) as found:
        trainer.fit()
        assert trainer.components.evaluate is not None
        metrics = trainer.components.evaluate()
    return found, metrics


def test_metrics_are_those_of_the_cpu(gpus: Ranks, groups: dict[int, Ranks], log: Path, tmp_path: Path) -> None:
    (_, on_cpu), _ = groups[2].run(evaluated, str(log), str(tmp_path / "cpu"))
    for found, metrics in gpus.run(evaluated, str(log), str(tmp_path / "gpu")):
        assert found == []
        assert metrics == pytest.approx(on_cpu, rel=1e-9)


def compared(world: World, data: str, folder: str) -> list[str]:
    """Run `bench step` with every variant; return reports."""
    config = small(data, train={"precision": "fp32", "max_steps": 4})
    compute = EmulatedCompute(Cost(1e-3, 1e-4, 1e-6), 0.0, 0.0)  # the times of a virtual GPU under load mean nothing
    with pytest.MonkeyPatch.context() as patch, reports_of(world) as found:
        patch.setattr(step_comparison, "calibrate_compute", lambda *_: compute)
        comparison = step_comparison.measure_steps(config, joined(world), Path(folder), turns=1, emulated=False)
    assert len(comparison.runs) == (len(step_comparison.VARIANTS) if world.rank == 0 else 0)
    return found


def test_bench_step_compares_every_variant(gpus: Ranks, log: Path, tmp_path: Path) -> None:
    assert gpus.run(compared, str(log), str(tmp_path)) == [[], []]
