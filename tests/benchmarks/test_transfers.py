"""Transfers, and ranks that are lost."""

from pathlib import Path

import pytest

from tests.benchmarks.conftest import Measure, draws_a_picture


@pytest.mark.quiet
def test_rows_sent_during_compute_add_little_to_a_step(tmp_path: Path, measure_alone: Measure) -> None:
    options = ["--steps", "3", "--turns", "1", "--sweep", "0", "0.5", "--sweep-turns", "1"]
    options += ["--ids", "4096", "--seconds", "0.06", "--rounds", "1"]
    few, popular, *_ = measure_alone("embedding.py", *options)
    assert 0.2 < few["exposed_falls_by_against_torchrec"] < 1
    assert popular["bytes_over_torchrec"] < 0.6
    assert draws_a_picture(tmp_path / "embedding.json")


@pytest.mark.quiet
def test_urgent_exchanges_overtake_deferred_ones(measure_alone: Measure) -> None:
    (took,) = measure_alone("overtaking.py", "--repeats", "1")
    assert took["chunk_ms"] == pytest.approx(1e3 * (1 << 19) / 2 * 8 / 2e9, abs=0.01)
    assert max(took["alone_ms"], took["chunked_ms"]) < took["same_group_ms"], "there it waits for 64 MB"


def test_every_transport_is_measured_and_delivers_the_same_bytes(measure_alone: Measure) -> None:
    options = ["--ranks", "2", "--exchanges", "60", "--large", "1", "--large-rows", "300000", "--megabytes", "1"]
    options += ["--turns", "1", "--mbit", "2000", "--staged-megabytes", "1"]
    exact, near, far = measure_alone("transport.py", *options)
    assert exact["exact"]["wrong"] == {"host_staged": 0, "shared_memory": 0}
    assert exact["exact"]["exchanges"] == 60
    assert exact["exact"]["impossible"] == {"copy_engine": "the rows are not on a GPU"}
    assert (far["host_staged"]["mbit"], far["host_staged"]["megabytes"]) == (2000, 1)
    for way, found in (*near.items(), *far.items()):
        for kind, ms in (("time", "ms"), ("cpu", "cpu_ms")):
            parts = found[f"{way}_{ms}"] / found[f"c10d_{ms}"]
            assert found[f"{kind}_ratio"] == pytest.approx(parts, rel=0.02)
            assert 0.05 < found[f"{kind}_ratio_same"] < 20, "gloo against itself"
    # 1 MB a rank, half of it to the other one.
    assert far["host_staged"]["c10d_ms"] > 1e3 * (1 << 19) * 8 / 2000e6


@pytest.mark.quiet
def test_a_rank_killed_at_any_moment_is_named_and_leaves_nothing(measure_alone: Measure) -> None:
    summary, *kills = measure_alone("kills.py", "--kills", "5")
    assert summary["named_in_time"] == summary["kills"] == 5, [kill for kill in kills if not kill["ok"]]
    assert set(summary["left_behind"].values()) == {0}
    assert summary["next_run_ends"]


@pytest.mark.whole
def test_hosts_that_come_and_go_change_nothing_but_rounding(measure_alone: Measure) -> None:
    (result,) = measure_alone("elastic.py", "sizes")
    assert set(result["exit_codes"]) == {0}
    assert result["ranks"][-3:] == [2, 3, 4], "before that, others may have come a little later than the first"
    assert result["steps_once_each"]
    assert result["largest_relative_difference"] < 1e-9


@pytest.mark.whole  # with one fault it would show nothing
def test_a_launcher_that_starts_ranks_again_does_not_grow(measure_alone: Measure) -> None:
    (result,) = measure_alone("elastic.py", "soak", "--minutes", "5", "--every", "30")
    assert result["exit_code"] == 130
    assert result["faults"] >= 3
    for first, last in (result["first_and_last"][f"agent {what}"] for what in ("threads", "descriptors")):
        assert last <= first


def test_ranks_hold_the_sockets_that_are_counted_over_a_wire_that_moves_nothing(measure_alone: Measure) -> None:
    *counted, on_demand, all_pairs = measure_alone("startup.py", "--ranks", "8", "--steps", "2")
    assert [kind["steps"] for kind in (on_demand, all_pairs)] == [2, 2]
    for kind in (on_demand, all_pairs):
        assert {name: kind["sockets"][name] for name in ("mean", "most")} == kind["counted"]
        assert set(kind["seconds"]) == {
            *("processes up", "group joined", "trainer built", "first step", "other steps", "ended")
        }
    assert on_demand["sockets"]["mean"] < 0.6 * all_pairs["sockets"]["mean"]
    assert {rank["ranks"] for rank in counted} == {16_384}
    for rank in counted:
        assert rank["messages"]["rows to other hosts"] in (255, 256), "2,047 hosts, led by 8 ranks in turn"
        assert rank["sockets"] < 16_384 / 8 + 8, "hosts and ranks per host"
    assert counted[0]["messages"]["hosts, at the start"] == 14
    assert counted[1]["messages"]["hosts, at the start"] == 1
