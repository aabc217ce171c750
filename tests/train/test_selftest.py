"""Selftest passes where everything is correct, and fails where it is not."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freescale.models.attention import blocks
from freescale.train import selftest
from freescale.train.selftest import CheckOutcome, Selftest
from freescale.transport.c10d import C10d
from freescale.transport.shared_memory import SharedMemory
from tests.support.in_process import freescale
from tests.support.ranks import Ranks, World
from tests.support.training import joined

SMALL = "[!r]*"
"""All checks but "repeatable", "resumed" and the recipes, which have full size."""


def outcomes(world: World, folder: str, only: str) -> list[CheckOutcome]:
    return Selftest(joined(world), Path(folder), only=only).run()


def outcomes_with_a_fault(world: World, folder: str) -> list[CheckOutcome]:
    """One rank says that parts are filled which it wrote elsewhere."""
    take = SharedMemory.take

    def elsewhere(memory: SharedMemory, peer: int, *, until: float) -> Tensor:
        place = take(memory, peer, until=until)
        return place.clone() if world.rank == 1 and len(place) > 100 else place

    SharedMemory.take = elsewhere  # type: ignore[method-assign]
    try:
        return Selftest(joined(world), Path(folder), only="*shared_memory").run()
    finally:
        SharedMemory.take = take  # type: ignore[method-assign]


def attention_with_a_fault(world: World, folder: str) -> CheckOutcome:
    """Only rank 1 computes attention wrongly."""
    right = blocks.forward
    if world.rank == 1:
        blocks.forward = lambda x: right(x) * 1.01
    try:
        (outcome,) = Selftest(joined(world), Path(folder), only="attention").run()
        return outcome
    finally:
        blocks.forward = right


def test_a_failed_check_is_shown_and_the_command_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["selftest", "--nproc", "1", "--only", "[a-c]*", "--out", str(tmp_path)]
    assert freescale(command) == 0
    assert "nothing failed" in capsys.readouterr().out
    right = blocks.forward
    monkeypatch.setattr(blocks, "forward", lambda x: right(x) * 1.01)
    assert freescale(command) == 1
    assert "\n1 failed" in capsys.readouterr().out
    report = json.loads((tmp_path / "selftest.json").read_text())
    (failed,) = [check for check in report["checks"] if check["status"] == "failed"]
    assert failed["check"] == "attention"
    assert "AssertionError: torch.float32 is off by" in failed["trace"]
    assert report["facts"]["packages"]["torch"] == torch.__version__
    assert "Trace of attention" in (tmp_path / "selftest.html").read_text()


def test_softmax_attention_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right = selftest.softmax_attention
    monkeypatch.setattr(selftest, "softmax_attention", lambda *operands: right(*operands) * 1.01)
    assert freescale(["selftest", "--nproc", "1", "--only", "attention", "--out", str(tmp_path)]) == 1
    assert "torch.float32 is off by {'output'" in capsys.readouterr().out.replace("\n", " ")


def outcomes_with_a_hang(world: World, folder: str, reached: str) -> None:
    """Rank 1 does not come to the collective of a check."""
    here = joined(world)
    if world.rank == 1:
        Selftest._device = lambda _: time.sleep(600)  # type: ignore[assignment, method-assign]

    def write(outcomes: list[CheckOutcome]) -> None:
        (Path(reached) / str(world.rank)).write_text(f"{outcomes[-1].check}: {outcomes[-1].why}\n{outcomes[-1].trace}")

    Selftest(here, Path(folder), only="device", on_failure=write, seconds=2.0).run()


def test_a_check_that_hangs_ends_the_rank_after_its_stacks_are_written(tmp_path: Path) -> None:
    ranks = Ranks(2)
    with pytest.raises(EOFError):
        ranks.run(outcomes_with_a_hang, str(tmp_path), str(tmp_path), timeout=30)
    ranks.close()
    written = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert all(f"device: rank {rank}: did not end within 2 s" in text for rank, text in enumerate(written))
    assert "time.sleep(600)" in written[1]
    assert "outcome of" in written[0] or "transport.max" in written[0]


def outcomes_after_a_lost_device(world: World, folder: str, written: str) -> tuple[list[CheckOutcome], bool]:
    """The device of rank 1 fails in a check and in every use afterwards."""
    here = joined(world)
    if world.rank == 1:
        fail = _raising(RuntimeError("CUDA error: device-side assert triggered"))
        Selftest._device = fail  # type: ignore[method-assign]
        here.transport.max = fail  # type: ignore[method-assign]

    def write(outcomes: list[CheckOutcome]) -> None:
        with (Path(written) / str(world.rank)).open("a") as file:
            file.write(f"{outcomes[-1].check}: {outcomes[-1].why}\n")

    selftest._WRITE_SECONDS = 0.0
    run = Selftest(here, Path(folder), only="[cd][eo][lv]*", on_failure=write)
    return run.run(), run.is_cut_short


def _raising(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_ranks_return_what_they_know_when_a_device_is_lost(tmp_path: Path) -> None:
    ranks = Ranks(2)  # its group is unusable afterwards
    try:
        (one, is_cut_short), (other, _) = ranks.run(outcomes_after_a_lost_device, str(tmp_path), str(tmp_path))
    finally:
        ranks.close()
    assert is_cut_short
    assert [outcome.check for outcome in one] == [outcome.check for outcome in other] == ["device"]
    assert [outcome.status for outcome in (*one, *other)] == ["failed", "failed"]
    assert "given up because of rank 1" in one[0].trace
    assert "device-side assert triggered" in other[0].trace
    for rank in range(2):
        assert "device: rank" in (tmp_path / str(rank)).read_text()


def test_the_command_writes_its_files_when_the_device_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fail = _raising(RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(Selftest, "_device", fail)
    monkeypatch.setattr(C10d, "max", fail)
    monkeypatch.setattr(selftest, "_WRITE_SECONDS", 0.0)
    assert freescale(["selftest", "--nproc", "1", "--only", "[cd][eo][lv]*", "--out", str(tmp_path)]) == 1
    assert "1 failed" in capsys.readouterr().out
    (check,) = json.loads((tmp_path / "selftest.json").read_text())["checks"]
    assert (check["check"], check["status"]) == ("device", "failed")
    assert "illegal memory access" in check["trace"]


def hangs_alone(world: World, folder: str, written: str) -> list[CheckOutcome]:
    """Rank 1 hangs; rank 0 gives up long before the check may end."""
    selftest._END_SECONDS, selftest._WRITE_SECONDS = 3.5, 4.0
    here = joined(world, timeout=1.0)
    if world.rank == 1:
        Selftest._device = lambda _: time.sleep(600)  # type: ignore[assignment, method-assign]

    def write(outcomes: list[CheckOutcome]) -> None:
        (Path(written) / str(world.rank)).write_text(outcomes[-1].trace)

    return Selftest(here, Path(folder), only="device", on_failure=write).run()


def test_a_rank_that_hangs_writes_its_stacks_before_the_others_end(tmp_path: Path) -> None:
    ranks = Ranks(2)
    ranks.send(hangs_alone, str(tmp_path), str(tmp_path))
    (outcome,) = ranks.result(0, timeout=30)
    assert "time.sleep(600)" in (tmp_path / "1").read_text()  # written while rank 0 was waiting
    assert outcome.status == "failed"
    assert "ranks that do not answer: 1" in outcome.why
    ranks.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


def test_no_check_fails_on_a_correct_installation(two: Ranks, tmp_path: Path, whole_form: bool) -> None:
    one, other = two.run(outcomes, str(tmp_path), "*" if whole_form else SMALL, timeout=600)
    assert one == other
    by_check = {outcome.check: outcome for outcome in one}
    assert {name for name, outcome in by_check.items() if outcome.status == "not possible"} == {
        "transport copy_engine",
        "prioritized over copy_engine",
        "copy engine",
    }
    assert all(outcome.status != "failed" for outcome in one)
    assert by_check["copy engine"].why == "the rows are not on a GPU"


def test_runs_repeat_and_resume_and_a_recipe_trains(two: Ranks, tmp_path: Path) -> None:
    for only in ("re[ps]*", "recipe tiny"):
        for found in two.run(outcomes, str(tmp_path), only):
            assert [(o.check, o.status, o.why) for o in found if o.status != "passed"] == []
    assert not list(tmp_path.glob("resumed-*"))


def test_lost_rows_are_detected(two: Ranks, tmp_path: Path) -> None:
    one, other = two.run(outcomes_with_a_fault, str(tmp_path))
    by_check = {outcome.check: outcome for outcome in one}
    assert {name for name, outcome in by_check.items() if outcome.status == "failed"} == {"transport shared_memory"}
    assert by_check["prioritized over shared_memory"].why == "the transport itself failed"
    assert any("exchanges delivered wrong rows" in outcome.why for outcome in [*one, *other])


def test_a_check_that_fails_on_one_rank_fails_on_all(two: Ranks, tmp_path: Path) -> None:
    one, other = two.run(attention_with_a_fault, str(tmp_path))
    assert (one.status, one.why) == ("failed", "on another rank")
    assert other.status == "failed"
    assert other.why.startswith("rank 1: torch.float32 is off by ")
