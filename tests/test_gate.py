"""In CI a skipped test fails, unless it needs a GPU; a measurement is repeated only if cores were stolen meanwhile."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python import WarmPython

SKIPPING = """
import pytest

@pytest.mark.gpu
def test_for_a_gpu():
    pytest.skip("no GPU")

def test_that_could_run():
    pytest.skip("not today")
"""

MEASURING = """
import pytest
from tests.support import stolen_time
from tests.support.stolen_time import CoreTime

stolen = iter({stolen})
now = CoreTime(0, 0)
runs = []

def core_time():
    global now
    now = CoreTime(now.total + 1000, now.stolen + next(stolen, 0))
    return now

stolen_time.core_time = core_time

@pytest.fixture
def fresh(tmp_path):
    return tmp_path

@pytest.mark.quiet
def test_that_measures(fresh):
    assert not list(fresh.iterdir())
    (fresh / "result").write_text("")
    runs.append(fresh)
    assert len(runs) == {good_run}

def test_of_the_number_of_runs():
    assert len(runs) == {runs} == len(set(runs))
"""


def run_pytest(warm: WarmPython, folder: Path, code: str, **environment: str) -> str:
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n gpu: x\n quiet: x\n")
    (folder / "test_it.py").write_text(code)
    command = [warm.python, "-m", "pytest", "-p", "no:cacheprovider", folder]
    variables = {**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("stolen", "good_run", "runs", "outcome"),
    [
        ([0, 300, 0, 0], 2, 2, "2 passed"),
        ([0, 20, 0, 300], 2, 1, "1 failed, 1 passed"),
        ([0, 300] * 9, 9, 4, "1 failed, 1 passed"),
        ([0, 300] * 9, 1, 1, "2 passed"),
    ],
    ids=["repeated", "not repeated on a quiet machine", "not forever", "a success counts"],
)
def test_a_failed_measurement_is_repeated_only_if_cores_were_stolen(
    warm: WarmPython, tmp_path: Path, stolen: list[int], good_run: int, runs: int, outcome: str
) -> None:
    assert outcome in run_pytest(warm, tmp_path, MEASURING.format(stolen=stolen, good_run=good_run, runs=runs))


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 failed, 1 skipped"), ("", "2 skipped")])
def test_a_test_that_could_run_may_not_be_skipped_in_ci(
    warm: WarmPython, tmp_path: Path, ci: str, outcome: str
) -> None:
    assert outcome in run_pytest(warm, tmp_path, SKIPPING, CI=ci)
