"""What cannot be measured is refused or reported as such, never as a number."""

from types import SimpleNamespace
from typing import Any

import pytest

from freescale.bench import emulated, step
from freescale.bench.step import PLAIN, SPARSE_DIST
from freescale.errors import UsageError
from tests.bench.test_step import found


def test_compute_alone_needs_a_step_after_the_warm_up_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = SimpleNamespace()
    for seconds in ([], [0.1]):
        monkeypatch.setattr(emulated, "compute_only_seconds", lambda *_, seconds=seconds: seconds)
        with pytest.raises(UsageError, match="fewer than 2 batches"):
            emulated.compute_only_ms(world, world, world, [])


def test_a_baseline_without_a_bubble_gives_no_reduction() -> None:
    measured = found({PLAIN: 200.0, SPARSE_DIST: 99.0, "everything": 110.0, "limit": 100.0})
    assert measured.bubble_reduction("everything", SPARSE_DIST) is None
    assert measured.bubble_reduction("everything", PLAIN) == pytest.approx(0.9)
    assert step.table_rows(measured.figures())[-2][-2:] == ["+90.0%", "-"]
    assert f"not comparable with that of {SPARSE_DIST}" in step.headline(measured)
