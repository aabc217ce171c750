"""With segments or semi-local attention the guarantees hold as with attention to all events."""

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

STEPS, WHOLE_STEPS = 4, 30
SEGMENTS = {"memory": "segments", "segment": 7, "summaries": 2}
LOCAL = {"memory": "local", "window": 6, "first": 2}
RULES: dict[str, dict[str, Any]] = {"segments": SEGMENTS, "local": LOCAL}


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.random.default_rng(0).choice([1, 2, 7, 8, 20, 30], 96).tolist()
    folder = tmp_path_factory.mktemp("memory")
    write_feature_log(folder / "log", lengths, candidates=False)
    return folder / "log"


def config_of(log: Path, memory: str, **changes: Any) -> RunConfig:
    """Return a retrieval run with prefix and action tokens (segments), or a ranking run with anchors (local)."""
    if memory == "local":
        return with_features(log, anchors="every", model=LOCAL, **changes)
    config = with_features(log, task="retrieval", model=SEGMENTS, **changes)
    return replace(config, task=replace(config.task, interleave=True))


@pytest.mark.parametrize("memory", RULES)
def test_any_placement_and_world_size_gives_the_same_result(
    groups: dict[int, Ranks], features: Path, tmp_path: Path, memory: str, whole_form: bool
) -> None:
    config, steps = config_of(features, memory), WHOLE_STEPS if whole_form else STEPS
    losses, alone = train_placed(groups[1], config, tmp_path, "equal", steps)
    assert any("summary" in name for name in alone) == (memory == "segments")
    for count, place in ((2, "unequal"), (4, "all on rank 1")):
        other_losses, other = train_placed(groups[count], config, tmp_path, place, steps)
        assert np.allclose(losses, other_losses, rtol=1e-9, atol=0), (count, place)
        assert apart(alone, other) < 1e-9, (count, place)


@pytest.mark.parametrize("memory", RULES)
def test_balanced_and_unbalanced_training_agree(
    groups: dict[int, Ranks], features: Path, tmp_path: Path, memory: str
) -> None:
    results = []
    for mode in ("off", "on"):
        config = config_of(features, memory, balance={"mode": mode}, train={"max_steps": STEPS})
        parts = groups[2].run(balanced, config, str(tmp_path / mode))
        results.append(whole([arrays for arrays, _ in parts]))
    assert apart(*results) < 1e-9


def test_prioritized_and_serial_communication_agree_bitwise(
    groups: dict[int, Ranks], features: Path, tmp_path: Path
) -> None:
    results = []
    for overlap in ("off", "on"):
        changes = {"tables": {"overlap": overlap}, "train": {"max_steps": STEPS, "precision": "fp32"}}
        config = config_of(features, "segments", **changes)
        results.append(groups[2].run(overlapped, config, str(tmp_path / overlap), False))
    (serial, ahead) = results
    assert [losses for losses, _ in serial] == [losses for losses, _ in ahead]
    assert same(whole([held for _, held in serial]), whole([held for _, held in ahead]))


def test_a_run_with_segments_resumes_bitwise_and_on_other_world_sizes(
    groups: dict[int, Ranks], features: Path, tmp_path: Path
) -> None:
    config = config_of(features, "segments", train={"save_every": 3, "max_steps": 6})
    once = pieces([groups[2]], config, tmp_path / "once", [])
    assert same(once, pieces([groups[2]] * 2, config, tmp_path / "resumed", [4]))
    assert apart(once, pieces([groups[2], groups[4]], config, tmp_path / "resharded", [2])) < 1e-9
