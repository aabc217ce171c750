"""Estimates by Monte Carlo how long ranks wait for the slowest one with random batches. Pure.

The straggler share is the paper's: mean idle time of a rank over the time of the iteration, 1 - mean / max.
"""

from dataclasses import dataclass

import numpy as np

from freescale.balance.placement import Floats, Ints

_DRAWS = 4_000_000
_WORTHWHILE = 0.01


@dataclass(frozen=True)
class Imbalance:
    """Imbalance of ranks, averaged over simulated steps."""

    world_size: int
    batch: int
    """Samples per rank."""
    steps: int
    """Steps simulated."""
    max_over_mean: float
    """Time of a step over the time of a perfectly even split."""
    straggler_share: float
    """Share of the time that a rank waits for the slowest one, with random batches."""
    best_share: float
    """The same with the best placement: only a single sample above the mean load still makes ranks wait."""

    @property
    def recoverable_share(self) -> float:
        """Share of a rank's time that balancing can recover."""
        return self.straggler_share - self.best_share


def is_worthwhile(costs: Floats, *, world_size: int, batch: int) -> bool:
    """Return whether balancing would recover a noticeable share of a rank's time. `costs`: of a sample of the data.

    A pure function of its arguments, so that repeated runs balance alike.
    """
    values, counts = np.unique(costs, return_counts=True)
    return random_batches(values, counts, world_size=world_size, batch=batch).recoverable_share >= _WORTHWHILE


def random_batches(costs: Floats, counts: Ints, *, world_size: int, batch: int, seed: int = 0) -> Imbalance:
    """Simulate random batches of samples, which are described by distinct costs and their counts."""
    share = np.cumsum(counts) / counts.sum()
    steps = int(np.clip(_DRAWS // (world_size * batch), 20, 200))
    rng = np.random.default_rng(seed)
    results = []
    for _ in range(steps):
        load, largest = _draw(costs, share, world_size, batch, rng)
        mean, worst = load.mean(), load.max()
        results.append((worst / mean, 1.0 - mean / worst, 1.0 - mean / max(mean, largest)))
    return Imbalance(world_size, batch, steps, *np.mean(results, axis=0).tolist())


def _draw(costs: Floats, share: Floats, world_size: int, batch: int, rng: np.random.Generator) -> tuple[Floats, float]:
    """Return the loads of all ranks in one step and its largest sample. Sliced, so that 16,384 ranks fit in memory."""
    rows = max(1, _DRAWS // batch)
    loads, largest = [], 0.0
    for first in range(0, world_size, rows):
        drawn = costs[draw_indices(share, (min(rows, world_size - first), batch), rng)]
        loads.append(drawn.sum(axis=1))
        largest = max(largest, float(drawn.max()))
    return np.concatenate(loads), largest


def draw_indices(share: Floats, shape: int | tuple[int, int], rng: np.random.Generator) -> Ints:
    """Draw random indices. `share`: cumulative probability."""
    return np.minimum(np.searchsorted(share, rng.random(shape), side="right"), len(share) - 1)
