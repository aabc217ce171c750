"""For models that pad, the slowest rank computes as few padded cells as any placement allows."""

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from freescale.balance.assign import assign
from freescale.balance.cost import Cost
from freescale.data import synthetic
from tests.support.partitions import best_sorted_partition
from tests.support.threads import waits

Words = dict[str, Any]
Floats, Ints = NDArray[np.float64], NDArray[np.int64]
COSTS = {"cells": Cost(token=1.0), "attention": Cost.sasrec(dim=64, layers=2)}


def padded(values: Floats | Ints, rank: Ints, ranks: int) -> Floats:
    """The count of each rank times its largest value."""
    return np.array([(rank == r).sum() * values[rank == r].max(initial=0) for r in range(ranks)], dtype=float)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("preset", ["heavy", "ml1m", "kuairand"])
def test_the_slowest_rank_has_the_padded_cells_of_the_best_sorted_partition(
    preset: synthetic.Preset, ranks: int
) -> None:
    source = np.repeat(np.arange(ranks), 8)
    for cost in COSTS.values():
        lengths = synthetic.draw_lengths(preset, len(source), np.random.default_rng(ranks))
        costs = cost.of(lengths)
        placed = assign(costs, source, world_size=ranks, tokens=lengths, compute="padded")
        slowest, before = (padded(costs, rank, ranks).max() for rank in (placed.rank, source))
        assert slowest <= 1.0001 * best_sorted_partition(costs, ranks) * (1 + 0.0045)
        assert slowest < 0.8 * before
        assert placed.max_over_mean == pytest.approx(slowest / (costs.sum() / ranks), rel=1e-6)
        assert placed.max_over_mean_before == pytest.approx(before / (costs.sum() / ranks), rel=1e-6)


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(0, 9), max_size=6), ranks=st.integers(1, 3), tolerance=st.sampled_from([0.0, 0.2]))
def test_no_placement_at_all_is_faster(lengths: list[int], ranks: int, tolerance: float) -> None:
    values, source = np.array(lengths, dtype=np.int64), np.arange(len(lengths)) % ranks
    placed = assign(values, source, world_size=ranks, tokens=values, compute="padded", tolerance=tolerance)
    every = itertools.product(range(ranks), repeat=len(lengths))
    best = min(padded(values, np.array(rank, dtype=np.int64), ranks).max() for rank in every)
    assert padded(values, placed.rank, ranks).max() <= best * (1 + tolerance) + 1e-6
    assert placed.max_over_mean >= placed.lower_bound * (1 - 1e-9)


@st.composite
def problems(draw: st.DrawFn) -> Words:
    ranks, count = draw(st.integers(1, 9)), draw(st.integers(0, 60))
    lengths = draw(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 5000)), min_size=count, max_size=count))
    source = draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
    speeds = draw(st.one_of(st.none(), st.lists(st.sampled_from([0.3, 0.5, 1.0, 1.1]), min_size=ranks, max_size=ranks)))
    return {"costs": lengths, "source_rank": source, "world_size": ranks, "tokens": lengths, "speeds": speeds}


@settings(max_examples=120)
@given(problem=problems(), limited=st.booleans())
def test_no_step_gets_longer_and_no_rank_holds_more_than_it_can(problem: Words, limited: bool) -> None:
    lengths, source = (np.array(problem[name], dtype=np.int64) for name in ("costs", "source_rank"))
    ranks = problem["world_size"]
    held = int(padded(lengths, source, ranks).max())
    placed = assign(**problem, compute="padded", max_tokens=max(1, held) if limited else None)
    assert ((placed.rank >= 0) & (placed.rank < ranks)).all()
    speeds = np.ones(ranks) if problem["speeds"] is None else np.array(problem["speeds"])
    slowest, before = ((padded(lengths, rank, ranks) / speeds).max() for rank in (placed.rank, source))
    assert slowest <= before * (1 + 1e-6)
    assert placed.max_over_mean >= placed.lower_bound * (1 - 1e-6)
    if limited:
        assert padded(lengths, placed.rank, ranks).max() <= max(1, held)


def test_a_tight_limit_of_padded_tokens_is_kept() -> None:
    many = np.array([100, *[10] * 40])  # by cost alone, one rank could take all short samples
    placed = assign(many**2, np.zeros(41), world_size=3, tokens=many, compute="padded", max_tokens=200)
    assert sorted(padded(many, placed.rank, 3)) == [100, 200, 200]
    lengths, source = np.array([100, 90, 10, 10, 10, 10]), np.array([0, 1, 0, 1, 0, 1])
    with pytest.raises(ValueError, match="within max_tokens = 120"):
        assign(lengths, source, world_size=2, tokens=lengths, compute="padded", max_tokens=120)


def test_every_rank_has_a_sample_if_there_are_enough() -> None:
    lengths = np.array([1000, *[1] * 9])
    placed = assign(lengths, np.zeros(10), world_size=10, tokens=lengths, compute="padded")
    assert np.bincount(placed.rank, minlength=10).tolist() == [1] * 10


def test_a_slow_rank_gets_less_padded_work() -> None:
    lengths = synthetic.draw_lengths("heavy", 256, np.random.default_rng(0))
    speeds = np.array([1.0, 1.0, 1.0, 0.5])
    placed = assign(lengths, np.arange(256) % 4, world_size=4, tokens=lengths, speeds=speeds, compute="padded")
    cells = padded(lengths, placed.rank, 4)
    assert cells[3] < 0.6 * cells[:3].min()
    assert (cells / speeds).max() <= 1.15 * (cells / speeds).mean()


def test_few_tokens_move_where_ranks_hold_like_lengths_already() -> None:
    lengths = np.array([100] * 2 + [50] * 4 + [25] * 8)
    source = np.repeat([2, 0, 1], [2, 4, 8])
    swapped = source.copy()
    swapped[[0, 13]] = 1, 2
    placed = assign(lengths, swapped, world_size=3, tokens=lengths, compute="padded")
    assert placed.rank.tolist() == source.tolist()
    assert placed.moved_samples == 2 / 14
    stays = assign(lengths, source, world_size=3, tokens=lengths, compute="padded")
    assert stays.moved_samples == 0
    assert stays.max_over_mean == stays.max_over_mean_before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"equal_counts": True}, "equal_counts leaves nothing to balance where ranks pad: use compute = 'jagged'"),
        ({"strategy": "lpt"}, "strategy = 'lpt' ignores padding: use compute = 'jagged'"),
        ({"tokens": [9, 1]}, "needs costs that grow with tokens"),
        ({"compute": "ragged"}, "must be 'jagged' or 'padded'"),
    ],
)
def test_what_does_not_go_with_padding_is_refused(wrong: Words, said: str) -> None:
    words: Words = {"costs": [1, 2], "source_rank": [0, 1], "world_size": 2, "compute": "padded"}
    with pytest.raises(ValueError, match=said):
        assign(**words | wrong)


def test_planning_for_padding_lets_a_step_be_launched() -> None:
    lengths = synthetic.draw_lengths("heavy", 512 * 32, np.random.default_rng(0))
    source = np.repeat(np.arange(512), 32)
    gaps = waits(lambda: assign(lengths, source, world_size=512, tokens=lengths, compute="padded"))
    assert len(gaps) > 20
    assert np.quantile(gaps, 0.99) < 2 * sys.getswitchinterval()
