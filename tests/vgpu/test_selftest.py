"""Selftest passes on virtual GPUs, names the check that a planted fault breaks, and writes its files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

from freescale.embedding import row_update
from freescale.models import fused_launch
from freescale.models.attention import triton_launch
from freescale.train import selftest_report
from freescale.train.selftest import CheckOutcome, Selftest
from freescale.transport.c10d import C10d
from freescale.transport.copy_engine import Arena, CopyEngine
from freescale.transport.host_staged import StreamCopier
from tests.support.ranks import Ranks, World
from tests.support.training import joined


class Fault(NamedTuple):
    """A fault, planted by replacing a function, and the checks that are to fail."""

    target: Any
    name: str
    replacement: Callable[..., Any]
    failing: set[str]


def _own_value(self: Any, values: torch.Tensor, *, name: str) -> Any:
    return _all_gather(self, torch.zeros_like(values), name=name)


def _without_the_last_byte(self: Any, into: torch.Tensor, source: torch.Tensor) -> None:
    _staged_copy(self, into[:-1], source[:-1])


def _slightly_off(x: Any) -> Any:
    return _attention(x) * 1.01


def _first_byte(self: Any, part: torch.Tensor) -> int:
    return 0


def _by_a_kernel(self: Any, rows: torch.Tensor, send: Any, receive: Any, *, name: str) -> Any:
    return _copied(self, rows * 1, send, receive, name=name)


def _without_some(weights: Any, sums: Any, rows: torch.Tensor, gradients: torch.Tensor, **options: Any) -> None:
    kept = torch.from_numpy(_random.random(len(rows)) > 0.05).to(rows.device)
    _update_rows(weights, sums, rows, gradients * kept[:, None], **options)


def _without_the_first(x: torch.Tensor, keys: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.cat([x[:1], _dropout(x[1:], keys[1:], **options)])


_random = np.random.default_rng(0)
_all_gather, _staged_copy, _attention = C10d.all_gather, StreamCopier.copy, triton_launch.forward
_copied, _update_rows, _dropout = CopyEngine.all_to_all, row_update.update_rows, fused_launch.dropout
FAULTS = {
    "a collective that loses values": Fault(C10d, "all_gather", _own_value, {"collectives"}),
    "staged copies that end early": Fault(StreamCopier, "copy", _without_the_last_byte, {"transport host_staged"}),
    "all rows at the same place of a peer": Fault(Arena, "offset", _first_byte, {"transport copy_engine"}),
    "a kernel beside the copy engines": Fault(CopyEngine, "all_to_all", _by_a_kernel, {"copy engine"}),
    "attention that is off by a percent": Fault(triton_launch, "forward", _slightly_off, {"attention"}),
    "additions that overwrite each other": Fault(row_update, "update_rows", _without_some, {"repeatable"}),
    "dropout that keeps the first token": Fault(fused_launch, "dropout", _without_the_first, {"fused kernels"}),
}
WITHOUT_TRAINING = "[acdft]*"
"""Device, collectives, transports, attention, fused kernels and copy engine."""


def checked(world: World, folder: str, only: str, fault: str = "") -> list[CheckOutcome]:
    """Run checks with a fault, if any, and write the files."""
    here = joined(world)
    planted = FAULTS.get(fault, Fault(Fault, "none", _first_byte, set()))
    with patch.object(planted.target, planted.name, planted.replacement, create=not fault):
        outcomes = Selftest(here, Path(folder), only=only).run()
    if world.rank == 0:
        selftest_report.write(Path(folder), selftest_report.facts(here), outcomes)
    else:
        selftest_report.facts(here)
    return outcomes


def test_no_check_fails(gpus: Ranks, tmp_path: Path, whole_form: bool) -> None:
    for outcomes in gpus.run(checked, str(tmp_path), "*" if whole_form else WITHOUT_TRAINING, timeout=600):
        assert [(o.check, o.why) for o in outcomes if o.status == "failed"] == []
        impossible = {o.check for o in outcomes if o.status == "not possible"}
        assert impossible == {"transport shared_memory"} | ({"prioritized over shared_memory"} if whole_form else set())


def test_runs_repeat_and_resume_and_a_recipe_trains(gpus: Ranks, tmp_path: Path) -> None:
    for only in ("re[ps]*", "recipe tiny"):
        for outcomes in gpus.run(checked, str(tmp_path), only):
            assert [(o.check, o.status, o.why) for o in outcomes if o.status != "passed"] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_in_the_file(gpus: Ranks, tmp_path: Path, fault: str) -> None:
    (failing,) = FAULTS[fault].failing
    gpus.run(checked, str(tmp_path), "repeatable" if failing == "repeatable" else f"{failing[0]}*", fault)
    report = json.loads((tmp_path / "selftest.json").read_text())
    assert {check["check"] for check in report["checks"] if check["status"] == "failed"} == {failing}
    assert report["facts"]["device"] == "vgpu:0"
    page = (tmp_path / "selftest.html").read_text()
    assert f"Trace of {failing}" in page
