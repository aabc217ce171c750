"""The cost of a sample from its length and its candidates, counted or fitted to measured times. Pure numpy.

A counted cost is in multiply-adds of the matrix products of one forward pass; a backward pass is twice as much for
every sample, so ratios do not change. Attention is causal, so a history of L events has L (L + 1) / 2 pairs; each of C
candidates sees the history and itself, which adds C (L + 1).
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freescale.config import ModelConfig


@dataclass(frozen=True)
class Cost:
    """cost = sample + token * tokens + pair * pairs, or tokens ** power."""

    sample: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    power: float | None = None

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
            return Cost.sasrec(dim=model.dim, layers=model.layers)
        return Cost.hstu(dim=model.dim, layers=model.layers, heads=model.heads)

    @property
    def constants(self) -> tuple[float, float, float]:
        """Cost of a sample, of a token, of a pair."""
        return self.sample, self.token, self.pair

    def of(self, lengths: ArrayLike, candidates: ArrayLike = 0) -> NDArray[np.float64]:
        """Return the cost of each sample."""
        tokens, pairs = sizes(lengths, candidates)
        return self.summed(1, tokens, pairs) if self.power is None else tokens**self.power

    def summed(self, samples: ArrayLike, tokens: ArrayLike, pairs: ArrayLike) -> NDArray[np.float64]:
        """Return the cost of several samples from their sums. Not defined for a power law."""
        if self.power is not None:
            raise ValueError("a cost of tokens ** power does not follow from sums")
        return self.sample * np.asarray(samples) + self.token * np.asarray(tokens) + self.pair * np.asarray(pairs)


def sizes(lengths: ArrayLike, candidates: ArrayLike = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the tokens of each sample, and the pairs of tokens that attend to each other."""
    history = np.asarray(lengths, dtype=np.float64)
    candidate = np.asarray(candidates, dtype=np.float64)
    return history + candidate, history * (history + 1) / 2 + candidate * (history + 1)


_TERMS = 4


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
