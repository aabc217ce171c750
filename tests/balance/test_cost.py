"""The cost of a sample is the number of multiply-adds of its model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale.balance.cost import Cost, random_batches
from freescale.config import ModelConfig
from freescale.data import synthetic


def counted(length: int, anchors: list[int], projections: int, attention: int) -> int:
    """Multiply-adds of one layer, token by token and pair by pair."""
    total = projections * (length + len(anchors))
    for query in range(length):
        total += attention * (query + 1)  # the causal half, itself included
    for anchor in anchors:
        total += attention * (anchor + 1)  # its part of the history and itself
    return total


@given(
    length=st.integers(0, 60), candidates=st.integers(0, 9), dim=st.sampled_from([8, 32, 50]), layers=st.integers(1, 4)
)
def test_costs_equal_a_count_of_multiply_adds(length: int, candidates: int, dim: int, layers: int) -> None:
    hstu, sasrec = Cost.hstu(dim=dim, layers=layers, heads=2), Cost.sasrec(dim=dim, layers=layers)
    whole, parts = [length] * candidates, [length * each // 9 for each in range(candidates)]
    for anchors, visible in ((whole, None), (whole, sum(whole)), (parts, sum(parts))):
        assert hstu.of(length, candidates, visible) == layers * counted(length, anchors, 5 * dim * dim, 2 * dim)
        assert sasrec.of(length, candidates, visible) == layers * counted(length, anchors, 6 * dim * dim, 2 * dim)


def test_heads_divide_the_width_and_so_do_not_change_the_cost() -> None:
    assert Cost.hstu(dim=64, heads=4) == Cost.hstu(dim=64, heads=1)
    assert Cost.hstu(dim=64, heads=4, attention_dim=64) != Cost.hstu(dim=64, heads=4)


def test_the_papers_power_law_is_a_cost_too() -> None:
    assert Cost.power_law(1.5).of([4, 9]).tolist() == [8, 27]


def test_a_configured_model_has_the_cost_of_its_kind() -> None:
    assert Cost.of_model(ModelConfig(kind="sasrec", dim=64, layers=3)) == Cost.sasrec(dim=64, layers=3)
    assert Cost.of_model(ModelConfig(kind="hstu", dim=64, layers=3, heads=2)) == Cost.hstu(dim=64, layers=3, heads=2)


@pytest.mark.parametrize(
    ("preset", "ranks", "expected"),
    [("kuairand", 64, 1.23), ("kuairand", 256, 1.29), ("heavy", 64, 1.87), ("heavy", 256, 2.05)],
)
def test_the_imbalance_of_random_batches_is_the_published_one(
    preset: synthetic.Preset, ranks: int, expected: float
) -> None:
    lengths, counts = np.unique(synthetic.draw_lengths(preset, 200_000, np.random.default_rng(0)), return_counts=True)
    found = random_batches(Cost.sasrec(dim=256).of(lengths), counts, world_size=ranks, batch=128)
    assert found.max_over_mean == pytest.approx(expected, rel=0.03)
    assert found.best_share < 0.01


def test_equal_samples_make_nobody_wait_and_one_giant_cannot_be_balanced_away() -> None:
    equal = random_batches(np.array([3.0]), np.array([10]), world_size=8, batch=4)
    assert (equal.max_over_mean, equal.straggler_share, equal.best_share) == (1.0, 0.0, 0.0)
    giant = random_batches(np.array([1.0, 1e6]), np.array([999, 1]), world_size=64, batch=16)
    assert giant.best_share > 0.5
    assert 0 <= giant.recoverable_share < 0.01
