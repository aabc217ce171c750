"""Dynamic items on virtual GPUs have the losses and slots of the CPU, and nothing is reported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.train.build import build
from tests.exact.test_dynamic_items import dynamic_items, write_catalogue
from tests.support.ranks import Ranks, World
from tests.support.training import joined
from tests.support.vgpu.checks import reports_of


def trained(world: World, data: str, folder: str) -> tuple[list[float], dict[str, Any], list[str]]:
    """Train with evictions; return the losses, the slots of this rank, and the reports."""
    config = dynamic_items(Path(data), train={"log_every": 1})
    trainer = build(config, joined(world), Path(folder))
    tables = trainer.components.tables
    assert tables is not None
    assert tables.dynamic is not None
    with reports_of(world) as reports:
        trainer.fit()
        slots = {name: state.local.cpu().numpy() for name, state in tables.dynamic.state().items()}
        trainer.close()
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"], slots, reports


@pytest.mark.whole  # in the gate, steps of dynamic ids within the limits of launches
def test_dynamic_items_train_as_on_the_cpu(gpus: Ranks, groups: dict[int, Ranks], tmp_path: Path) -> None:
    log = str(write_catalogue(tmp_path / "data"))
    on_cpu = groups[2].run(trained, log, str(tmp_path / "cpu"))
    entries = [json.loads(line) for line in (tmp_path / "cpu" / "metrics.jsonl").read_text().splitlines()]
    assert sum(entry.get("ids/item/evicted", 0) for entry in entries) > 10
    for rank, (losses, slots, reports) in enumerate(gpus.run(trained, log, str(tmp_path / "gpu"), timeout=400)):
        assert reports == []
        assert rank or losses == pytest.approx(on_cpu[0][0], rel=1e-10)
        for name, expected in on_cpu[rank][1].items():
            assert np.array_equal(slots[name], expected), name
