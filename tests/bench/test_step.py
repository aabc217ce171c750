"""Promise: ways to train are compared within a turn, against compute alone, and the floor is told."""

import re

import pytest

from freescale.balance.cost import Cost
from freescale.bench import step
from freescale.bench.emulated import EmulatedCompute
from freescale.bench.step import PLAIN, PLAIN_AGAIN, SPARSE_DIST, VARIANTS, LossDifference, StepComparison, VariantRun
from freescale.bubbles.summary import Line, Summary

COMPUTE = EmulatedCompute(Cost(token=1e-6), 0.01, 0.02)


def turn(way: str, step_ms: float, limit_ms: float) -> VariantRun:
    lines = [
        Line("forward", limit_ms, 0.5, "0", limit_ms, 0.0, ""),
        Line("ids", step_ms - limit_ms, 0.5, "0", 1, 0, ""),
    ]
    return VariantRun(way, Summary(2, 8, step_ms, 0.0, 0.0, 0.0, lines), limit_ms)


def found(*turns: dict[str, float]) -> StepComparison:
    """Of each turn: the step of ways, and of compute alone; other ways take 150 ms."""
    made = [turn(way, given.get(way, 150.0), given["limit"]) for given in turns for way in VARIANTS]
    return StepComparison(2, 32, True, COMPUTE, made)


def test_bubbles_are_compared_within_a_turn() -> None:
    """The machine is half as quick in the second turn: nothing changes."""
    quick = {PLAIN: 200.0, SPARSE_DIST: 140.0, "everything": 110.0, PLAIN_AGAIN: 200.0, "limit": 100.0}
    slow = {name: 2 * ms for name, ms in quick.items()}
    measured = found(quick, slow, quick)
    assert measured.bubble_reduction("everything", PLAIN) == pytest.approx(0.9)
    assert measured.bubble_reduction("everything", SPARSE_DIST) == pytest.approx(0.75)
    (best,) = [one for one in measured.figures() if one["variant"] == "everything"]
    assert best["step_over_compute"] == pytest.approx(1.1)
    assert best["bubble_ms"] == pytest.approx(10.0)
    assert best["samples_per_second"] == pytest.approx(32 / 0.110)


def test_the_floor_is_how_far_the_plain_loop_is_from_itself() -> None:
    measured = found(
        {PLAIN: 200.0, PLAIN_AGAIN: 210.0, "limit": 100.0}, {PLAIN: 200.0, PLAIN_AGAIN: 180.0, "limit": 100.0}
    )
    assert measured.noise_floor() == pytest.approx((0.9, 1.05))


def test_a_slower_way_is_said_to_have_more_bubbles() -> None:
    measured = found({PLAIN: 200.0, "balance": 220.0, "limit": 100.0})
    assert measured.bubble_reduction("balance", PLAIN) == pytest.approx(-0.2)
    assert "-20.0%" in step.table_rows(measured.figures())[4]


def cells(drawn: str, section: str) -> list[list[str]]:
    """The table of a section of a page, row by row, without its header."""
    table = drawn[drawn.index(f">{section}<") :].split("<table", 1)[1].split("</table>", 1)[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr")]
    return [row for row in rows if row]


def test_the_page_gives_the_figures_of_every_way() -> None:
    steps = {PLAIN: 200.0, SPARSE_DIST: 180.0, "everything": 120.0, PLAIN_AGAIN: 210.0, "limit": 100.0}
    others = ("nothing", "balance", "priority", "SM-free")  # 150 ms each
    assert cells(step.render_page(found(steps), []), "All figures") == [
        ["compute alone", "100.0", "10.00", "320", "1.000", "", "", ""],
        [PLAIN, "200.0", "5.00", "160", "2.000", "100.0", "+0.0%", "-25.0%"],
        [SPARSE_DIST, "180.0", "5.56", "178", "1.800", "80.0", "+20.0%", "+0.0%"],
        *([way, "150.0", "6.67", "213", "1.500", "50.0", "+50.0%", "+37.5%"] for way in others),
        ["everything", "120.0", "8.33", "267", "1.200", "20.0", "+80.0%", "+75.0%"],
        [PLAIN_AGAIN, "210.0", "4.76", "152", "2.100", "110.0", "-10.0%", "-37.5%"],
    ]


def test_the_page_tells_exact_ways_from_those_that_round_differently() -> None:
    exact = [LossDifference("priority", "fp64", True, 0.0), LossDifference("balance", "fp64", False, 2e-16)]
    assert cells(step.render_page(found({PLAIN: 200.0, "limit": 100.0}), exact), "The training result is the same") == [
        ["priority", "fp64", "the same bits"],
        ["balance", "fp64", "off by at most 2.0e-16"],
    ]
