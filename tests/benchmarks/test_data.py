"""Reading, importing and fuzzing data."""

import pytest

from tests.benchmarks.conftest import Measure


def test_streaming_reads_every_row_and_is_compared_with_pyarrow(measure_alone: Measure) -> None:
    results = measure_alone("streaming.py", "--events", "100000", "--repeats", "1", "--presets", "heavy")
    assert [result["order"] for result in results] == ["shuffle", "log"]
    for result in results:
        assert result["rows"] == result["pyarrow_rows"] == 100_000 // 157
        ratio = result["rows_per_second"] / result["pyarrow_rows_per_second"]
        assert result["ratio_range"] == [result["ratio_median"]] * 2 == [pytest.approx(ratio, abs=0.002)] * 2
        assert result["memory_grown_mb"] < 400


def test_importing_goes_through_the_disk_and_loses_no_event(measure_alone: Measure) -> None:
    (result,) = measure_alone("importing.py", "--events", "300000", "--memory-mb", "8")
    assert result["buckets"] == 6, "300,000 events of 160 bytes, 8 MB at a time"
    assert result["imported_events"] == 300_000
    assert 50 < result["peak_mb"] < 1000


def test_every_kind_of_file_is_fuzzed(measure: Measure) -> None:
    results = measure("fuzz.py", "--examples", "20")
    assert {result["target"] for result in results} >= {"config", "data", "kineto", "cluster", "run"}
    assert all(result["inputs"] >= 18 for result in results)
