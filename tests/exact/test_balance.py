"""Promise: balanced training learns what unbalanced training does."""

from pathlib import Path
from typing import Any

import pytest

from freescale.config import RunConfig
from freescale.train.build import build
from tests.ranks import Ranks, World
from tests.training import apart, held, joined, small, whole

STEPS = 50
RANKING = {"task": {"kind": "ranking", "labels": ("label_click",)}}


def trained(world: World, config: RunConfig, folder: str) -> tuple[Any, ...]:
    trainer = build(config, joined(world), Path(folder))
    trainer.fit()
    trainer.close()
    return (held(trainer),)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("counts", ["free", "equal"])
@pytest.mark.parametrize("task", [{}, RANKING], ids=["retrieval", "ranking"])
def test_balanced_and_unbalanced_training_agree(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, ranks: int, counts: str, task: dict[str, Any]
) -> None:
    results = []
    for mode in ("off", "on"):
        config = small(log, train={"max_steps": STEPS, "epochs": 10}, balance={"mode": mode, "counts": counts}, **task)
        parts = groups[ranks].run(trained, config, str(tmp_path / mode))
        results.append(whole([arrays for (arrays,) in parts]))
    assert apart(*results) < 1e-9
