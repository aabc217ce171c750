"""How many distinct rows some events need, and how many of those the step before needed too. Pure.

Events are taken as drawn independently, each item as often as it occurs in the log.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from freescale.balance.placement import Floats, Ints

_POINTS = 96


class Rows(Protocol):
    """Which rows events need."""

    def rows(self, events: Floats) -> Floats:
        """Distinct ones that so many events of a rank need."""

    def shared(self, events: Floats, before: float) -> Floats:
        """Of those, the ones that `before` events of the step before need too."""


class Popularity:
    """Groups of items that occur equally often: how many they are, and the share of the events that each of them has.

    `drawn`: rows that are looked up at random beside every event.
    """

    def __init__(self, items: Floats, share: Floats, *, drawn: int = 0) -> None:
        self._items, self._share = items, share
        self._at_random = drawn / max(1.0, float(items.sum()))

    @staticmethod
    def counted(counts: Ints, *, drawn: int = 0) -> "Popularity":
        """From how often each item of a log occurs."""
        often, items = np.unique(counts, return_counts=True)
        return Popularity(items.astype(np.float64), often / max(1, counts.sum()), drawn=drawn)

    def rows(self, events: Floats) -> Floats:
        """Distinct rows that so many events need."""
        return self._between(events, lambda n: float(self._items @ self._touched(n)))

    def shared(self, events: Floats, before: float) -> Floats:
        """Of the distinct rows of these events: those that `before` events of the step before need too."""
        there = self._items * self._touched(before)
        return self._between(events, lambda n: float(there @ self._touched(n)))

    def _touched(self, events: float) -> Floats:
        """Of each group of items, the chance that some of so many events need it."""
        return -np.expm1(events * (np.log1p(-np.minimum(self._share, 1 - 1e-12)) - self._at_random))

    def _between(self, events: Floats, found: Callable[[float], float]) -> Floats:
        """Exact at some points, and straight lines between them on a logarithmic scale."""
        points = np.geomspace(1.0, max(2.0, float(events.max(initial=1.0))), _POINTS)
        values = np.array([found(point) for point in points])
        return np.interp(np.log(np.maximum(events, 1.0)), np.log(points), values) * (events > 0)
