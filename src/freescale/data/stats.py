"""What a data set is like: lengths of histories and popularity of items, in one pass and bounded memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freescale.data.store.columns import Group
from freescale.data.store.dataset import Dataset
from freescale.progress import track

Ints = NDArray[np.int64]
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_PENDING = 1 << 22


@dataclass
class Tally:
    """How often each of many integers was seen; memory follows the distinct ones."""

    values: Ints = field(default_factory=lambda: np.zeros(0, int))
    counts: Ints = field(default_factory=lambda: np.zeros(0, int))
    _pending: list[tuple[Ints, Ints]] = field(default_factory=list)
    _held: int = 0

    def add(self, seen: Ints) -> None:
        """Count some more."""
        values, counts = np.unique(seen, return_counts=True)
        self._pending.append((values, counts))
        self._held += len(values)
        if self._held > _PENDING:
            self.settle()

    def settle(self) -> None:
        """Merge what is pending into the sorted totals."""
        parts = [(self.values, self.counts), *self._pending]
        self.values, back = np.unique(np.concatenate([v for v, _ in parts]), return_inverse=True)
        self.counts = np.bincount(back, np.concatenate([c for _, c in parts])).astype(np.int64)
        self._pending.clear()
        self._held = 0


@dataclass(frozen=True)
class Profile:
    """The figures of a data set."""

    rows: int
    events: int
    lengths: Tally
    items: Tally

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the histories do not exceed."""
        lengths = self.lengths
        return int(np.quantile(lengths.values, share, weights=lengths.counts, method="inverted_cdf"))

    @property
    def mean_length(self) -> float:
        """Events per history."""
        return self.events / max(1, self.rows)

    @property
    def variation(self) -> float:
        """Standard deviation of the length over its mean."""
        share = self.lengths.counts / max(1, self.rows)
        variance = float(share @ (self.lengths.values - self.mean_length) ** 2)
        return variance**0.5 / max(self.mean_length, 1e-12)

    def popularity(self) -> Ints:
        """Events per item, most popular first."""
        return np.sort(self.items.counts)[::-1]

    def top_share(self, share: float) -> float:
        """Which part of the events goes to this share of the items."""
        popularity = self.popularity()
        top = max(1, round(share * len(popularity)))
        return float(popularity[:top].sum() / max(1, self.events))


def profile(dataset: Dataset, *, workers: int = 2) -> Profile:
    """Read a whole data set once and describe it."""
    lengths, items = Tally(), Tally()
    groups = _groups(dataset, workers)
    for group in track(groups, f"reading {dataset.address}", total=dataset.layout.groups, unit="row groups"):
        column = group.columns["item_id"]
        lengths.add(column.lengths[group.usable])
        items.add(column.values)
    lengths.settle()
    items.settle()
    return Profile(int(lengths.counts.sum()), int(items.counts.sum()), lengths, items)


def _groups(dataset: Dataset, workers: int) -> Iterator[Group]:
    """All row groups, a few read ahead."""
    total = dataset.layout.groups
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for first in range(0, total, 64):
            yield from pool.map(dataset.read_group, range(first, min(first + 64, total)))
