"""Promise: in CI a skipped test fails, unless it needs a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPING = """
import pytest

@pytest.mark.gpu
def test_for_a_gpu():
    pytest.skip("no GPU")

def test_that_could_run():
    pytest.skip("not today")
"""


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 failed, 1 skipped"), ("", "2 skipped")])
def test_a_test_that_could_run_may_not_be_skipped_in_ci(tmp_path: Path, ci: str, outcome: str) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: x\n")
    (tmp_path / "test_skips.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", tmp_path]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert outcome in ended.stdout
