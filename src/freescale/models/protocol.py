"""What a model has to be for the trainer: bring your own by writing these three methods.

A step goes `prepare` -> the rows of `Inputs.ids` are fetched -> `forward`. `prepare` looks at the batch alone, so it
can run while the step before it is still computing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor

from freescale.data.batch import Batch


@dataclass(frozen=True)
class Rows:
    """Embedding rows that a batch needs: each distinct one once, and where the ids that were asked for find theirs."""

    values: Tensor
    """[distinct ids, dim]"""
    index: Tensor
    """Of the shape of the ids that were asked for."""

    def each(self) -> Tensor:
        """One row for every id that was asked for."""
        return F.embedding(self.index, self.values)  # whose gradient has one order, on any number of threads


class Inputs(Protocol):
    """A batch, ready for its forward pass."""

    @property
    def ids(self) -> Mapping[str, Tensor]:
        """For each table, the ids whose rows `forward` reads: any shape, duplicates welcome."""

    @property
    def count(self) -> int:
        """How many terms the loss has: the divisor, once added up over all ranks."""


class Model(Protocol):
    """An nn.Module that the trainer can train."""

    @property
    def tables(self) -> Mapping[str, tuple[int, int]]:
        """Rows and width of every embedding table that it reads."""

    def prepare(self, batch: Batch) -> Inputs:
        """Lay out a batch, which may be empty. Anything random must be keyed by sample (see `keyed`)."""

    def __call__(self, inputs: Any, rows: Mapping[str, Rows]) -> Tensor:
        """Give the *sum* of the losses of a batch; it is divided by the count of all ranks afterwards."""
