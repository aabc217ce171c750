"""How many samples each row group of a data set holds, and what number each sample has. Pure.

Row groups are numbered in log order. A log of 10^10 samples has millions of them, so the counts are kept as one
common size and the exceptions: files written by us have one exception each, the last group.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

MOST_ROWS = 1 << 22
"""Of one row group. Samples of a window are numbered in memory, so a file may not claim any number."""


@dataclass(frozen=True)
class Layout:
    """Row groups of `common` rows, except those listed in `odd`."""

    groups: int
    common: int
    odd: NDArray[np.int64]
    """Numbers of the groups with another size, ascending."""
    odd_rows: NDArray[np.int64]
    """Their sizes."""

    @staticmethod
    def of(counts: Iterable[int]) -> "Layout":
        """Find the common size and the exceptions."""
        rows = np.fromiter(counts, dtype=np.int64)
        values, times = np.unique(rows, return_counts=True)
        common = int(values[times.argmax()]) if len(values) else 0
        odd = np.flatnonzero(rows != common)
        return Layout(len(rows), common, odd, rows[odd])

    @property
    def rows(self) -> int:
        """Samples in the whole data set."""
        return self.groups * self.common + int((self.odd_rows - self.common).sum())

    def rows_of(self, groups: ArrayLike) -> NDArray[np.int64]:
        """Samples in each of these groups."""
        groups = np.asarray(groups, dtype=np.int64)
        rows = np.full(groups.shape, self.common, dtype=np.int64)
        if len(self.odd):
            place = np.minimum(np.searchsorted(self.odd, groups), len(self.odd) - 1)
            rows = np.where(self.odd[place] == groups, self.odd_rows[place], rows)
        return rows

    def first_row_of(self, groups: ArrayLike) -> NDArray[np.int64]:
        """The number, in log order, of the first sample of each of these groups."""
        groups = np.asarray(groups, dtype=np.int64)
        return groups * self.common + self._excess[np.searchsorted(self.odd, groups)]

    @cached_property
    def _excess(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.odd_rows - self.common)])


def ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lay the ranges [first, first + count) end to end."""
    laid = np.arange(int(count.sum()), dtype=np.int64)
    laid += np.repeat(first - (np.cumsum(count) - count), count)
    return laid
