"""In CI a skipped test is a failure, unless it needs a GPU: what nobody runs proves nothing.

And what many tests share: groups of real ranks, started once, and a log with very unequal histories.
"""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from tests.support.datasets import histories, write_dataset
from tests.support.ranks import Ranks
from tests.support.stolen_time import run_undisturbed
from tests.support.warm_python import WarmPython

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")
_LONGEST = ("test_fuzz_cli.py", "benchmarks", "test_faults.py", "test_train.py", "test_docs.py", "test_resume.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="the long form of proofs that have a short one")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long proofs to --whole, and begin with the longest files: no worker is left alone with one at the end."""
    if not config.getoption("--whole"):
        long = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    items.sort(key=lambda item: _place({item.path.name, item.path.parent.name}))


def _place(names: set[str]) -> int:
    return next((place for place, name in enumerate(_LONGEST) if name in names), len(_LONGEST))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run what measures time with regard to stolen cores."""
    if item.get_closest_marker("quiet") is None:
        return None
    run_undisturbed(item, nextitem)
    return True


@pytest.fixture(scope="session")
def whole_form(request: pytest.FixtureRequest) -> bool:
    """Whether proofs are to be run at the length that the documentation states."""
    return bool(request.config.getoption("--whole"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, Ranks]]:
    started = {count: Ranks(count) for count in (1, 2, 4)}
    yield started
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    """A Python that has imported torch and TorchRec."""
    with WarmPython() as python:
        yield python


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """137 users, 40 items: every item is in many samples of a batch, and on many ranks."""
    lengths = np.random.default_rng(0).choice([1, 2, 3, 5, 8, 20, 60], 137).tolist()
    path = tmp_path_factory.mktemp("log") / "data"
    write_dataset(path, histories(lengths, items=40, candidates=True), rows_per_group=4, items=40)
    return path
