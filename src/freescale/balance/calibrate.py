"""Fits the cost of a sample to measured times, on the machine and the model at hand. Pure: numpy and nothing else."""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from freescale.balance.cost import Cost

_TERMS = 4


class Calibration(NamedTuple):
    """A cost in seconds."""

    cost: Cost
    step: float
    """Seconds that every step takes, whatever it holds."""
    error: float
    """By what share a time that it was fitted to is off: root of the mean square."""


class Products:
    """All that a fit needs of what was measured, in a few numbers however much that was.

    Times count by the share that they are off, so each line is divided by its time and is to become 1.
    """

    def __init__(self) -> None:
        self.table = np.zeros((_TERMS + 1, _TERMS + 1))

    def add(self, sizes: ArrayLike, seconds: ArrayLike) -> None:
        """Steps, samples, tokens and pairs of each line, and how long they took."""
        took = np.asarray(seconds, dtype=np.float64)
        if not (took > 0).all():
            raise ValueError("fit: measured times must be above 0")
        lines = np.concatenate([np.asarray(sizes, dtype=np.float64) / took[:, None], np.ones((len(took), 1))], axis=1)
        self.table += lines.T @ lines

    def fade(self, kept: float) -> None:
        """Let what was added before count less."""
        self.table *= kept


def fit(products: Products) -> Calibration:
    """The constants, none below zero, that are off by the least share.

    There are four of them, so every choice of which are zero is tried: that is exact, and needs no solver.
    """
    lines = products.table[-1, -1]
    if lines <= 0:
        raise ValueError("fit: nothing was measured")
    scale = np.sqrt(np.maximum(np.diag(products.table)[:_TERMS], 1e-300))
    left = products.table[:_TERMS, :_TERMS] / np.outer(scale, scale)
    right = products.table[:_TERMS, -1] / scale
    best, least = np.zeros(_TERMS), float(lines)
    for chosen in itertools.product((False, True), repeat=_TERMS):
        which = np.flatnonzero(chosen)
        found = np.zeros(_TERMS)
        found[which] = np.linalg.lstsq(left[np.ix_(which, which)], right[which], rcond=None)[0]
        off = float(found @ left @ found - 2 * found @ right + lines)
        if (found >= 0).all() and off < least - 1e-12 * lines:
            best, least = found, off
    step, sample, token, pair = (best / scale).tolist()
    return Calibration(Cost(sample, token, pair), step, float(np.sqrt(max(0.0, least) / lines)))
