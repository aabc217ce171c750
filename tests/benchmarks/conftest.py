"""How tests run the short form of a measurement."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_python import WarmPython

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Measure = Callable[..., list[Any]]
"""Runs a script with options, and returns its results."""


@pytest.fixture
def measure(tmp_path: Path, warm: WarmPython) -> Measure:
    """Run a script in a process forked from one that has imported torch."""
    return lambda script, *options: _run(warm.python, script, options, tmp_path)


@pytest.fixture
def measure_alone(tmp_path: Path) -> Measure:
    """Run a script in an interpreter of its own: it measures time or memory, or starts ranks."""
    return lambda script, *options: _run(sys.executable, script, options, tmp_path)


def _run(python: str, script: str, options: tuple[object, ...], folder: Path) -> list[Any]:
    out = folder / f"{Path(script).stem}.json"
    subprocess.run([python, BENCHMARKS / script, *map(str, options), "--out", out], check=True, capture_output=True)
    return json.loads(out.read_text())["results"]


def draws_a_picture(results: Path) -> bool:
    """Return whether `picture.py` draws the results of a measurement as PNG."""
    picture = results.with_suffix(".png")
    subprocess.run([sys.executable, BENCHMARKS / "picture.py", results, picture], check=True)
    return picture.read_bytes().startswith(b"\x89PNG")
