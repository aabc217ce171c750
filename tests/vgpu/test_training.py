"""The trainer on virtual GPUs gives the results of the CPU, and nothing that a GPU would do wrong is reported."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.models.protocol import Rows
from freescale.models.retrieval import Retrieval, RetrievalInputs
from freescale.train.build import build
from tests.support.feature_log import with_features, write_feature_log
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small
from tests.support.vgpu.checks import reports_of

USERS, ITEMS = 137, 56
STEPS, WHOLE_STEPS = {2: 12, 4: 6}, {2: 200, 4: 40}


class TwoTables(Retrieval):
    """HSTU with a second table of another width: a term per sample for its user."""

    def __init__(self, config: RunConfig) -> None:
        torch.manual_seed(config.seed)
        super().__init__(config, items=ITEMS)
        self.tables = {**self.tables, "user": (USERS, 4)}
        self.of_user = nn.Linear(4, 1)

    def prepare(self, batch: Batch) -> RetrievalInputs:
        inputs = super().prepare(batch)
        return replace(inputs, ids={**inputs.ids, "user": batch.scalars["user_id"]})

    def forward(self, inputs: RetrievalInputs, rows: Mapping[str, Rows]) -> Tensor:
        return super().forward(inputs, rows) + (self.of_user(rows["user"].lookup()) - 1.0).square().sum()


def trained(
    world: World,
    data: str,
    folder: str,
    precision: str,
    deferred: str,
    steps: int,
    two_tables: bool = False,
    replicated: int = 0,
) -> tuple[list[float], list[str]]:
    """Train; return the losses and the reports of this rank."""
    train = {"precision": precision, "max_steps": steps, "epochs": steps, "log_every": 1}
    transport = {"urgent": "copy_engine" if deferred == "copy_engine" else "c10d", "deferred": deferred}
    tables = {"overlap": "on", "replicated_rows": replicated}
    config = small(data, train=train, tables=tables, transport=transport)
    trainer = build(config, joined(world), Path(folder), model=TwoTables(config) if two_tables else None)
    with reports_of(world) as reports:
        trainer.fit()
        trainer.close()
    losses = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in losses if entry["kind"] == "train"], reports


@pytest.mark.parametrize("deferred", ["c10d", "host_staged", "copy_engine"])
def test_training_in_fp64_gives_the_losses_of_the_cpu(
    gpus: Ranks, groups: dict[int, Ranks], log: Path, tmp_path: Path, deferred: str
) -> None:
    on_cpu = groups[2].run(trained, str(log), str(tmp_path / "cpu"), "fp64", "c10d", 6)[0][0]
    for rank, (losses, reports) in enumerate(gpus.run(trained, str(log), str(tmp_path / "gpu"), "fp64", deferred, 6)):
        assert reports == []
        assert rank or losses == pytest.approx(on_cpu, rel=1e-10)


@pytest.mark.whole
def test_replicated_rows_give_the_losses_of_the_cpu(
    gpus: Ranks, groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    words = "fp64", "c10d", 6, True, 15
    on_cpu = groups[2].run(trained, str(log), str(tmp_path / "cpu"), *words)[0][0]
    for rank, (losses, reports) in enumerate(gpus.run(trained, str(log), str(tmp_path / "gpu"), *words)):
        assert reports == []
        assert rank or losses == pytest.approx(on_cpu, rel=1e-10)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4, on_virtual_gpus=True)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("ranks", "precision", "deferred"),
    [(2, "fp32", "c10d"), (2, "bf16", "c10d"), (2, "fp32", "copy_engine"), (4, "fp32", "host_staged")],
)
def test_training_with_tables_of_two_widths_is_free_of_reports(
    request: pytest.FixtureRequest,
    log: Path,
    tmp_path: Path,
    whole_form: bool,
    ranks: int,
    precision: str,
    deferred: str,
) -> None:
    group: Ranks = request.getfixturevalue("gpus" if ranks == 2 else "four")
    steps = (WHOLE_STEPS if whole_form else STEPS)[ranks]
    results = group.run(trained, str(log), str(tmp_path), precision, deferred, steps, True, timeout=1200)
    assert [reports for _, reports in results] == [[]] * ranks
    assert len(results[0][0]) == steps
    losses = results[0][0]  # the last step has the rest of an epoch: a sample
    assert losses[-2] < losses[0]


def trained_with_features(world: World, data: str, folder: str, anchors: str) -> tuple[list[float], list[str]]:
    """Train with features of every kind; return the losses and the reports of this rank."""
    config = with_features(Path(data), anchors=anchors, train={"max_steps": 4, "log_every": 1})
    trainer = build(config, joined(world, timeout=180), Path(folder))  # many small tables: slow beside other tests
    with reports_of(world) as reports:
        trainer.fit()
        trainer.close()
    losses = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in losses if entry["kind"] == "train"], reports


@pytest.mark.parametrize("anchors", ["labeled", pytest.param("none", marks=pytest.mark.whole)])
def test_features_and_anchors_give_the_losses_of_the_cpu(
    gpus: Ranks, groups: dict[int, Ranks], tmp_path: Path, anchors: str
) -> None:
    write_feature_log(tmp_path / "data", [3, 9, 1, 20, 6, 2] * 8, candidates=anchors == "none")
    words = {name: (str(tmp_path / "data"), str(tmp_path / name), anchors) for name in ("cpu", "gpu")}
    on_cpu = groups[2].run(trained_with_features, *words["cpu"])[0][0]
    results = gpus.run(trained_with_features, *words["gpu"], timeout=400)
    assert [reports for _, reports in results] == [[], []]
    assert results[0][0] == pytest.approx(on_cpu, rel=1e-10)
