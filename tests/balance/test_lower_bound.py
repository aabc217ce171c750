"""The lower bound that a placement is measured by is below every placement, and above what mean and maximum say."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from freescale.balance.assign import assign
from freescale.balance.placement import AssignmentProblem

CASES = 600


def every_placement(samples: int, ranks: int) -> NDArray[np.int64]:
    """[placements, samples]: the rank of each sample."""
    return np.array(list(itertools.product(range(ranks), repeat=samples)), dtype=np.int64)


def random_problem(seed: int) -> AssignmentProblem:
    """A few samples: of any size, of nearly equal size, or small ones beside large ones."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 4))
    samples = int(rng.integers(1, 8))
    kinds = (rng.integers(0, 100, samples), rng.integers(90, 100, samples), rng.choice([1, 2, 60, 61], samples))
    speeds = np.ones(ranks) if rng.random() < 0.5 else rng.uniform(0.3, 3.0, ranks)
    tokens, nowhere = np.ones(samples, dtype=np.int64), np.zeros(samples, dtype=np.int64)
    hosts, equal = np.zeros(ranks, dtype=np.int64), bool(rng.random() < 0.3)
    costs = kinds[int(rng.integers(0, 3))].astype(np.float64)
    return AssignmentProblem(costs, nowhere, ranks, tokens, speeds, hosts, equal_counts=equal)


def best_time(problem: AssignmentProblem) -> float:
    """By trying all placements."""
    rank = every_placement(len(problem.costs), problem.world_size)
    held = rank[:, :, None] == np.arange(problem.world_size)
    if problem.equal_counts:
        held = held[np.ptp(held.sum(axis=1), axis=1) <= 1]
    times = (held * problem.costs[:, None]).sum(axis=1) / problem.speeds
    return float(times.max(axis=1).min())


def test_no_placement_beats_the_lower_bound() -> None:
    reached = 0
    for seed in range(CASES):
        problem = random_problem(seed)
        best = best_time(problem)
        assert problem.lower_bound_time <= best * (1 + 1e-12), seed
        reached += problem.lower_bound_time >= best * (1 - 1e-12)
    assert reached > CASES // 4, "the bound is also tight"


@pytest.mark.parametrize(
    ("costs", "ranks", "bound"),
    [
        ([9, 9, 9, 1], 2, 18),  # two of three long samples share a rank
        ([9, 8, 7, 6, 5], 2, 18),  # and three of five
        ([9, 9, 9, 1, 1, 1], 2, 18),
        ([30, 1, 1], 3, 30),
        ([5, 5, 5, 5], 2, 10),
    ],
)
def test_samples_that_must_share_a_rank_raise_the_bound(costs: list[int], ranks: int, bound: float) -> None:
    placed = assign(costs, np.zeros(len(costs), dtype=np.int64), world_size=ranks)
    assert placed.lower_bound == pytest.approx(bound / (sum(costs) / ranks))
    assert placed.max_over_mean >= placed.lower_bound * (1 - 1e-12)


def test_with_equal_counts_a_long_sample_has_companions() -> None:
    placed = assign([20, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], world_size=2, equal_counts=True)
    assert placed.lower_bound == pytest.approx(22 / 12.5)
    assert placed.max_over_mean == pytest.approx(22 / 12.5)


def test_samples_of_equal_cost_keep_their_order() -> None:
    costs = np.random.default_rng(0).choice([0, 1, 65_535, 65_536, 70_000, 2**30], 2000).astype(np.float64)
    nothing, one = np.zeros(2000, dtype=np.int64), np.ones(1)
    problem = AssignmentProblem(costs, nothing, 1, nothing, one, np.zeros(1, dtype=np.int64))
    assert np.array_equal(problem.ascending, np.lexsort((np.arange(2000), costs)))
