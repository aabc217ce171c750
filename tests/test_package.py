"""The package and its help load within a second, without torch, and its public names are where they are said to be."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import freescale


def imported_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    )


HEAVY = {"torch", "torchrec", "fbgemm_gpu", "polars", "pyarrow", "numpy"}


@pytest.mark.parametrize(
    "code",
    [
        "import freescale",
        "from freescale.cli.main import main; main(['--help'])",
        "from freescale.cli.main import main; main(['data', '--help'])",
        "import freescale.config",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    assert not imported_by(code) & HEAVY


def test_preparing_data_needs_no_torch() -> None:
    commands = "freescale.cli.data_stats, freescale.cli.data_synth, freescale.cli.data_import"
    assert "torch" not in imported_by(f"import {commands}")


@pytest.mark.quiet
def test_help_is_there_at_once() -> None:
    fastest = 9.0
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "freescale", "--help"], check=True, capture_output=True)
        fastest = min(fastest, time.perf_counter() - begin)
    assert fastest < 0.5


def test_public_names_load_lazily_and_all_exist() -> None:
    for name in freescale.__all__:
        assert getattr(freescale, name).__name__.removeprefix("freescale.") == name
        assert name in dir(freescale)
    with pytest.raises(AttributeError, match="no attribute 'Loder'"):
        _ = freescale.Loder  # type: ignore[attr-defined]


def test_the_pinned_sets_name_exact_versions_and_nothing_else() -> None:
    files = sorted((Path(__file__).parents[1] / "requirements").iterdir())
    names = ["cpu.txt", "cuda.txt", "docs.txt", "kubernetes.txt", "s3.txt"]
    assert [file.name for file in files] == names
    for file in files:
        assert "==" in file.read_text()
        for line in file.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line), line


def test_every_pinned_package_stands_with_its_version_among_the_dependencies() -> None:
    root = Path(__file__).parents[1]
    pins = re.findall(r"^([^#\s]+)==(\S+)$", (root / "requirements" / "cpu.txt").read_text(), re.MULTILINE)
    page = (root / "docs" / "dependencies.md").read_text()
    rows = re.findall(r"^\| ([^ |]+) \| (\d[^ |]*) \| [^|]+ \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    assert len(pins) > 50
    assert sorted(rows) == sorted(pins)
