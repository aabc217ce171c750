"""With features of every kind, anchors and several tasks the guarantees hold as without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.config import RunConfig
from tests.exact.test_balance import trained as balanced
from tests.exact.test_overlap import trained as overlapped
from tests.exact.test_placement import train as train_placed
from tests.exact.test_resume import pieces
from tests.support.feature_log import with_features, write_feature_log
from tests.support.ranks import Ranks
from tests.support.training import apart, same, whole

STEPS, WHOLE_STEPS = 5, 30
KINDS = ("anchors", "candidates", "retrieval")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    lengths = np.random.default_rng(0).choice([1, 2, 3, 5, 8, 20, 60], 96).tolist()
    folder = tmp_path_factory.mktemp("features")
    for name in ("anchors", "candidates"):
        write_feature_log(folder / name, lengths, candidates=name == "candidates")
    return {"anchors": folder / "anchors", "candidates": folder / "candidates", "retrieval": folder / "anchors"}


def config_of(kind: str, logs: dict[str, Path], **changes: Any) -> RunConfig:
    if kind in ("retrieval", "interleaved"):
        config = with_features(logs["retrieval"], task="retrieval", **changes)
        return replace(config, task=replace(config.task, interleave=kind == "interleaved"))
    return with_features(logs[kind], anchors="labeled" if kind == "anchors" else "none", **changes)


@pytest.mark.parametrize("kind", [*KINDS, "interleaved"])
def test_any_placement_and_world_size_gives_the_same_result(
    groups: dict[int, Ranks], logs: dict[str, Path], tmp_path: Path, kind: str, whole_form: bool
) -> None:
    config, steps = config_of(kind, logs), WHOLE_STEPS if whole_form else STEPS
    losses, alone = train_placed(groups[1], config, tmp_path, "equal", steps)
    for count, place in ((2, "unequal"), (4, "all on rank 1")):
        other_losses, other = train_placed(groups[count], config, tmp_path, place, steps)
        assert np.allclose(losses, other_losses, rtol=1e-9, atol=0), (count, place)
        assert apart(alone, other) < 1e-9, (count, place)


@pytest.mark.parametrize("kind", KINDS)
def test_balanced_and_unbalanced_training_agree(
    groups: dict[int, Ranks], logs: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    results = []
    for mode in ("off", "on"):
        config = config_of(kind, logs, balance={"mode": mode}, train={"max_steps": STEPS})
        parts = groups[2].run(balanced, config, str(tmp_path / mode))
        results.append(whole([arrays for arrays, _ in parts]))
    assert apart(*results) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_prioritized_and_serial_communication_agree_bitwise(
    groups: dict[int, Ranks], logs: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    results = []
    for overlap in ("off", "on"):
        changes = {"tables": {"overlap": overlap}, "train": {"max_steps": STEPS, "precision": "fp32"}}
        config = config_of(kind, logs, **changes)
        results.append(groups[2].run(overlapped, config, str(tmp_path / overlap), False))
    (serial, ahead) = results
    assert [losses for losses, _ in serial] == [losses for losses, _ in ahead]
    assert same(whole([held for _, held in serial]), whole([held for _, held in ahead]))


def test_a_run_with_anchors_resumes_bitwise_and_on_other_world_sizes(
    groups: dict[int, Ranks], logs: dict[str, Path], tmp_path: Path
) -> None:
    config = config_of("anchors", logs, train={"save_every": 3, "max_steps": 8})
    once = pieces([groups[2]], config, tmp_path / "once", [])
    assert same(once, pieces([groups[2]] * 2, config, tmp_path / "resumed", [4]))
    assert apart(once, pieces([groups[2], groups[4], groups[1]], config, tmp_path / "resharded", [2, 5])) < 1e-9
