"""Apply small faults to the source, one at a time, and require the tests of the gate to fail.

    ./dev mutants [NAME ...] [--find] [--jobs 2] [--out FILE.json]

`tests/mutants.toml` lists the faults. Each names its file, the text to replace, and the tests that must fail. A fault
is applied to a scratch copy of the repository, so the checkout is never changed. A mutant is killed if one of its tests
fails or does not end in time. `--find` searches for a failing test of each mutant that names none: first the tests that
import the mutated module, then those of its package, then the rest.
"""

import argparse
import ast
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import record

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.toml"
SECONDS = 600
"""A test that takes longer hangs."""


class Mutant(NamedTuple):
    """A fault: `old` is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str
    guarantee: str
    fault: str
    tests: Sequence[str] = ()


class Outcome(NamedTuple):
    """What the tests made of a mutant. `by`: the first test that failed, or "timeout"."""

    name: str
    killed: bool
    by: str
    seconds: float


def load(path: Path) -> list[Mutant]:
    """Read the list; every `old` must occur once in its file."""
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text())["mutant"]
    mutants = [Mutant(**entry) for entry in entries]
    root = path.parents[1]
    for mutant in mutants:
        count = (root / mutant.file).read_text().count(mutant.old)
        if count != 1:
            raise SystemExit(f"{mutant.name}: its text occurs {count} times in {mutant.file}, not once")
    return mutants


def candidates(root: Path, mutant: Mutant) -> Iterator[list[str]]:
    """Groups of test files, the likeliest to fail first."""
    module = mutant.file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    package = Path(mutant.file).parent.name
    files = sorted((root / "tests").rglob("test_*.py"))
    importing = [file for file in files if module in imports(file) or Path(mutant.file).stem in file.stem]
    of_package = [file for file in files if file.parent.name == package]
    exact = [file for file in files if file.parent.name in ("exact", "train", "cli")]
    seen: set[Path] = set()
    for group in (importing, of_package, exact):
        fresh = [file for file in group if file not in seen]
        seen.update(fresh)
        if fresh:
            yield [str(file.relative_to(root)) for file in fresh]


def imports(file: Path) -> set[str]:
    """Modules that a test imports, by their full names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def run(copy: Path, mutant: Mutant, *, find: bool) -> Outcome:
    """Apply a mutant to a copy of the repository, run its tests, and undo it."""
    file, began = copy / mutant.file, time.monotonic()
    before = file.read_text()
    file.write_text(before.replace(mutant.old, mutant.new))
    try:
        for tests in [mutant.tests] if mutant.tests else candidates(copy, mutant) if find else []:
            if by := failing(copy, tests):
                return Outcome(mutant.name, True, by, time.monotonic() - began)
    finally:
        file.write_text(before)
    return Outcome(mutant.name, False, "", time.monotonic() - began)


def failing(copy: Path, tests: Sequence[str]) -> str:
    """The first test that fails; "timeout" if they do not end."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", *tests]
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}:{copy}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "timeout"
    if process.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    if process.returncode != 1 or failed is None:
        raise SystemExit(f"the tests did not run:\n{output[-3000:]}")
    return failed[1]


def copied(folder: Path) -> Path:
    """The files of the repository that git tracks, in a folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def run_all(mutants: list[Mutant], *, find: bool, jobs: int) -> Iterator[Outcome]:
    """Run all mutants, some at a time, each job in a copy of its own."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = copied(Path(folder))
            while True:
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put(run(copy, mutant, find=find))
                except SystemExit as error:
                    done.put(RuntimeError(f"{mutant.name}: {error}"))

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    for _ in mutants:
        outcome = done.get()
        if isinstance(outcome, BaseException):
            raise outcome
        yield outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    mutants = [mutant for mutant in load(LIST) if not options.names or mutant.name in options.names]
    outcomes = []
    for outcome in run_all(mutants, find=options.find, jobs=options.jobs):
        outcomes.append(outcome)
        print(json.dumps(outcome._asdict()), flush=True)
    survivors = [outcome.name for outcome in outcomes if not outcome.killed]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants killed")
    record.save(options.out, [outcome._asdict() for outcome in outcomes])
    raise SystemExit(1 if survivors else 0)


if __name__ == "__main__":
    main()
