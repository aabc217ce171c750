"""Promise: whatever happens to a run, it ends with what the undisturbed one learnt, or with one clear error in time."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "faults.py"
IN_CI = ["corrupt", "cut and mended", "bad sample"]


def test_nothing_is_lost(tmp_path: Path, whole_form: bool) -> None:
    out, kinds = tmp_path / "faults.json", [] if whole_form else ["--kinds", *IN_CI]
    count = "14" if whole_form else str(len(IN_CI))
    subprocess.run([sys.executable, BENCHMARK, "--quick", "--faults", count, *kinds, "--out", out], check=True)
    _, *faults = json.loads(out.read_text())["results"]
    assert [fault for fault in faults if not fault["ok"]] == []
    assert len(faults) == int(count)
