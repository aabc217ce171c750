"""Promise: no measurement rots. The short form of each runs here; its full form and figures are under benchmarks/."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_streaming_holds_bounded_memory(tmp_path: Path) -> None:
    out = tmp_path / "streaming.json"
    command = [sys.executable, BENCHMARKS / "streaming.py", "--events", "2000000", "--repeats", "1", "--out", out]
    subprocess.run(command, check=True, capture_output=True)
    for result in json.loads(out.read_text())["results"]:
        assert result["memory_grown_mb"] < 400
        assert result["rows_per_second"] > 0
    picture = tmp_path / "streaming.png"
    subprocess.run([sys.executable, BENCHMARKS / "picture.py", out, picture], check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_importing_goes_through_the_disk(tmp_path: Path) -> None:
    out = tmp_path / "importing.json"
    options = ["--events", "300000", "--memory-mb", "8", "--out", out]
    subprocess.run([sys.executable, BENCHMARKS / "importing.py", *options], check=True, capture_output=True)
    (result,) = json.loads(out.read_text())["results"]
    assert 0 < result["peak_mb"] < 1000


def test_a_jagged_step_costs_a_fraction_of_a_padded_one(tmp_path: Path) -> None:
    out = tmp_path / "jagged.json"
    options = ["--batch", "32", "--longest", "512", "--repeats", "1", "--dim", "32", "--out", out]
    subprocess.run([sys.executable, BENCHMARKS / "jagged.py", *options], check=True, capture_output=True)
    for result in json.loads(out.read_text())["results"]:
        assert result["ratio_median"] < 0.5
