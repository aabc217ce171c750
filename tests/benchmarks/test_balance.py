"""Balancing of samples and of row owners."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.conftest import Measure
from tests.support.warm_python import WarmPython


def test_few_tokens_move_for_balance(measure: Measure) -> None:
    options = ["--ranks", "8", "64", "--steps", "2", "--repeats", "3"]
    placed = [result for result in measure("balance.py", *options) if "planning" not in result]
    assert {result["ranks"] for result in placed} == {8, 64}
    for result in placed:
        assert result["free_over_bound"] <= 1.005
        assert result["free_moved_tokens"] < 0.15 < result["zigzag_moved_tokens"]


def test_micro_batches_cut_by_cost_are_even_and_need_less_memory(measure: Measure) -> None:
    even, memory = measure("micro_batches.py", "--draws", "20", "--batches", "1", "--dim", "16", "--shorter", "64")
    assert even["cost_by_cost"][1] <= 1.05 < even["cost_by_count"][0]
    assert memory["peak_mb"]["by cost"] < 0.7 * memory["peak_mb"]["one batch"]


def test_padded_placement_is_the_best_sorted_partition_and_steps_get_shorter(measure: Measure) -> None:
    options = ["--ranks", "8", "--draws", "3", "--rounds", "1", "--steps", "4", "--repeats", "1"]
    *placed, steps = measure("padded.py", *options)
    assert [result["lengths"] for result in placed] == ["heavy", "ml-1m", "kuairand"]
    for result in placed:
        assert result["padded_over_best_sorted_partition"][1] <= 1.02
        assert result["padded_over_without"][1] <= 1.0
    assert steps["slowest_cells"]["padded"] < 0.7 * steps["slowest_cells"]["without"]  # by a cost measured here
    assert steps["step_ms"]["padded"] < steps["step_ms"]["without"]


def test_little_moves_for_balance_with_few_samples_per_rank(measure: Measure) -> None:
    options = ["--small-batches", "--shapes", "16x4", "16x8", "16x16", "--lumpy-shapes", "16x128", "--seeds", "2"]
    results = measure("balance.py", *options)
    assert [result["batch"] for result in results] == [4, 8, 16, 128, 128, 128]
    for result in results:
        assert result["max_over_lpt_or_limit_worst"] <= 1
        assert result["batch"] == 4 or result["max_over_bound_worst"] <= 1.005
        assert 1 <= result["moved_over_shared_floor"] <= result["moved_over_excess_floor"] < 2


@pytest.mark.quiet
def test_ranks_wait_less_for_each_other_when_samples_are_balanced(measure_alone: Measure) -> None:
    options = ["--dim", "32", "--turns", "1", "--steps", "8", "--adapt-steps", "48", "--calibration-steps", "16"]
    _, timed, _, slow = measure_alone("straggler.py", *options)
    assert 0.3 < timed["straggler_falls_by"] <= 1
    assert timed["throughput_gain"] > 1
    assert 0.2 < slow["idle_falls_by"] <= 1


def test_every_share_of_many_ranks_is_computed(measure_alone: Measure) -> None:
    (result,) = measure_alone("replay.py", "--ranks", "3", "--steps", "1", "--passes", "2", "--calibration", "2")
    assert result["straggler_percent_balanced_by_cost"] < 0.6 < result["straggler_percent_random_by_cost"]
    for kind in ("random", "balanced", "of_equal_shares"):
        assert 0 <= result[f"straggler_percent_{kind}"] < 100 * 2 / 3, "of 3 ranks, 2 at most wait"
        assert f"straggler_percent_{kind}_cross_checked" in result
    assert 0 < result["tokens_moved_percent"] < 50
    assert min(result["cost"].values()) >= 0


def test_owners_of_rows_are_equally_busy_in_zigzag_order(tmp_path: Path, warm: WarmPython, measure: Measure) -> None:
    rng = np.random.default_rng(0)
    item = (2000 * rng.random(60_000) ** 3).astype(int)  # old items have small keys and are popular
    lines = [f"{user},{one}" for user, one in zip(rng.integers(0, 1500, len(item)), item, strict=True)]
    (tmp_path / "log.csv").write_text("\n".join(["user_id,item_id", *lines]))
    words = ["data", "import", "events", tmp_path / "log.csv", tmp_path / "data", "--time", "none"]
    subprocess.run([warm.python, "-m", "freescale", *words], check=True, capture_output=True)
    result, mean = measure("owners.py", tmp_path / "data", "--ranks", "8", "--users", "16", "--steps", "4")
    assert result["zigzag"] == mean["zigzag"] < 1.1 < 1.5 < result["block"] <= result["popularity block"] + 0.1
    (traffic,) = measure("owners_traffic.py", tmp_path / "data", "--ranks", "2", "--turns", "1", "--steps", "3")
    assert all(ms > 0 for ms in traffic["exposed_ms"].values())


def test_planning_in_groups_is_nearly_as_even_and_moves_little_more(measure: Measure) -> None:
    shapes = ["128x8", "128x128"]
    for result in measure("balance_groups.py", "--shapes", *shapes, "--group", "32", "--seeds", "1", "--repeats", "1"):
        assert result["slowest_over_mean"] < 1.012
        assert result["moved_over_flat"] < 1.3
        assert result["plan_ms"] < result["flat_plan_ms"]
