"""Balanced and unbalanced training give the same result."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.balance.cost import Cost
from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.train.build import build
from tests.support.ranks import Ranks, World
from tests.support.training import apart, held, joined, small, whole

STEPS, WHOLE_STEPS = 10, 50
COST = Cost.hstu(dim=8, layers=2, heads=2)
RANKING = {"task": {"kind": "ranking", "labels": ("label_click",)}}


def trained(world: World, config: RunConfig, folder: str) -> tuple[Any, ...]:
    trainer = build(config, joined(world), Path(folder))
    run, placed = trainer.components.step.run, []

    def noting(batch: Batch, *words: Any, **more: Any) -> Any:
        placed.append((batch.sample_id.tolist(), float(COST.of(batch.history.lengths.numpy()).sum())))
        return run(batch, *words, **more)

    trainer.components.step.run = noting  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    return held(trainer), placed


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("counts", ["free", "equal"])
@pytest.mark.parametrize("task", [{}, RANKING], ids=["retrieval", "ranking"])
def test_balanced_and_unbalanced_training_agree(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, ranks: int, counts: str, task: dict[str, Any], whole_form: bool
) -> None:
    results, slowest = [], []
    for mode in ("off", "on"):
        config = small(
            log,
            train={"max_steps": WHOLE_STEPS if whole_form else STEPS, "epochs": 10},
            balance={"mode": mode, "counts": counts},
            transport={"deferred": "shared_memory" if counts == "equal" else "c10d"},  # samples take it too
            **task,
        )
        parts = groups[ranks].run(trained, config, str(tmp_path / mode))
        results.append(whole([arrays for arrays, _ in parts]))
        work = np.array([[cost for _, cost in placed] for _, placed in parts])
        slowest.append((work.max(axis=0) / work.mean(axis=0)).mean())
    assert apart(*results) < 1e-9
    assert slowest[1] - 1 < 0.7 * (slowest[0] - 1)  # few samples per rank: more cannot be balanced
