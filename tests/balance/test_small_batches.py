"""With few samples per rank, or few that hold most of the cost, the step is balanced and little moves."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freescale.balance.assign import TOLERANCES, assign, tolerance_curve
from freescale.balance.cost import Cost, draw_indices
from freescale.balance.placement import AssignmentProblem, Placement, match_source_ranks
from freescale.balance.planner import Planner
from freescale.config import BalanceConfig
from freescale.data import synthetic
from tests.support.threads import waits

COST = Cost.hstu(dim=256)


def even(ranks: int, batch: int) -> NDArray[np.int64]:
    return np.repeat(np.arange(ranks), batch)


def kuairand(ranks: int, batch: int, seed: int) -> NDArray[np.int64]:
    return synthetic.draw_lengths("kuairand", ranks * batch, np.random.default_rng(seed))


def lumpy(ranks: int, batch: int, seed: int) -> NDArray[np.int64]:
    """A few samples hold nearly all of the cost."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(ranks * batch) < 0.02, 20_000, rng.integers(1, 401, ranks * batch))


def balanced(lengths: NDArray[np.int64], ranks: int, **options: Any) -> Placement:
    homes = even(ranks, len(lengths) // ranks)
    return assign(COST.of(lengths), homes, world_size=ranks, tokens=lengths, **options)


@pytest.mark.parametrize(("ranks", "batch", "most_moved"), [(8, 8, 0.20), (64, 8, 0.18), (64, 16, 0.105)])
def test_few_samples_per_rank_are_balanced_to_half_a_percent_and_few_tokens_move(
    ranks: int, batch: int, most_moved: float
) -> None:
    placed = [balanced(kuairand(ranks, batch, seed), ranks) for seed in range(8)]
    assert max(one.max_over_mean / one.lower_bound for one in placed) <= 1.005
    assert np.mean([one.moved_tokens for one in placed]) <= most_moved


def test_four_samples_per_rank_end_no_later_than_lpt_and_most_stay() -> None:
    placed = [[balanced(kuairand(64, 4, seed), 64, strategy=s) for s in ("rebalance", "lpt")] for seed in range(4)]
    for ours, lpt in placed:
        assert ours.max_over_mean <= max(lpt.max_over_mean, 1.005 * ours.lower_bound) * (1 + 1e-12)
    assert np.mean([ours.moved_tokens for ours, _ in placed]) < 0.42


def test_a_few_samples_with_most_of_the_cost_are_spread_and_the_others_stay() -> None:
    placed = [balanced(lumpy(64, 128, seed), 64) for seed in range(4)]
    assert max(one.max_over_mean / one.lower_bound for one in placed) <= 1.005
    assert np.mean([one.moved_tokens for one in placed]) < 0.35


def test_two_samples_per_rank_end_no_later_than_lpt() -> None:
    """With so few samples, a repartition can end before anything that swaps reach."""
    for seed in range(40):
        costs, homes = np.random.default_rng(seed).integers(100, 1000, 12), even(6, 2)
        ours, lpt = (assign(costs, homes, world_size=6, strategy=s) for s in ("rebalance", "lpt"))
        assert ours.max_over_mean <= max(lpt.max_over_mean, 1.005 * ours.lower_bound) * (1 + 1e-12), seed


@pytest.mark.parametrize(("batch", "most_moved"), [(4, 0.46), (8, 0.24)])
def test_equal_counts_hold_with_few_samples_per_rank(batch: int, most_moved: float) -> None:
    moved = []
    for seed in range(3):
        lengths = kuairand(32, batch, seed)
        ours, lpt = (balanced(lengths, 32, equal_counts=True, strategy=s) for s in ("rebalance", "lpt"))
        assert np.ptp(np.bincount(ours.rank, minlength=32)) == 0
        assert ours.max_over_mean <= max(lpt.max_over_mean, 1.005 * ours.lower_bound) * (1 + 1e-12)
        moved.append(ours.moved_tokens)
    assert np.mean(moved) <= most_moved


def test_a_slow_rank_gets_less_of_few_samples() -> None:
    speeds = np.ones(32)
    speeds[[3, 17]] = 0.5, 1.5
    for seed in range(3):
        lengths = kuairand(32, 8, seed)
        placed = balanced(lengths, 32, speeds=speeds)
        work = np.bincount(placed.rank, weights=COST.of(lengths))
        assert work[[3, 17]] / work.sum() == pytest.approx(speeds[[3, 17]] / speeds.sum(), rel=0.1)
        assert placed.max_over_mean <= 1.005 * placed.lower_bound
        assert placed.moved_tokens < 0.3


def test_few_samples_move_inside_a_host_where_they_can() -> None:
    hosts, homes = np.arange(64) // 16, even(64, 8)
    crossing = []
    for seed in range(4):
        lengths = kuairand(64, 8, seed)
        near, far = balanced(lengths, 64, hosts=hosts), balanced(lengths, 64)
        crossing.append([lengths[hosts[one.rank] != hosts[homes]].sum() for one in (near, far)])
        assert near.max_over_mean <= 1.005 * near.lower_bound
    assert np.mean(crossing, axis=0)[0] < 0.6 * np.mean(crossing, axis=0)[1]


@pytest.mark.parametrize("share", [1.02, 1.1])
def test_few_samples_respect_max_tokens(share: float) -> None:
    for seed in range(3):
        lengths = kuairand(32, 8, seed)
        limit = int(max(share * lengths.sum() / 32, lengths.max()))
        placed = balanced(lengths, 32, max_tokens=limit)
        assert np.bincount(placed.rank, weights=lengths).max() <= limit
        assert placed.max_over_mean <= placed.max_over_mean_before
        assert placed.moved_tokens < 0.5


def test_every_combination_of_options_ends_no_later_than_lpt_or_the_limit() -> None:
    """Unequal source counts, ranks without samples and samples without cost among them."""
    options = itertools.product((False, True), (False, True), (False, True), (0.0, 0.005, 0.05))
    for seed, (equal_counts, fast, near, tolerance) in enumerate([*options] * 4):
        rng = np.random.default_rng(seed)
        ranks, samples = int(rng.integers(2, 12)), int(rng.integers(0, 80))
        costs = rng.integers(0, 1000, samples) * (rng.random(samples) < 0.9)
        words: dict[str, Any] = {
            "world_size": ranks,
            "tokens": costs // 10 + 1,
            "equal_counts": equal_counts,
            "speeds": rng.uniform(0.3, 3.0, ranks) if fast else None,
            "hosts": rng.integers(0, 3, ranks) if near else None,
            "tolerance": tolerance,
        }
        homes = rng.integers(0, int(rng.integers(1, ranks + 1)), samples)
        ours, lpt = (assign(costs, homes, **words, strategy=s) for s in ("rebalance", "lpt"))
        limit = (1 + tolerance) * ours.lower_bound
        assert ours.max_over_mean <= max(lpt.max_over_mean, limit) * (1 + 1e-9), (seed, words)
        if equal_counts:
            assert np.ptp(np.bincount(ours.rank, minlength=ranks)) <= 1


def test_a_partition_that_only_renames_ranks_moves_nothing() -> None:
    rng = np.random.default_rng(0)
    homes, renamed = even(16, 4), rng.permutation(16)
    ones, hosts = np.ones(64), np.zeros(16, dtype=np.int64)
    problem = AssignmentProblem(ones, homes, 16, ones.astype(np.int64), np.ones(16), hosts)
    assert np.array_equal(match_source_ranks(problem, renamed[homes]), homes)


def test_a_partition_is_renamed_only_between_ranks_of_equal_speed() -> None:
    speeds = np.repeat([1.0, 2.0], 4)
    homes, bins = even(8, 3), np.random.default_rng(0).permutation(8)[even(8, 3)]
    tokens, hosts = np.ones(24, dtype=np.int64), np.zeros(8, dtype=np.int64)
    rank = match_source_ranks(AssignmentProblem(np.ones(24), homes, 8, tokens, speeds, hosts), bins)
    assert np.array_equal(speeds[rank], speeds[bins])
    assert np.array_equal(np.bincount(rank), np.bincount(bins))


def test_a_higher_tolerance_moves_less() -> None:
    for ranks, batch in ((64, 4), (64, 8), (16, 64)):
        moved = [
            np.mean([balanced(kuairand(ranks, batch, seed), ranks, tolerance=t).moved_tokens for seed in range(3)])
            for t in TOLERANCES
        ]
        assert moved == sorted(moved, reverse=True), moved
        assert moved[-1] < 0.8 * moved[0]


def test_the_curve_of_tolerances_is_what_assign_does() -> None:
    lengths, counts = np.unique(kuairand(8, 64, 0), return_counts=True)
    curve = tolerance_curve(lengths, COST.of(lengths), counts, world_size=16, batch=8, seed=3)
    rng, share = np.random.default_rng(3), np.cumsum(counts) / counts.sum()
    steps = [lengths[draw_indices(share, 16 * 8, rng)] for _ in range(8)]
    assert [point.tolerance for point in curve] == [0.005, 0.01, 0.02, 0.05]
    for point in curve:
        placed = [balanced(step, 16, tolerance=point.tolerance) for step in steps]
        assert point.moved_tokens == pytest.approx(np.mean([one.moved_tokens for one in placed]), rel=1e-12)
        assert point.max_over_mean == pytest.approx(np.mean([one.max_over_mean for one in placed]), rel=1e-12)


def test_a_run_places_samples_with_its_tolerance() -> None:
    lengths = kuairand(16, 8, 0)
    for tolerance in (0.005, 0.05):
        planner = Planner(COST, BalanceConfig(tolerance=tolerance), world_size=16)
        expected = balanced(lengths, 16, tolerance=tolerance)
        assert np.array_equal(planner({"history": lengths}, even(16, 8)).rank, expected.rank)


def test_planning_few_samples_lets_a_step_be_launched() -> None:
    lengths = kuairand(256, 8, 0)
    gaps = waits(lambda: balanced(lengths, 256))
    assert len(gaps) > 20
    assert np.quantile(gaps, 0.99) < 0.02
