"""In CI a skipped test is a failure, unless it needs a GPU: what nobody runs proves nothing."""

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
