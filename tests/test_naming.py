"""Names are the field's, one per concept, and files hold one idea each."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRIVATE_NAMES = re.compile(r"\b(Journey|Flight|Chosen|hasten|lacking|culprits|nursery|voices|breathing)\b")
PRIVATE_PHRASES = re.compile(r"what is learnt|numbers that are none|ways between", re.IGNORECASE)
MOST_FILES, MOST_LINES = 220, 400
SAME_MEANING = {"__init__.py", "report.py", "selftest.py", "trained_model.py"}
"""File names that mean the same thing in several packages."""


def lines_with(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_private_vocabulary_is_left() -> None:
    assert not lines_with(PRIVATE_NAMES, SOURCES)
    assert not lines_with(PRIVATE_PHRASES, [*SOURCES, *PAGES])


def test_no_two_classes_share_a_name() -> None:
    defined = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


def test_no_two_modules_share_a_file_name_unless_they_mean_the_same() -> None:
    paths = defaultdict(list)
    for path in SOURCES:
        paths[path.name].append(str(path.relative_to(ROOT)))
    assert not {name: same for name, same in paths.items() if len(same) > 1 and name not in SAME_MEANING}


def test_files_are_few_and_short() -> None:
    assert len(SOURCES) <= MOST_FILES
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {path: length for path, length in lengths.items() if length > MOST_LINES}
