"""Repeats a failed measurement if the machine did not have its cores while it ran.

A hypervisor may give the cores of a shared machine to others, for seconds and by more than half. The kernel counts that
as stolen time. It alone decides whether a failure is repeated, never the figures that were measured.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.runner import runtestprotocol

ATTEMPTS, LIMIT = 4, 0.02
"""Runs of a test at most, and the share of all cores whose loss makes a failure say nothing."""
_STEAL = 7
"""Place of the stolen time among those of /proc/stat; the guest's times behind it are counted twice."""


class CoreTime(NamedTuple):
    """Time of all cores since the machine started, in ticks."""

    total: int
    stolen: int

    def stolen_share(self, since: "CoreTime") -> float:
        """Return the share of all cores that others had since then."""
        return (self.stolen - since.stolen) / max(1, self.total - since.total)


def core_time(path: Path = Path("/proc/stat")) -> CoreTime:
    """Read the kernel's counters."""
    ticks = [int(word) for word in path.read_text().splitlines()[0].split()[1:]]
    return CoreTime(sum(ticks[: _STEAL + 1]), ticks[_STEAL])


def run_undisturbed(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a test, and again after a failure while cores were stolen; report the last run."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in range(ATTEMPTS):
        began = core_time()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        stolen = core_time().stolen_share(began)
        if not any(report.failed for report in reports) or stolen <= LIMIT or attempt == ATTEMPTS - 1:
            break
        terminal = item.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.write_line(f"{item.nodeid} is repeated: {stolen:.0%} of the cores were stolen while it ran")
        item._initrequest()  # type: ignore[attr-defined]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
