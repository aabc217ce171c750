"""The interface of a model that the trainer can train. A custom model implements these three methods.

A step calls `prepare`, fetches the rows of `Inputs.ids`, then calls `forward`. `prepare` reads only the batch, so it
can run while the previous step is still computing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale.data.batch import Batch


@dataclass(frozen=True)
class Rows:
    """Embedding rows of a batch: each distinct row once, and the row of every requested id."""

    values: Tensor
    """[distinct ids, dim]"""
    index: Tensor
    """Row of `values` for every requested id, in the shape of the ids."""

    def lookup(self) -> Tensor:
        """Return one row for every requested id."""
        return F.embedding(self.index, self.values)  # its gradient has one order, on any number of threads


class Inputs(Protocol):
    """A batch that is ready for its forward pass."""

    @property
    def ids(self) -> Mapping[str, Tensor]:
        """For each table, the ids whose rows `forward` reads. Any shape; duplicates are allowed."""

    @property
    def count(self) -> int:
        """Number of loss terms. Its sum over all ranks divides the loss."""


class Model(Protocol):
    """An nn.Module that the trainer can train."""

    @property
    def tables(self) -> Mapping[str, tuple[int, int]]:
        """Number of rows and width of every embedding table."""

    def prepare(self, batch: Batch) -> Inputs:
        """Lay out a batch, which may be empty. Anything random must be keyed by sample (see `keyed`)."""

    def __call__(self, inputs: Any, rows: Mapping[str, Rows]) -> Tensor:
        """Return the *sum* of the losses of a batch. The trainer divides it by the count of all ranks."""
