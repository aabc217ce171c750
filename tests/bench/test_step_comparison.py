"""Variants are compared within a turn and against compute alone, with a noise floor; the unmeasurable is no number."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freescale.balance.cost import Cost
from freescale.bench import emulated, step_comparison
from freescale.bench.emulated import EmulatedCompute
from freescale.bench.step_comparison import (
    FREESCALE,
    PLAIN,
    PLAIN_AGAIN,
    SPARSE_DIST,
    VARIANTS,
    LossDifference,
    StepComparison,
    VariantRun,
)
from freescale.bubbles.summary import Line, Summary
from freescale.errors import UsageError
from freescale.models.jagged import JaggedLayout
from freescale.models.protocol import Rows
from freescale.train.sharded_model import build_model
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small

COMPUTE = EmulatedCompute(Cost(token=1e-6), 0.01, 0.02)


def run(variant: str, step_ms: float, compute_ms: float) -> VariantRun:
    lines = [
        Line("forward", compute_ms, 0.5, "0", compute_ms, 0.0, ""),
        Line("ids", step_ms - compute_ms, 0.5, "0", 1, 0, ""),
    ]
    return VariantRun(variant, Summary(2, 8, step_ms, 0.0, 0.0, 0.0, lines), compute_ms)


def comparison(*turns: dict[str, float]) -> StepComparison:
    """Build turns from the step times of variants and of compute alone; other variants take 150 ms."""
    runs = [run(name, ms.get(name, 150.0), ms["limit"]) for ms in turns for name in VARIANTS]
    return StepComparison(2, 32, True, COMPUTE, runs)


def test_bubbles_are_compared_within_a_turn() -> None:
    """A machine that is half as fast in the second turn changes nothing."""
    quick = {PLAIN: 200.0, SPARSE_DIST: 140.0, "everything": 110.0, PLAIN_AGAIN: 200.0, "limit": 100.0}
    slow = {name: 2 * ms for name, ms in quick.items()}
    measured = comparison(quick, slow, quick)
    assert measured.bubble_reduction("everything", PLAIN) == pytest.approx(0.9)
    assert measured.bubble_reduction("everything", SPARSE_DIST) == pytest.approx(0.75)
    (best,) = [figure for figure in measured.figures() if figure["variant"] == "everything"]
    assert best["step_over_compute"] == pytest.approx(1.1)
    assert best["bubble_ms"] == pytest.approx(10.0)
    assert best["samples_per_second"] == pytest.approx(32 / 0.110)


def test_the_noise_floor_is_the_ratio_of_the_plain_loop_to_itself() -> None:
    measured = comparison(
        {PLAIN: 200.0, PLAIN_AGAIN: 210.0, "limit": 100.0}, {PLAIN: 200.0, PLAIN_AGAIN: 180.0, "limit": 100.0}
    )
    assert measured.noise_floor() == pytest.approx((0.9, 1.05))


def test_a_slower_variant_has_a_negative_bubble_reduction() -> None:
    measured = comparison({PLAIN: 200.0, "balance": 220.0, "limit": 100.0})
    assert measured.bubble_reduction("balance", PLAIN) == pytest.approx(-0.2)
    assert "-20.0%" in step_comparison.table_rows(measured.figures())[4]


def test_the_headline_says_whether_a_bubble_is_smaller_or_larger() -> None:
    measured = comparison({PLAIN: 200.0, SPARSE_DIST: 108.0, "everything": 110.0, "limit": 100.0})
    text = step_comparison.headline(measured)
    assert f"its bubble is 90.0% smaller than that of {PLAIN}, 25.0% larger than that of {SPARSE_DIST}." in text


def cells(drawn: str, section: str) -> list[list[str]]:
    """The table of a section of a page, row by row, without its header."""
    table = drawn[drawn.index(f">{section}<") :].split("<table", 1)[1].split("</table>", 1)[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr")]
    return [row for row in rows if row]


def test_the_page_shows_the_figures_of_every_variant() -> None:
    steps = {PLAIN: 200.0, SPARSE_DIST: 180.0, "everything": 120.0, PLAIN_AGAIN: 210.0, "limit": 100.0}
    others = ("nothing", "balance", "priority", "SM-free")  # 150 ms each
    assert cells(step_comparison.render_page(comparison(steps), []), "All figures") == [
        ["compute alone", "100.0", "10.00", "320", "1.000", "", "", ""],
        [PLAIN, "200.0", "5.00", "160", "2.000", "100.0", "+0.0%", "-25.0%"],
        [SPARSE_DIST, "180.0", "5.56", "178", "1.800", "80.0", "+20.0%", "+0.0%"],
        *([name, "150.0", "6.67", "213", "1.500", "50.0", "+50.0%", "+37.5%"] for name in others),
        ["everything", "120.0", "8.33", "267", "1.200", "20.0", "+80.0%", "+75.0%"],
        [PLAIN_AGAIN, "210.0", "4.76", "152", "2.100", "110.0", "-10.0%", "-37.5%"],
    ]


def test_the_page_separates_bitwise_equality_from_rounding() -> None:
    exact = [LossDifference("priority", "fp64", True, 0.0), LossDifference("balance", "fp64", False, 2e-16)]
    assert cells(
        step_comparison.render_page(comparison({PLAIN: 200.0, "limit": 100.0}), exact),
        "The training result is the same",
    ) == [
        ["priority", "fp64", "the same bits"],
        ["balance", "fp64", "off by at most 2.0e-16"],
    ]


def test_compute_alone_needs_a_step_after_the_warm_up_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = SimpleNamespace()
    for seconds in ([], [0.1]):
        monkeypatch.setattr(emulated, "compute_only_seconds", lambda *_, seconds=seconds: seconds)
        with pytest.raises(UsageError, match="fewer than 2 batches"):
            emulated.compute_only_ms(world, world, world, [])


def mean_over_ranks(world: World) -> float:
    """Rank 0 computes for 100 ms, rank 1 for 200 ms, after a longer warm-up step."""
    given: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "compute_only_seconds", lambda *_: [9.0, *[0.1 * (1 + world.rank)] * 3])
        return emulated.compute_only_ms(given, joined(world), given, [])


def test_compute_alone_is_the_mean_over_ranks_without_the_warm_up_step(groups: dict[int, Ranks]) -> None:
    assert groups[2].run(mean_over_ranks) == pytest.approx([150.0, 150.0])


def test_emulated_compute_takes_the_calibrated_time(tmp_path: Path) -> None:
    """Sleeping takes no less than asked for, however busy the machine is."""
    model = EmulatedCompute(Cost(token=0.01), 0.03, 0.0).emulate(build_model(small(tmp_path), items=40))
    inputs = SimpleNamespace(layout=JaggedLayout(torch.tensor([0, 4, 12])))
    rows = {"item": Rows(torch.zeros(12, 8, requires_grad=True), torch.arange(12))}
    begin = time.monotonic()
    loss = model(inputs, rows)
    forward = time.monotonic() - begin
    loss.backward()
    assert forward >= (0.03 + 12 * 0.01) / 3
    assert time.monotonic() - begin - forward >= 2 * (0.03 + 12 * 0.01) / 3


def test_every_variant_trains_with_its_own_techniques(tmp_path: Path) -> None:
    config = small(tmp_path, transport={"urgent": "auto", "deferred": "auto"})
    used = {name: step_comparison.with_techniques(config, techniques) for name, techniques in FREESCALE.items()}
    assert {name: (one.balance.mode, one.tables.overlap, one.transport.deferred) for name, one in used.items()} == {
        "nothing": ("off", "off", "c10d"),
        "balance": ("on", "off", "c10d"),
        "priority": ("off", "on", "c10d"),
        "SM-free": ("off", "off", "auto"),
        "everything": ("on", "on", "auto"),
    }


def test_the_reported_loss_difference_is_that_of_the_worst_step(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(variant: str, *_: Any) -> list[float]:
        return [4.0, 3.0, 2.5] if variant == "balance" else [4.0, 2.0, 2.5]

    monkeypatch.setattr(step_comparison, "train_variant", losses)
    world: Any = SimpleNamespace(is_rank_zero=True)
    differences = step_comparison.compare_losses(small(log), world, Path(), steps=3)
    assert LossDifference("balance", "fp64", False, 0.5) in differences
    assert LossDifference("priority", "fp64", True, 0.0) in differences


def test_a_baseline_without_a_bubble_gives_no_reduction() -> None:
    measured = comparison({PLAIN: 200.0, SPARSE_DIST: 99.0, "everything": 110.0, "limit": 100.0})
    assert measured.bubble_reduction("everything", SPARSE_DIST) is None
    assert measured.bubble_reduction("everything", PLAIN) == pytest.approx(0.9)
    assert step_comparison.table_rows(measured.figures())[-2][-2:] == ["+90.0%", "-"]
    assert f"not comparable with that of {SPARSE_DIST}" in step_comparison.headline(measured)
