"""Tables of dynamic ids."""

from pathlib import Path

import numpy as np

from tests.benchmarks.conftest import Measure


def test_dynamic_ids_have_slots_of_their_own_that_fbgemm_finds(measure: Measure) -> None:
    options = ["--slots", "65536", "--queries", "300000", "--rounds", "2", "--batch", "4096"]
    *loads, fbgemm, timed = measure("zero_collision.py", *options)
    for result, most in zip(loads, (0.01, 0.5), strict=True):
        assert result["collisions_among_slots"] == 0
        assert result["percent_without_slot"] <= most < 29 < result["percent_sharing_a_row_when_hashed"]
    assert fbgemm["different"] == 0
    assert fbgemm["freed_slots"] > 1000
    assert 100_000 < fbgemm["found"] < fbgemm["ids"]
    assert set(timed["ratio_median"]) >= {"baseline again", "lookup", "assign, 10% new"}


def test_a_large_table_is_filled_saved_and_resumed(tmp_path: Path, measure: Measure) -> None:
    (result,) = measure("large_table.py", "--slots", "200000", "--folder", tmp_path)
    assert result["same_rows_after_resume"]
    assert result["percent_without_slot"] < 0.01
    assert result["stored_bytes_per_slot"] <= 24


def test_steps_with_dynamic_ids_are_compared_with_those_of_a_vocabulary(measure: Measure) -> None:
    options = ["--ranks", "1", "--rounds", "2", "--steps", "2", "--sessions", "20", "--items", "200", "--samples", "16"]
    wall, cpu = measure("dynamic_step.py", *options)
    assert (wall["clock"], cpu["clock"]) == ("wall", "cpu")
    for result in (wall, cpu):
        least, ratio, most = result["over_vocabulary"]["dynamic"]
        assert 0.2 < least <= ratio <= most < 5
        assert set(result["ms"]) == {"vocabulary", "dynamic", "vocabulary again"}


def test_tables_of_a_changing_catalogue_are_compared_by_their_hit_rate(tmp_path: Path, measure: Measure) -> None:
    rng = np.random.default_rng(0)
    minute = np.sort(rng.integers(0, 60 * 24 * 60, 3000))
    log = np.stack([rng.integers(0, 60, 3000), rng.integers(0, 200, 3000), minute], axis=1).astype(np.int32)
    np.save(tmp_path / "places.npy", log)
    options = ["--seeds", "1", "--items", "60", "--sessions", "12", "--foursquare", tmp_path / "places.npy"]
    for result in measure("dynamic_quality.py", *options):
        assert result["hr@10"].keys() == {"dynamic", "hashed", "fixed"}
        assert result["held_out_sessions"] > 10
        assert result["unknown_targets"]["hashed"] == 0 <= result["unknown_targets"]["dynamic"] < 1
