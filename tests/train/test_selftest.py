"""Selftest passes where everything is correct, and fails where it is not."""

from collections.abc import Iterator

import pytest
from torch import Tensor

from freescale.train.selftest import CheckOutcome, Selftest
from freescale.transport.shared_memory import SharedMemory
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
