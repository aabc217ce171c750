"""Long histories: the quality of the rules of `model.memory`, and states of users."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.conftest import Measure


def test_every_rule_is_trained_on_a_log_and_a_run_that_is_kept_is_not_repeated(
    tmp_path: Path, measure: Measure
) -> None:
    rng = np.random.default_rng(0)
    user, place = np.repeat(np.arange(24), 12), rng.integers(0, 20, 24 * 12)
    np.save(tmp_path / "log.npy", np.stack([user, place, rng.permutation(24 * 12)], axis=1).astype(np.int32))
    options = ["--foursquare", tmp_path / "log.npy", "--seeds", "1", "--epochs", "1"]
    found = measure("memory_quality.py", *options)
    runs, rows = found[:4], found[4:]
    assert [run["memory"] for run in runs] == [row["memory"] for row in rows] == ["full", "last", "segments", "local"]
    assert all(run["users"] == 24 and 0 <= run["hr@10"] <= 1 and run["pair_share"] == 1.0 for run in runs)
    assert rows[0]["over_full"] == 1.0
    path = tmp_path / "memory_quality.json"
    kept = json.loads(path.read_text())
    kept["results"][0]["hr@10"] = 0.125
    path.write_text(json.dumps(kept))
    assert measure("memory_quality.py", *options)[4]["hr@10"] == 0.125


@pytest.mark.quiet
def test_an_append_costs_a_fraction_of_encoding_anew(measure_alone: Measure) -> None:
    for result in measure_alone("serving_states.py", "--events", "2000", "--rounds", "3"):
        assert result["append_over_anew"] < 0.5
        assert result["largest_difference"] <= 1e-6
        assert result["kept_tokens"] < 2000
        assert result["bytes_of_a_user"] < 4096 + result["kept_tokens"] * (16 + 4 * 2 * 2 * 64)
