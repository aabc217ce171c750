"""Segments and semi-local attention on virtual GPUs: the losses of the CPU, and no report."""

import json
from pathlib import Path
from typing import Any

import pytest

from freescale.train.build import build
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small
from tests.support.vgpu.checks import reports_of

RULES: list[dict[str, Any]] = [
    {"memory": "segments", "segment": 5, "summaries": 2},
    {"memory": "local", "window": 4, "first": 2},
]


def trained(
    world: World, data: str, folder: str, precision: str, model: dict[str, Any]
) -> tuple[list[float], list[str]]:
    """Train; return the losses and the reports of this rank."""
    config = small(data, train={"precision": precision, "max_steps": 6, "log_every": 1}, model=model)
    trainer = build(config, joined(world), Path(folder))
    with reports_of(world) as reports:
        trainer.fit()
        trainer.close()
    losses = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in losses if entry["kind"] == "train"], reports


@pytest.mark.parametrize("model", RULES, ids=[rule["memory"] for rule in RULES])
def test_a_rule_gives_the_losses_of_the_cpu_without_reports(
    gpus: Ranks, groups: dict[int, Ranks], log: Path, tmp_path: Path, model: dict[str, Any]
) -> None:
    on_cpu = groups[2].run(trained, str(log), str(tmp_path / "cpu"), "fp64", model)[0][0]
    for precision, within in (("fp64", 1e-10), ("fp32", 1e-4)):
        results = gpus.run(trained, str(log), str(tmp_path / precision), precision, model)
        for rank, (losses, reports) in enumerate(results):
            assert reports == []
            assert rank or losses == pytest.approx(on_cpu, rel=within)
