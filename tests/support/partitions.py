"""The best partition of sorted samples, by exhaustive search: what placement for padded models is compared with."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def best_sorted_partition(values: NDArray[Any], ranks: int) -> float:
    """Return the least bottleneck of contiguous groups, longest first, by dynamic programming over all cuts.

    The time of a group is its count times its largest value.
    """
    descending = np.append(np.sort(values)[::-1], 0).astype(np.float64)
    ends = np.arange(len(descending))
    from_to = np.where(ends >= ends[:, None], (ends - ends[:, None]) * descending[:, None], np.inf)
    best = from_to[0]
    for _ in range(ranks - 1):
        best = np.maximum(best[:, None], from_to).min(axis=0)
    return float(best[-1])
