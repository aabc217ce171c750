"""Every command and link in the documentation works as written."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm_python import WarmPython

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
PAGES_IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


# `./dev quickstart` runs those of the README.
@pytest.mark.parametrize("page", PAGES[1:], ids=PAGES_IDS[1:])
def test_the_code_blocks_of_a_page_run_in_order_as_they_are(page: Path, tmp_path: Path, warm: WarmPython) -> None:
    for language, code in BLOCK.findall(page.read_text()):
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [warm.python, "-c", code]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PATH": warm.path, "BROWSER": "true"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, f"{code}\n{ended.stdout}\n{ended.stderr}"


def test_the_setup_that_the_readme_tells_is_the_one_that_ci_runs() -> None:
    (setup,) = re.findall(r"^```bash setup\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert setup.splitlines()[0] == "./dev setup"
    assert "\n./dev setup\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=PAGES_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_pictures_are_what_their_script_draws() -> None:
    script = ROOT / "docs" / "concepts" / "pictures.py"
    drawn = runpy.run_path(str(script))["PICTURES"]
    assert {path.stem for path in script.parent.glob("*.svg")} == set(drawn)
    for name, picture in drawn.items():
        assert (script.parent / f"{name}.svg").read_text() == picture
        assert f"({name}.svg)" in (script.parent / f"{name}.md").read_text()


def test_the_picture_of_the_readme_is_what_the_kept_measurement_draws() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "before_after.py"))
    assert (ROOT / "docs" / "before-after.svg").read_text() == script["picture"](script["kept"]())
    assert "(docs/before-after.svg)" in (ROOT / "README.md").read_text()


def test_the_commands_page_is_what_the_commands_say() -> None:
    script = ROOT / "docs" / "reference" / "commands.py"
    asked = f"import runpy; print(runpy.run_path({str(script)!r})['page'](), end='')"
    said = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert said.stdout == script.with_suffix(".md").read_text(), "run python docs/reference/commands.py"


@pytest.mark.parametrize("name", ["config", "python"])
def test_the_reference_is_what_the_source_says(name: str) -> None:
    script = ROOT / "docs" / "reference" / f"{name}.py"
    assert runpy.run_path(str(script))["page"]() == script.with_suffix(".md").read_text(), f"run python {script}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_a_page_is_readable_without_a_generator(page: Path) -> None:
    assert not re.search(r"^:::", page.read_text(), re.MULTILINE), "this directive shows as text in a checkout"
