"""A run that is hit by a fault ends with the result of the undisturbed run, or with one clear error in time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.parametrize(
    ("kinds", "faults"),
    [
        pytest.param(["cut and mended"], 1, id="a link that is cut and mended"),
        pytest.param(["several on one host", "bad sample"], 7, id="on one host", marks=pytest.mark.whole),
        pytest.param(["several between hosts"], 5, id="between hosts", marks=pytest.mark.whole),
    ],
)
def test_a_fault_loses_no_step(kinds: list[str], faults: int, tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    command = [sys.executable, BENCHMARK, "--quick", "--faults", str(len(kinds)), "--kinds", *kinds, "--out", out]
    subprocess.run(command, check=True)
    _, *found = json.loads(out.read_text())["results"]
    assert [one for one in found if not one["ok"]] == []
    assert [one["kind"] for one in found] == kinds
    assert sum(len(one.get("hit_by", [one["kind"]])) for one in found) == faults
