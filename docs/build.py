"""Builds the site: `./dev docs` calls it. Links that leave the docs lead to copies of what they name.

Pages are written to be read in a checkout, too, where they link to tests, sources and figures. On the site those have
no page, so each file that is linked to is put beside the pages, as it is.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "benchmarks/README.md": "measurements.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages of the site that do not live in docs/."""
_LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")


def pages() -> dict[Path, str]:
    """Where every page is, and what it becomes."""
    own = {path: path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))}
    return own | {ROOT / place: name for place, name in ELSEWHERE.items()}


def rewritten(page: Path, name: str, known: dict[Path, str], folder: Path) -> str:
    """A page with links that work on the site. What they name is copied."""

    def link(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        if target.startswith(("https://", "http://")):
            return found[0]
        path = (page.parent / target).resolve()
        place = known.get(path) or _copied(path, folder)
        return f"{before}{os.path.relpath(place, Path(name).parent)}{after}"

    return _LINK.sub(link, page.read_text(encoding="utf-8"))


def _copied(path: Path, folder: Path) -> str:
    """The place of a file on the site."""
    inside = path.relative_to(ROOT).as_posix()
    place = inside.removeprefix("docs/") if inside.startswith("docs/") else f"source/{inside}"
    if path.suffix in (".py", ".toml", ".txt", ".c"):
        place += ".txt"  # which browsers show, where they would offer others to be saved
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, folder / place)
    return place


def build(site: Path) -> int:
    """Put the pages together and let the generator make the site. Gives its exit code: any warning is an error."""
    known = pages()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "docs"
        for page, name in known.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(rewritten(page, name, known, folder), encoding="utf-8")
        shutil.copyfile(ROOT / "mkdocs.yml", Path(place) / "mkdocs.yml")
        (Path(place) / "src").symlink_to(ROOT / "src")
        ended = subprocess.run([Path(sys.executable).parent / "zensical", "build", "--clean"], cwd=place, check=False)
        if ended.returncode == 0:
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(Path(place) / "site", site)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(build(ROOT / "site"))
