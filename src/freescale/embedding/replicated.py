"""Small tables of which every rank holds a copy: ordinary parameters, trained with the dense model. Nothing travels."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from freescale.embedding.tables import Table


class ReplicatedTables(nn.Module):
    """Whole tables as parameters."""

    def __init__(self, tables: Sequence[Table], *, seed: int, deviation: float) -> None:
        super().__init__()
        self.weights = nn.ParameterDict()
        for table in tables:
            weight = torch.empty(table.rows, table.dim)
            table.fill(weight, 0, seed=seed, deviation=deviation)
            self.weights[table.name] = nn.Parameter(weight)

    def forward(self, unique: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows of distinct ids."""
        return {name: self.weights[name][ids] for name, ids in unique.items()}
