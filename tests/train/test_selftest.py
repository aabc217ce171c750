"""Selftest passes where everything is correct, and fails where it is not."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from freescale.models.attention import blocks
from freescale.train.selftest import CheckOutcome, Selftest
from freescale.transport.shared_memory import SharedMemory
from tests.support import freescale
from tests.support.ranks import Ranks, World
from tests.support.training import joined


def outcomes(world: World) -> list[CheckOutcome]:
    return Selftest(joined(world)).run()


def outcomes_with_a_fault(world: World) -> list[CheckOutcome]:
    """One rank says that parts are filled which it wrote elsewhere."""
    take = SharedMemory.take

    def elsewhere(memory: SharedMemory, peer: int, *, until: float) -> Tensor:
        place = take(memory, peer, until=until)
        return place.clone() if world.rank == 1 and len(place) > 100 else place

    SharedMemory.take = elsewhere  # type: ignore[method-assign]
    try:
        return Selftest(joined(world)).run()
    finally:
        SharedMemory.take = take  # type: ignore[method-assign]


def attention_with_a_fault(world: World) -> CheckOutcome:
    """Only rank 1 computes attention wrongly."""
    selftest, right = Selftest(joined(world)), blocks.forward
    if world.rank == 1:
        blocks.forward = lambda x: right(x) * 1.01
    try:
        return selftest._outcome("attention", selftest._attention)
    finally:
        blocks.forward = right


def test_a_failed_check_is_shown_and_the_command_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert freescale(["selftest", "--nproc", "1"]) == 0
    assert "nothing failed" in capsys.readouterr().out
    right = blocks.forward
    monkeypatch.setattr(blocks, "forward", lambda x: right(x) * 1.01)
    assert freescale(["selftest", "--nproc", "1"]) == 1
    assert "\n1 failed" in capsys.readouterr().out


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


def test_no_check_fails_on_a_correct_installation(two: Ranks) -> None:
    one, other = two.run(outcomes)
    assert one == other
    by_check = {outcome.check: outcome for outcome in one}
    assert {name for name, outcome in by_check.items() if outcome.status == "not possible"} == {
        "transport copy_engine",
        "prioritized over copy_engine",
        "copy engine",
    }
    assert all(outcome.status != "failed" for outcome in one)
    assert by_check["copy engine"].why == "the rows are not on a GPU"


def test_lost_rows_are_detected(two: Ranks) -> None:
    one, other = two.run(outcomes_with_a_fault)
    by_check = {outcome.check: outcome for outcome in one}
    assert {name for name, outcome in by_check.items() if outcome.status == "failed"} == {"transport shared_memory"}
    assert by_check["prioritized over shared_memory"].why == "the transport itself failed"
    assert any("exchanges delivered wrong rows" in outcome.why for outcome in [*one, *other])


def test_a_check_that_fails_on_one_rank_fails_on_all(two: Ranks) -> None:
    one, other = two.run(attention_with_a_fault)
    assert (one.status, one.why) == ("failed", "on another rank")
    assert other.status == "failed"
    assert other.why.startswith("rank 1: torch.float32 is off by ")
