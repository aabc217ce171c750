"""The training result does not depend on which rank computes a sample, or with how many others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.config import RunConfig
from tests.support.ranks import Ranks
from tests.support.training import Arrays, apart, gradients, placed, same, small, whole

STEPS, WHOLE_STEPS = 8, 20
PLACES = ("equal", "unequal", "last rank empty", "all on rank 1")
KINDS: dict[str, dict[str, Any]] = {
    "hstu, row-wise adagrad": {},
    "hstu, adagrad, in parts": {"tables": {"optimizer": "adagrad"}, "train": {"micro_batches": 3}},
    "sasrec, sgd": {"model": {"kind": "sasrec"}, "tables": {"optimizer": "sgd"}, "train": {"clip": 0.5}},
    "sasrec, replicated": {"model": {"kind": "sasrec"}, "tables": {"placement": "replicated"}},
    "ranking": {"task": {"kind": "ranking", "labels": ("label_click",)}},
}


def train(ranks: Ranks, config: RunConfig, folder: Path, place: str, steps: int) -> tuple[list[float], dict[str, Any]]:
    results = ranks.run(placed, config, str(folder), place, steps)
    losses = np.sum([losses for losses, _ in results], axis=0).tolist()
    return losses, whole([held for _, held in results])


@pytest.mark.parametrize("kind", KINDS)
def test_any_placement_and_world_size_gives_the_same_result(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, kind: str, whole_form: bool
) -> None:
    config, steps = small(log, **KINDS[kind]), WHOLE_STEPS if whole_form else STEPS
    losses, alone = train(groups[1], config, tmp_path, "equal", steps)
    assert losses[-1] < losses[0]
    for count in (2, 4):
        for place in PLACES if whole_form else PLACES[1::2]:
            other_losses, other = train(groups[count], config, tmp_path, place, steps)
            assert np.allclose(losses, other_losses, rtol=1e-9, atol=0), (count, place)
            assert apart(alone, other) < 1e-9, (count, place)


@pytest.mark.parametrize("kind", ["hstu, row-wise adagrad", "ranking"])
def test_micro_batches_train_as_one_batch_does_and_repeat_bitwise(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, kind: str
) -> None:
    config = small(log, **KINDS[kind])
    losses, one = train(groups[2], config, tmp_path, "unequal", STEPS)
    in_parts = replace(config, train=replace(config.train, micro_batches=4))
    (split_losses, split), (again_losses, again) = (
        train(groups[2], in_parts, tmp_path, "unequal", STEPS) for _ in range(2)
    )
    assert np.allclose(losses, split_losses, rtol=1e-9, atol=0)
    assert apart(one, split) < 1e-9
    assert split_losses == again_losses
    assert same(split, again)


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_loss_and_gradients_on_fbgemm_tables_are_the_same_on_any_world_size(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, kind: str
) -> None:
    config = small(log, train={"precision": "fp32"}, model={"kind": kind, "dropout": 0.0})
    found = []
    for count in (1, 2, 4):
        for place in ("equal", "unequal", "last rank empty"):
            results = groups[count].run(gradients, config, str(tmp_path), place)
            found.append((sum(loss for loss, _ in results), whole([arrays for _, arrays in results])))
    loss, of_one = found[0]
    for other_loss, of_many in found[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert apart(end_to_end(of_one), end_to_end(of_many)) < 1e-5


def end_to_end(arrays: Arrays) -> Arrays:
    """The dense gradient as one vector, beside those of the tables: some of its parts are zero but for rounding."""
    dense = np.concatenate([value.ravel() for name, value in sorted(arrays.items()) if name.startswith("dense.")])
    return {"dense": dense} | {name: value for name, value in arrays.items() if not name.startswith("dense.")}
