"""The cost of a sample, counted or fitted to measured times, and the imbalance of random batches. Pure numpy.

A counted cost is in multiply-adds of the matrix products of one forward pass; a backward pass is twice as much for
every sample, so ratios do not change. Attention is causal, so a history of L events has L (L + 1) / 2 pairs; each of C
candidates sees the history and itself, which adds C (L + 1); candidates with anchors add the sum of the anchors and C.
With another `model.memory` than "full", tokens and pairs are those of its rule.

`random_batches` estimates by Monte Carlo how long ranks wait for the slowest one. The straggler share is the paper's:
mean idle time of a rank over the time of the iteration, 1 - mean / max.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args, get_type_hints

import numpy as np
from numpy.typing import ArrayLike

from freescale.balance.placement import Floats, Ints
from freescale.config import ModelConfig
from freescale.visibility import Visibility


@dataclass(frozen=True)
class Cost:
    """cost = sample + token * tokens + pair * pairs, or tokens ** power."""

    sample: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    power: float | None = None
    visibility: Visibility | None = None
    """What an event attends to. None: all earlier ones."""

    @staticmethod
    def hstu(
        *, dim: int, layers: int = 1, heads: int = 1, attention_dim: int | None = None, linear_dim: int | None = None
    ) -> "Cost":
        """HSTU: one projection to U, V, Q, K, pointwise attention, one projection back."""
        query = heads * (attention_dim or dim // heads)
        value = heads * (linear_dim or dim // heads)
        return Cost(token=layers * (dim * 2 * (query + value) + value * dim), pair=layers * (query + value))

    @staticmethod
    def sasrec(*, dim: int, layers: int = 1, hidden_dim: int | None = None) -> "Cost":
        """SASRec: Q, K, V and output projections, softmax attention, two feed-forward layers. Heads only divide dim."""
        hidden = hidden_dim or dim
        return Cost(token=layers * (4 * dim * dim + 2 * dim * hidden), pair=layers * 2 * dim)

    @staticmethod
    def power_law(alpha: float) -> "Cost":
        """The weight L ** alpha of the FreeScale paper."""
        return Cost(power=alpha)

    @staticmethod
    def of_model(model: ModelConfig) -> "Cost":
        """The analytic cost of a configured model."""
        if model.kind == "sasrec":
            cost = Cost.sasrec(dim=model.dim, layers=model.layers)
        else:
            cost = Cost.hstu(dim=model.dim, layers=model.layers, heads=model.heads)
        return replace(cost, visibility=Visibility.of_model(model))

    def with_constants(
        self, sample: float = 0.0, token: float = 0.0, pair: float = 0.0, power: float | None = None
    ) -> "Cost":
        """Return the cost of the same model with other constants."""
        return Cost(sample, token, pair, power, self.visibility)

    @property
    def constants(self) -> tuple[float, float, float]:
        """Cost of a sample, of a token, of a pair."""
        return self.sample, self.token, self.pair

    def of(self, lengths: ArrayLike, candidates: ArrayLike = 0, visible: ArrayLike | None = None) -> Floats:
        """Return the cost of each sample; the arguments are those of `sizes`."""
        tokens, pairs = sizes(lengths, candidates, visible, self.visibility)
        return self.summed(1, tokens, pairs) if self.power is None else tokens**self.power

    def summed(self, samples: ArrayLike, tokens: ArrayLike, pairs: ArrayLike) -> Floats:
        """Return the cost of several samples from their sums. Not defined for a power law."""
        if self.power is not None:
            raise ValueError("a cost of tokens ** power does not follow from sums")
        return self.sample * np.asarray(samples) + self.token * np.asarray(tokens) + self.pair * np.asarray(pairs)


def sizes(
    lengths: ArrayLike,
    candidates: ArrayLike = 0,
    visible: ArrayLike | None = None,
    visibility: Visibility | None = None,
) -> tuple[Floats, Floats]:
    """Return the tokens of each sample, and the pairs of tokens that attend to each other.

    `visible`: the sum over the candidates of each sample of the tokens that they see. By default every candidate comes
    after the whole history.
    """
    history = np.asarray(lengths, dtype=np.float64)
    candidate = np.asarray(candidates, dtype=np.float64)
    if visibility is not None:
        seen = candidate * visibility.seen(history) if visible is None else np.asarray(visible, dtype=np.float64)
        return visibility.tokens(history) + candidate, visibility.pairs(history) + seen + candidate
    seen = candidate * history if visible is None else np.asarray(visible, dtype=np.float64)
    return history + candidate, history * (history + 1) / 2 + seen + candidate


class MemoryCost(NamedTuple):
    """What a value of `model.memory` costs on some data, against attention to all earlier events."""

    memory: str
    pairs: float
    """Visible pairs of a history, in the mean."""
    pair_share: float
    token_share: float
    """Tokens, summary tokens included."""
    work_share: float


def memory_costs(model: ModelConfig, lengths: Ints, counts: Ints) -> list[MemoryCost]:
    """Return the cost of every `model.memory` for histories of these lengths, with the other fields of the model."""
    totals = []
    for memory in get_args(get_type_hints(ModelConfig)["memory"]):
        cost = Cost.of_model(replace(model, memory=memory))
        tokens, pairs = sizes(lengths, visibility=cost.visibility)
        totals.append((memory, *(float(values @ counts) for values in (pairs, tokens, cost.of(lengths)))))
    of_all = np.maximum(totals[0][1:], 1e-300)
    mean = 1 / max(1, int(counts.sum()))
    return [
        MemoryCost(memory, pairs * mean, *(np.array([pairs, tokens, work]) / of_all).tolist())
        for memory, pairs, tokens, work in totals
    ]


_TERMS = 4
_DRAWS = 4_000_000
_WORTHWHILE = 0.01


class Calibration(NamedTuple):
    """A fitted cost, in seconds."""

    cost: Cost
    step: float
    """Fixed seconds of every step."""
    error: float
    """Relative error of the fitted times: root of the mean square."""


class NormalEquations:
    """The normal equations of a least-squares fit: constant memory for any number of measurements.

    Errors are relative, so each measurement is divided by its time and its target is 1.
    """

    def __init__(self) -> None:
        self.table = np.zeros((_TERMS + 1, _TERMS + 1))

    def add(self, sizes: ArrayLike, seconds: ArrayLike) -> None:
        """Add measurements: steps, samples, tokens and pairs of each, and its seconds."""
        times = np.asarray(seconds, dtype=np.float64)
        if not (times > 0).all():
            raise ValueError("fit: measured times must be above 0")
        lines = np.concatenate([np.asarray(sizes, dtype=np.float64) / times[:, None], np.ones((len(times), 1))], axis=1)
        self.table += lines.T @ lines

    def decay(self, kept: float) -> None:
        """Scale down the weight of earlier measurements."""
        self.table *= kept


def fit(equations: NormalEquations) -> Calibration:
    """Return the non-negative constants with the least relative error.

    With four constants every choice of which are zero is tried: exact, and without a solver.
    """
    lines = equations.table[-1, -1]
    if lines <= 0:
        raise ValueError("fit: nothing was measured")
    scale = np.sqrt(np.maximum(np.diag(equations.table)[:_TERMS], 1e-300))
    left = equations.table[:_TERMS, :_TERMS] / np.outer(scale, scale)
    right = equations.table[:_TERMS, -1] / scale
    best, least = np.zeros(_TERMS), float(lines)
    for nonzero in itertools.product((False, True), repeat=_TERMS):
        chosen = np.flatnonzero(nonzero)
        constants = np.zeros(_TERMS)
        constants[chosen] = np.linalg.lstsq(left[np.ix_(chosen, chosen)], right[chosen], rcond=None)[0]
        error = float(constants @ left @ constants - 2 * constants @ right + lines)
        if (constants >= 0).all() and error < least - 1e-12 * lines:
            best, least = constants, error
    step, sample, token, pair = (best / scale).tolist()
    return Calibration(Cost(sample, token, pair), step, float(np.sqrt(max(0.0, least) / lines)))


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
