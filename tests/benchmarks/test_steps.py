"""A whole step: its cost beyond the model, its variants, and its simulation."""

from pathlib import Path

import pytest

from tests.benchmarks.conftest import Measure, draws_a_picture


@pytest.mark.quiet
def test_the_trainer_costs_little_beyond_the_step(measure_alone: Measure) -> None:
    (result,) = measure_alone("overhead.py", "--ranks", "1", "--blocks", "4", "--steps", "4")
    for kind in ("cpu", "wall"):
        for name in (f"{kind}_beyond_bare", f"{kind}_floor"):
            low, high = result[f"{name}_quartiles"]
            assert low <= result[f"{name}_percent"] <= high
    assert result["bare_cpu_ms_per_step"] <= 1.1 * result["bare_wall_ms_per_step"], "one rank with one thread"
    assert -50 < result["cpu_beyond_bare_percent"] < 100


@pytest.mark.quiet
def test_recording_costs_little_of_a_step(measure_alone: Measure) -> None:
    (result,) = measure_alone("recorder.py", "--steps", "24")
    assert result["transfers_per_step"] >= 6
    assert 0 < result["percent_of_50_ms"] < 10  # with every second step written down whole


@pytest.mark.quiet
def test_every_variant_of_a_step_is_measured_and_gives_the_same_result(tmp_path: Path, measure_alone: Measure) -> None:
    options = ["--presets", "heavy", "--ranks", "2", "--steps", "8", "--turns", "1", "--exact-steps", "2", "--no-real"]
    options += ["--samples", "16", "--items", "100000", "--dim", "128", "--layers", "2", "--mbit", "200"]
    (result,) = measure_alone("step.py", *options)
    causes = {one["variant"]: one["causes_ms"] for one in result["variants"] if "causes_ms" in one}
    about = ("straggler", "ids", "urgent rows", "row gradients")
    ours, theirs = (sum(causes[way].get(cause, 0.0) for cause in about) for way in ("everything", "TorchRec"))
    assert ours < 0.7 * theirs
    for one in result["exact"]:
        assert one["bitwise"] or one["variant"] in ("balance", "everything", "TorchRec", "TorchRec SparseDist"), one
        assert one["largest_relative"] < (1e-9 if one["precision"] == "fp64" else 1e-4), one
    assert "compute alone" in (tmp_path / "step-heavy-2-emulated.html").read_text()


def test_launches_and_host_synchronizations_of_a_step_are_counted(measure_alone: Measure) -> None:
    (result,) = measure_alone("gpu_budget.py", "retrieval", "--steps", "3")
    assert set(result) > {"main_syncs", "deferred_syncs", "launches", "loss_launches", "before"}
    assert (result["variant"], result["layers"], result["reports"]) == ("retrieval", 2, 0)
    for total, table in (("launches", "launches_by_line"), ("main_syncs", "syncs_by_line")):
        counted = [
            count for thread, _, _, count in result[table] if thread != "freescale-deferred" or total == "launches"
        ]
        assert sum(counted) == result[total] > 0


def test_automatic_selection_is_compared_with_every_fixed_setting(measure_alone: Measure) -> None:
    options = ["--presets", "heavy", "--ranks", "2", "--steps", "2", "--rounds", "2", "--no-real", "--samples", "4"]
    options += ["--items", "5000", "--dim", "16", "--layers", "1"]
    (result,) = measure_alone("autotune.py", *options)
    assert set(result["ms"]) >= {"auto", "overlap on over c10d", "overlap off over c10d", "auto again"}
    assert all(text.startswith("overlap o") for text in result["selected"])
    assert result["best"] in result["ms"]
    assert 0.2 < result["auto_over_best"] < 5


@pytest.mark.quiet
def test_the_simulator_is_held_against_real_runs(measure_alone: Measure) -> None:
    options = ["--ranks", "2", "--mbit", "500", "--steps", "10", "--users", "1500", "--no-real"]
    results = measure_alone("simulator.py", *options)
    assert [result["with"] for result in results] == ["nothing", "balance", "priority", "both", "nothing again"]
    for result in results:
        measured, predicted, _ = result["step"]
        assert 0.5 < predicted / measured < 2


def test_published_runs_are_simulated(measure: Measure) -> None:
    *others, everything, _ = measure("published.py", "--draws", "2", "--ranks", "16")
    gain = next(result for result in others if result["what"] == "throughput by balancing")
    assert gain["predicted"][0] > 1.1
    assert everything["percent_fewer_than_nothing"][1] > 50


def test_every_term_that_grows_with_the_ranks_is_found(tmp_path: Path, measure: Measure) -> None:
    few, many = measure("scale.py", "--ranks", "8", "512", "--steps", "6")
    for term in ("planning_ms", "gathering_lengths_ms", "urgent_latency_ms", "collisions"):
        assert many["everything"][term] > few["everything"][term]
    assert many["everything"]["bubble_percent"] < many["nothing"]["bubble_percent"]
    assert many["both"]["gathering_lengths_ms"] < many["everything"]["gathering_lengths_ms"]
    assert many["both"]["slowest_over_mean"] < 1.01
    assert many["both"]["shared_of_hosts_over_ranks"] < 0.8
    assert draws_a_picture(tmp_path / "scale.json")
