"""The checkpoint interval follows the cost of saving and the failure rate, and complete checkpoints are reported."""

import math
import threading
from pathlib import Path

import pytest

from freescale.checkpoint.run_folder import FACTS
from freescale.config import RunConfig
from freescale.train.build import build
from freescale.train.checkpoint_manager import CheckpointInterval
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small


def reported(world: World, config: RunConfig, folder: str) -> list[tuple[str, bool]]:
    """Train in a thread, as Ray does; gives the checkpoints that this rank reported, and whether each was complete."""
    trainer, found = build(config, joined(world), Path(folder), quiet=True), list[tuple[str, bool]]()
    trainer.checkpoints.on_complete = lambda path: found.append((path.name, (path / FACTS).exists()))
    training = threading.Thread(target=trainer.fit)
    training.start()
    training.join()
    trainer.close()
    return found


def test_every_complete_checkpoint_is_reported_once_on_all_ranks_in_order(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    config = small(log, train={"max_steps": 8, "save_every": 3, "keep": 9})
    expected = [(f"step-{step:08d}", True) for step in (3, 6, 8)]
    assert groups[2].run(reported, config, str(tmp_path)) == [expected, expected]


def test_a_checkpoint_that_was_not_written_is_not_reported(groups: dict[int, Ranks], log: Path, tmp_path: Path) -> None:
    config = small(log, train={"max_steps": 8, "save_every": 3, "keep": 9})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000003").touch()  # a file where the folder has to be
    expected = [("step-00000006", True), ("step-00000008", True)]
    assert groups[2].run(reported, config, str(tmp_path)) == [expected, expected]


def test_the_interval_follows_cost_and_observed_failures() -> None:
    interval = CheckpointInterval(hours_between_failures=24.0)
    assert interval.seconds == 60.0, "until a save was measured"
    interval.record_save(0.5)
    once = interval.seconds
    assert once == pytest.approx(math.sqrt(2 * 0.5 * 86400), rel=1e-3)
    interval.record_save(2.0)
    assert interval.seconds == pytest.approx(2 * once, rel=1e-3), "four times the cost"
    for _ in range(3):
        interval.record_failure()
    assert interval.seconds == pytest.approx(once, rel=1e-3), "four times as many failures"


def test_a_resumed_run_restores_failures_and_cost_of_saving() -> None:
    before, after = CheckpointInterval(hours_between_failures=1.0), CheckpointInterval(hours_between_failures=1.0)
    before.record_save(0.25)
    before.record_failure()
    after.load_state_dict(before.state_dict())
    assert after.seconds == pytest.approx(before.seconds, rel=1e-3)
