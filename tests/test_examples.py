"""Every example runs as it is, by the command that it begins with."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.warm_python import WarmPython

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_runs_as_it_says(example: Path, warm: WarmPython) -> None:
    (command,) = [
        line for line in example.read_text().split('"""')[1].splitlines() if f"examples/{example.name}" in line
    ]
    ended = subprocess.run(
        shlex.split(command),
        cwd=ROOT,
        env={**os.environ, "PATH": warm.path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
