"""Each id once, before it is looked up or sent. Pure."""

from typing import NamedTuple

import torch
from torch import Tensor

_DENSE = 4  # a mark per row of the table is cheaper than sorting while the table has at most so many rows per id


class Wanted(NamedTuple):
    """The rows that a batch needs of one table."""

    unique: Tensor
    """Ascending."""
    index: Tensor
    """Where each id that was asked for stands in `unique`; of the shape of those ids."""


def deduplicate(ids: Tensor, *, rows: int) -> Wanted:
    """Find the distinct ids of a table with so many rows."""
    if rows > _DENSE * ids.numel():
        return Wanted(*torch.unique(ids, return_inverse=True))
    place = torch.zeros(rows, dtype=torch.int64, device=ids.device)
    place[ids] = 1
    unique = place.nonzero()[:, 0]
    return Wanted(unique, (place.cumsum(0) - 1)[ids])
