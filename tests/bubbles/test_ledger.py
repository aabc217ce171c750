"""Every instant of a step has exactly one cause, the right one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.bubbles.events import CAUSES, COMPUTE, TRAFFIC, RankStep, Span, Transfer
from freescale.bubbles.ledger import Ledger, ledgers
from freescale.bubbles.records import from_steps
from freescale.bubbles.summary import summarize

MS = 1_000_000
TIMES = st.integers(-200, 1500)


@st.composite
def rank_steps(draw: st.DrawFn, rank: int) -> RankStep:
    """Anything that a recorder could write, sensible or not: overlaps, spans beyond the step, waits within waits."""
    begin = draw(st.integers(0, 300))
    end = begin + draw(st.integers(0, 1000))

    def pair() -> tuple[int, int]:
        low, high = sorted((draw(TIMES), draw(TIMES)))
        return low, high

    kinds = draw(st.lists(st.sampled_from([*COMPUTE, *TRAFFIC, "data", "host"]), max_size=8))
    spans = tuple(Span(kind, *pair()) for kind in kinds)
    transfers = []
    for number, kind in enumerate(draw(st.lists(st.sampled_from(TRAFFIC), max_size=5))):
        waits = tuple(pair() for _ in range(draw(st.integers(0, 2))))
        transfers.append(Transfer(kind, f"{number}", *pair(), waits))
    return RankStep(rank, 0, begin, end, spans, tuple(transfers))


STEPS = st.integers(1, 4).flatmap(lambda count: st.tuples(*(rank_steps(rank) for rank in range(count))))


@settings(max_examples=300)
@given(ranks=STEPS)
def test_the_causes_of_any_step_add_up_to_its_wall_time_and_none_is_negative(ranks: tuple[RankStep, ...]) -> None:
    for step, ledger in zip(ranks, ledgers(ranks), strict=True):
        assert sum(ledger.causes) == step.end - step.begin
        assert min(ledger.causes) >= 0
        assert min(ledger.hidden) >= 0


@settings(max_examples=200)
@given(ranks=STEPS, all_by=st.integers(-(10**15), 10**15))
def test_the_ledger_does_not_depend_on_the_clock_origin(ranks: tuple[RankStep, ...], all_by: int) -> None:
    shifted = ledgers([step.shifted(all_by) for step in ranks])
    for before, after in zip(ledgers(ranks), shifted, strict=True):
        assert before.causes == after.causes
        assert before.hidden == after.hidden


@settings(max_examples=200)
@given(ranks=STEPS, apart=st.lists(st.integers(-5, 5), min_size=4, max_size=4))
def test_clocks_that_err_within_their_bound_move_time_only_between_straggler_and_traffic(
    ranks: tuple[RankStep, ...], apart: list[int]
) -> None:
    shifted = ledgers([step.shifted(by) for step, by in zip(ranks, apart, strict=False)])
    shared = [cause for cause in CAUSES if cause not in ("straggler", *TRAFFIC)]
    for step, before, after in zip(ranks, ledgers(ranks), shifted, strict=True):
        assert [before.cause_ns(cause) for cause in shared] == [after.cause_ns(cause) for cause in shared]
        assert abs(before.cause_ns("straggler") - after.cause_ns("straggler")) <= 10 * 3 * max(1, len(step.transfers))


def one(rank: int, *, arrived: int, done: int, forward: int = 10) -> RankStep:
    """Forward, then a wait at an all-to-all from arrival to its end, then backward to 100 ms."""
    spans = (Span("forward", 0, forward * MS), Span("backward", done * MS, 100 * MS))
    wait = ((arrived * MS, done * MS),)
    return RankStep(rank, 0, 0, 100 * MS, spans, (Transfer("urgent rows", "rows", arrived * MS, done * MS, wait),))


def ms(ledger: Ledger) -> dict[str, float]:
    return {cause: ledger.cause_ns(cause) / MS for cause in CAUSES if ledger.cause_ns(cause)}


def test_a_wait_is_split_where_the_last_rank_arrives() -> None:
    ranks = [one(0, arrived=10, done=50), one(1, arrived=40, done=50, forward=40)]
    early, late = ledgers(ranks)
    assert ms(early) == {"forward": 10, "straggler": 30, "urgent rows": 10, "backward": 50}
    assert ms(late) == {"forward": 40, "urgent rows": 10, "backward": 50}
    assert summarize(from_steps([ranks], 0).intervals).straggler_percent == pytest.approx(15.0)


def test_traffic_overlapped_with_compute_is_hidden_and_only_the_rest_is_exposed() -> None:
    spans = (Span("forward", 0, 60 * MS), Span("host", 60 * MS, 100 * MS))
    moved = Transfer("deferred rows", "rows", 20 * MS, 80 * MS, ((70 * MS, 80 * MS),))
    (ledger,) = ledgers([RankStep(0, 0, 0, 100 * MS, spans, (moved,))])
    assert ms(ledger) == {"forward": 60, "deferred rows": 20, "host": 20}
    assert ledger.hidden[TRAFFIC.index("deferred rows")] == 40 * MS


def test_a_wait_inside_the_backward_pass_is_not_compute() -> None:
    spans = (Span("backward", 0, 50 * MS), Span("data", 60 * MS, 70 * MS))
    reduced = Transfer("dense gradients", "bucket 0", 10 * MS, 45 * MS, ((40 * MS, 45 * MS),))
    (ledger,) = ledgers([RankStep(0, 0, 0, 80 * MS, spans, (reduced,))])
    assert ms(ledger) == {"backward": 45, "dense gradients": 5, "data": 10, "idle": 20}
    assert ledger.hidden[TRAFFIC.index("dense gradients")] == 30 * MS


def test_a_wait_inside_the_backward_pass_has_the_cause_of_the_traffic_in_flight() -> None:
    spans = (Span("backward", 0, 60 * MS), Span("dense gradients", 30 * MS, 50 * MS))
    rows = Transfer("row gradients", "rows", 25 * MS, 45 * MS)
    (ledger,) = ledgers([RankStep(0, 0, 0, 60 * MS, spans, (rows,))])
    assert ms(ledger) == {"backward": 40, "row gradients": 15, "dense gradients": 5}
    assert ledger.hidden[TRAFFIC.index("row gradients")] == 5 * MS
