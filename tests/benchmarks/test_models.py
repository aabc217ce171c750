"""Models: their time, memory and kernels, and the quality that they reach."""

import json
from pathlib import Path

import numpy as np
import pytest

from freescale.data import synthetic
from tests.benchmarks.conftest import Measure


@pytest.mark.quiet
def test_a_jagged_step_costs_a_fraction_of_a_padded_one(measure_alone: Measure) -> None:
    results = measure_alone("jagged.py", "--batch", "32", "--longest", "512", "--repeats", "1", "--dim", "32")
    assert [result["model"] for result in results] == ["hstu", "sasrec"]
    for result in results:
        assert result["tokens"] < 0.5 * result["tokens_padded"] == 0.5 * 32 * 512
        assert result["ratio_median"] == pytest.approx(result["jagged_ms"] / result["padded_ms"], rel=0.05)
        assert result["ratio_median"] < 0.7


def test_ranking_comes_near_the_planted_optimum(measure: Measure) -> None:
    (result,) = measure("ranking.py", "--users", "4000", "--test-users", "1000", "--ranks", "1", "--seeds", "0")
    for label in ("label_click", "label_like"):
        first, *_, last = result[label]["curve"].values()
        assert last < first
        assert result[label]["optimum"] < last < 1.15 * result[label]["optimum"]
        assert 0.97 < result[label]["ratio_of_truth"] < 1.03


def test_a_recipe_is_trained_resumed_and_its_curve_kept(tmp_path: Path, measure: Measure) -> None:
    data = tmp_path / "data"
    synthetic.write_log(data, "ml1m", users=300, catalogue=200)
    options = ["--data", data, "--runs", tmp_path / "runs", "--recipes", "sasrec-ml1m"]
    for steps in ("2", "4"):
        (result,) = measure("quality.py", *options, "--steps", steps)
    assert [entry["step"] for entry in result["curve"]] == [2, 4]
    assert result["reached"] == result["curve"][-1]
    assert result["anchor"] == {"hr@10": 0.2853, "ndcg@10": 0.1603}
    lines = (tmp_path / "runs" / "sasrec-ml1m" / "metrics.jsonl").read_text().splitlines()
    evaluated = [entry for entry in map(json.loads, lines) if entry["kind"] == "evaluate"]
    for entry, whole in zip(result["curve"], evaluated, strict=True):
        assert entry == {name: round(whole[name], 4) for name in entry}
        assert entry["ndcg@10"] <= entry["hr@10"] <= entry["hr@50"] <= entry["hr@200"]
        assert whole["hr@200"] == pytest.approx(1 - whole["seen_targets"] - whole["unknown_targets"]), "of 200 items"
        assert whole["users"] == 300


def test_memory_of_attention_follows_tokens_and_not_pairs(measure_alone: Measure) -> None:
    options = ["--batch", "8", "--longest", "256", "--widths", "32", "--rounds", "1", "--memory", "1024", "4096"]
    time, memory = measure_alone("attention.py", *options)
    lengths = np.minimum(synthetic.draw_lengths("heavy", 8, np.random.default_rng(0)), 256)
    assert time["tokens"] == lengths.sum()
    assert all(time[f"{name}_over_dense"] > 0 for name in ("pairs_in_c", "pairs_by_torch", "pairs_in_c_again"))
    shorter, longer = memory["memory_mb"].values()
    assert longer < 6 * shorter
    assert longer < memory["one_matrix_of_pairs_mb"]["4096"] / 2


def test_kernels_compile_without_spills_tf32_and_atomics_and_divide_their_work_evenly(
    measure_alone: Measure, whole_form: bool
) -> None:
    operands = ["16-bit", "fp32"] if whole_form else ["16-bit"]
    results = measure_alone("kernels.py", "--archs", "90", "--widths", "64", "--operands", *operands)
    compiled = [result for result in results if "kernel" in result]
    names = {"forward", "backward_rows", "backward_columns", "join"}
    names |= {"splitmix64", "dropout", "token_losses", "row_gradients", "update_rows"}
    names |= {"find_slots", "insert_ids", "initialize_rows"}
    assert {result["kernel"] for result in compiled} == names
    for result in compiled:
        assert (result["spilled_bytes"], result["tf32"], result["float_atomics"]) == (0, False, False)
        on_tensor_cores = result["type"] == "bf16" and result["kernel"] in (
            "forward",
            "backward_rows",
            "backward_columns",
        )
        assert set(result["matrix_instructions"]) == ({"wgmma"} if on_tensor_cores else set()), result
    assert {result["targets"] for result in results if "flops_over_least" in result} == {0, 20}
    for result in results:
        assert max(result.get("rows_max_over_mean", 1), result.get("columns_max_over_mean", 1)) <= 1.25
        assert max(result.get("flops_over_least", 1), result.get("bytes_over_least", 1)) <= 1.15


def test_anchors_have_the_gradients_of_separate_samples_in_a_fraction_of_their_time(measure: Measure) -> None:
    (result,) = measure("features.py", "anchors", "--rounds", "1")
    assert result["worst_difference"] < 1e-9
    assert result["time_ratio"][0] < 0.3  # of CPU time, beside other tests


def test_the_small_recipe_of_dlrm_v4_trains_with_every_technique(measure: Measure) -> None:
    (result,) = measure("features.py", "planted", "--ranks", "2", "--users", "160")
    assert 0.75 < result["planted_auc"] < 0.9  # of 30 users
    assert 0.4 < result["2 ranks"]["auc/label_full_listen"] < result["planted_auc"]


@pytest.mark.quiet
def test_time_and_memory_of_the_rules_of_visibility_follow_pairs_and_tokens(measure_alone: Measure) -> None:
    results = measure_alone("memory.py", "--events", "4000", "--peak", "2000", "8000", "--rounds", "3")
    of = {result["memory"]: result for result in results[:4]}
    for name, share in (("segments", 0.2), ("local", 0.3)):
        assert of[name]["pairs"] < share * of["full"]["pairs"]
        assert of[name]["over_full"] < 0.6 * of["again"]["over_full"]
    for shorter, longer in zip(results[4::2], results[5::2], strict=True):
        assert longer["peak_mb"] < 6 * shorter["peak_mb"], longer
