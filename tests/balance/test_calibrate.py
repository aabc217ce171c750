"""fit recovers the cost of a sample from measured times."""

import numpy as np
import pytest

from freescale.balance.cost import Cost, NormalEquations, fit, sizes

TRUE = Cost(sample=2e-5, token=3e-6, pair=4e-9)


def steps(noise: float, count: int = 60, seed: int = 0) -> NormalEquations:
    rng = np.random.default_rng(seed)
    found = NormalEquations()
    for _ in range(count):
        lengths = np.minimum(rng.lognormal(4.0, 1.2, rng.integers(4, 64)), 4096).astype(int)
        seconds = 0.002 + TRUE.of(lengths).sum()
        tokens, pairs = sizes(lengths)
        took = seconds * (1 + noise * rng.standard_normal())
        found.add([(1, len(lengths), tokens.sum(), pairs.sum())], [took])
    return found


def test_without_noise_the_constants_are_found() -> None:
    found = fit(steps(0.0))
    assert found.error < 1e-6
    assert found.step == pytest.approx(0.002, rel=1e-6)
    assert (found.cost.sample, found.cost.token, found.cost.pair) == pytest.approx((2e-5, 3e-6, 4e-9), rel=1e-6)


def test_with_noise_costs_are_predicted_about_as_well_as_times_were_measured() -> None:
    found = fit(steps(0.05))
    assert 0.02 < found.error < 0.06
    lengths = np.arange(1, 4000, 100)
    ours, truth = found.cost.of(lengths), TRUE.of(lengths)
    assert np.abs(ours / ours.sum() - truth / truth.sum()).max() < 0.1 * (truth / truth.sum()).max()


def test_no_constant_is_negative_whatever_was_measured() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        products = NormalEquations()
        products.add(rng.random((5, 4)), 0.1 + rng.random(5))
        found = fit(products)
        assert min(found.step, found.cost.sample, found.cost.token, found.cost.pair) >= 0


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        fit(NormalEquations())
    with pytest.raises(ValueError, match="above 0"):
        NormalEquations().add([(1, 1, 1, 1)], [0.0])
