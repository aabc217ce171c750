"""Sums of rows by index with one order of additions, on any device and any number of threads.

On a GPU torch adds floats of the same row by atomics, in any order, so a repeated run would differ in rounding.
"""

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor


def index_add_(into: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add `values[i]` to `into[index[i]]` for every i. The additions of each row have one fixed order."""
    if into.device.type == "cpu":
        return into.index_add_(0, index, values)
    order = index.argsort(stable=True)
    ends = torch.arange(len(into) + 1, device=index.device)
    offsets = torch.searchsorted(index[order], ends)
    return into.add_(torch.segment_reduce(values[order], "sum", offsets=offsets, unsafe=True))


def scatter_add_(into: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add `values[r, i]` to `into[r, index[r, i]]` for every r and i."""
    if into.device.type == "cpu":
        return into.scatter_add_(1, index, values)
    first = torch.arange(len(into), device=index.device)[:, None] * into.shape[1]
    index_add_(into.view(-1), (first + index).flatten(), values.flatten())
    return into


def sum_by_key(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys in ascending order, and for each the sum of all values with that key, added in their order.

    Nothing depends on the number of distinct keys, so the host does not wait for a device.
    """
    ordered, order = keys.sort(stable=True)
    number = F.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))[: len(keys)]
    offsets = torch.searchsorted(number, torch.arange(len(keys) + 1, device=keys.device))
    sums = torch.segment_reduce(values[order], "sum", offsets=offsets, axis=0, unsafe=True)
    return ordered, sums[number]
