"""Promise: whatever happens to a run, it ends with what the undisturbed one learnt, or with one clear error in time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "faults.py"
ON_ONE_HOST = ["kill", "stop", "corrupt", "full", "fsync", "bad sample"]
BETWEEN_HOSTS = ["cut and mended", "lost store"]


@pytest.mark.parametrize("kinds", [ON_ONE_HOST, BETWEEN_HOSTS], ids=["on one host", "between hosts"])
def test_nothing_is_lost(kinds: list[str], tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    command = [sys.executable, BENCHMARK, "--quick", "--faults", str(len(kinds)), "--kinds", *kinds, "--out", out]
    subprocess.run(command, check=True)
    _, *faults = json.loads(out.read_text())["results"]
    assert [fault for fault in faults if not fault["ok"]] == []
    assert [fault["kind"] for fault in faults] == kinds
