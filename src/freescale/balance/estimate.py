"""What random batches would cost, by Monte Carlo: how long ranks wait for the one with the most work. Pure.

The straggler share is the paper's: mean idle time of a rank over the time of the iteration, 1 - mean / max.
"""

from dataclasses import dataclass

import numpy as np

from freescale.balance.placement import Floats, Ints

_DRAWS = 4_000_000


@dataclass(frozen=True)
class Imbalance:
    """Ranks against each other, averaged over simulated steps."""

    world_size: int
    batch: int
    """Samples per rank."""
    steps: int
    """Steps simulated."""
    max_over_mean: float
    """Time of a step over what it would be if work were spread evenly."""
    straggler_share: float
    """Share of the time that a rank waits for the slowest one, with random batches."""
    best_share: float
    """The same with samples placed as well as can be: only one sample above the mean load still makes others wait."""

    @property
    def recoverable_share(self) -> float:
        """What balancing can win of a rank's time."""
        return self.straggler_share - self.best_share


def random_batches(costs: Floats, counts: Ints, *, world_size: int, batch: int, seed: int = 0) -> Imbalance:
    """Draw batches at random from samples given as distinct costs and how often each occurs."""
    share = np.cumsum(counts) / counts.sum()
    steps = int(np.clip(_DRAWS // (world_size * batch), 20, 200))
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        load, largest = _draw(costs, share, world_size, batch, rng)
        mean, worst = load.mean(), load.max()
        found.append((worst / mean, 1.0 - mean / worst, 1.0 - mean / max(mean, largest)))
    return Imbalance(world_size, batch, steps, *np.mean(found, axis=0).tolist())


def _draw(costs: Floats, share: Floats, world_size: int, batch: int, rng: np.random.Generator) -> tuple[Floats, float]:
    """Loads of all ranks in one step, and its largest sample; in slices, so that 16,384 ranks fit in memory."""
    rows = max(1, _DRAWS // batch)
    loads, largest = [], 0.0
    for first in range(0, world_size, rows):
        drawn = costs[places(share, (min(rows, world_size - first), batch), rng)]
        loads.append(drawn.sum(axis=1))
        largest = max(largest, float(drawn.max()))
    return np.concatenate(loads), largest


def places(share: Floats, shape: int | tuple[int, int], rng: np.random.Generator) -> Ints:
    """Draw places at random: `share` is the chance of each and of all before it."""
    return np.minimum(np.searchsorted(share, rng.random(shape), side="right"), len(share) - 1)
