"""The checkpoint interval follows the cost of saving and the failure rate."""

import math

import pytest

from freescale.train.checkpoint_manager import CheckpointInterval


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
