"""Balanced and unbalanced training give the same result."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.balance.cost import Cost
from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.train.build import build
from tests.support.lab import lab
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


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Ranks]:
    """Four ranks on two hosts."""
    with lab(2) as hosts:
        started = Ranks(4, hosts)
        yield started
        started.close()


def test_training_balanced_in_groups_of_ranks_agrees_with_unbalanced_training(
    two_hosts: Ranks, log: Path, tmp_path: Path
) -> None:
    """A group is a host of two ranks. Samples move between the hosts too, and each is computed once."""
    results, steps = [], []
    for mode in ("off", "on"):
        config = small(
            log,
            data={"global_batch": 48},
            train={"max_steps": STEPS, "epochs": 10},
            balance={"mode": mode, "group_ranks": 2},
            transport={"deferred": "shared_memory"},  # samples take it inside a host too
        )
        parts = two_hosts.run(trained, config, str(tmp_path / mode))
        results.append(whole([arrays for arrays, _ in parts]))
        steps.append([placed for _, placed in parts])
    assert apart(*results) < 1e-9
    moved_between_hosts = 0
    for before, after in zip(*(zip(*ranks, strict=True) for ranks in steps), strict=True):
        hosts = [[sum((s for s, _ in side[first : first + 2]), []) for first in (0, 2)] for side in (before, after)]
        assert sorted(sum(hosts[0], [])) == sorted(sum(hosts[1], []))
        moved_between_hosts += set(hosts[0][0]) != set(hosts[1][0])
    assert moved_between_hosts > 0
    work = [np.array([[cost for _, cost in placed] for placed in ranks]) for ranks in steps]
    slowest = [(of.max(axis=0) / of.mean(axis=0)).mean() for of in work]
    assert slowest[1] - 1 < 0.3 * (slowest[0] - 1)


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
