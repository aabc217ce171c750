"""Promise: whatever happens to a run, it ends with what the undisturbed one learnt, or with one clear error in time."""

from pathlib import Path

import pytest
from benchmarks.faults import KINDS, Baselines, make_data, trial_of


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("faults") / "data")


@pytest.fixture(scope="module")
def baselines() -> Baselines:
    return Baselines()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pause"])
def test_nothing_is_lost(kind: str, data: Path, baselines: Baselines) -> None:
    found = trial_of(1000, kind, data, baselines, quick=True)
    assert found["ok"], f"{found['outcome']}\n{found['said']}"
