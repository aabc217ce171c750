"""A disk failure or crash at any call of a save loses no complete checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.failing_disk import failing_disk_at


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return failing_disk_at(tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("kind", ["crash", "ENOSPC", pytest.param("EIO", marks=pytest.mark.whole)])
def test_no_complete_checkpoint_is_lost_whichever_call_fails(failing_disk: Path, tmp_path: Path, kind: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.disk", str(tmp_path / "run"), kind],
        env={**os.environ, "LD_PRELOAD": str(failing_disk)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 20
