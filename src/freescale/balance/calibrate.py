"""Fits the cost of a sample to measured times, on the machine and the model at hand. Pure: numpy and nothing else."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from freescale.balance.cost import Cost, sizes


class Measured(NamedTuple):
    """What one rank computed in one step, and how long that took."""

    samples: int
    tokens: float
    pairs: float
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """A cost in seconds."""

    cost: Cost
    step: float
    """Seconds that every step takes, whatever it holds."""
    error: float
    """By what share a time that it was fitted to is off, on average."""


def measured(lengths: ArrayLike, candidates: ArrayLike, seconds: float) -> Measured:
    """From the samples of a rank and its time."""
    tokens, pairs = sizes(lengths, candidates)
    return Measured(len(tokens), float(tokens.sum()), float(pairs.sum()), seconds)


def fit(steps: Sequence[Measured]) -> Calibration:
    """The constants, none below zero, that are off by the least share.

    There are four of them, so every choice of which are zero is tried: that is exact, and needs no solver.
    """
    if not steps:
        raise ValueError("fit: nothing was measured")
    seconds = np.array([one.seconds for one in steps])
    if not (seconds > 0).all():
        raise ValueError("fit: measured times must be above 0")
    terms = np.array([(1.0, one.samples, one.tokens, one.pairs) for one in steps]) / seconds[:, None]
    best, least = np.zeros(4), np.inf
    for chosen in itertools.product((False, True), repeat=4):
        found = np.zeros(4)
        if any(chosen):
            found[list(chosen)] = np.linalg.lstsq(terms[:, chosen], np.ones(len(steps)), rcond=None)[0]
        off = float(np.square(terms @ found - 1.0).sum())
        if (found >= 0).all() and off < least * (1 - 1e-9):
            best, least = found, off
    step, sample, token, pair = best.tolist()
    error = float(np.abs(terms @ best - 1.0).mean())
    return Calibration(Cost(sample=sample, token=token, pair=pair), step, error)
