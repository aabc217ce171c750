"""Precision and clipping of the trainer do what their names say."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.ranks import Ranks
from tests.support.training import Arrays, placed, small, whole


def losses_of(ranks: Ranks, path: Path, folder: Path, **changes: dict[str, object]) -> tuple[list[float], Arrays]:
    results = ranks.run(placed, small(path, **changes), str(folder), "equal", 20)
    return np.sum([losses for losses, _ in results], axis=0).tolist(), whole([held for _, held in results])


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_bf16_trains_nearly_the_same_as_fp32(groups: dict[int, Ranks], log: Path, tmp_path: Path, kind: str) -> None:
    exact, _ = losses_of(groups[2], log, tmp_path, model={"kind": kind}, train={"precision": "fp32"})
    rounded, _ = losses_of(groups[2], log, tmp_path, model={"kind": kind}, train={"precision": "bf16"})
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)
    assert rounded[-1] < rounded[0]


def test_a_clipped_gradient_bounds_the_change_of_the_dense_weights(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    train: dict[str, object] = {"optimizer": "sgd", "lr": 1.0, "clip": 1e-3}
    start = whole([groups[2].run(placed, small(log), str(tmp_path), "equal", 0)[0][1]])
    _, end = losses_of(groups[2], log, tmp_path, train=train)
    moved = np.sqrt(sum(np.sum((end[n] - start[n]) ** 2) for n in end if n.startswith("dense.")))
    assert 0 < moved <= 20 * 1e-3 * (1 + 1e-9)
