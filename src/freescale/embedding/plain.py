"""Own rows as plain torch tensors: slow, any precision, every line readable. What `fused` must agree with."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from freescale.config import TablesConfig
from freescale.embedding.tables import Table
from freescale.embedding.unique import deduplicate


class PlainShard:
    """Rows and their optimizer, in torch."""

    def __init__(
        self, tables: Sequence[Table], config: TablesConfig, *, rank: int, ranks: int, dtype: torch.dtype
    ) -> None:
        self._config = config
        owned = {table.name: len(table.owned(rank, ranks)) for table in tables}
        self._weights = {t.name: torch.zeros(owned[t.name], t.dim, dtype=dtype) for t in tables}
        width = {"rowwise_adagrad": lambda _: 1, "adagrad": lambda t: t.dim, "sgd": lambda _: 0}[config.optimizer]
        self._sums = {t.name: torch.zeros(owned[t.name], width(t), dtype=dtype) for t in tables}

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows."""
        return {name: self._weights[name][rows] for name, rows in local.items()}

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """One change per row, from the sum of its gradients."""
        for name, gradient in gradients.items():
            weight, sums = self._weights[name], self._sums[name]
            rows, index = deduplicate(local[name], rows=len(weight))
            total = weight.new_zeros(len(rows), weight.shape[1]).index_add(0, index, gradient)
            if self._config.optimizer == "sgd":
                weight[rows] -= lr[name] * total
                continue
            square = total.square()
            sums[rows] += square if self._config.optimizer == "adagrad" else square.mean(1, keepdim=True)
            weight[rows] -= lr[name] * total / (sums[rows].sqrt() + self._config.eps)

    def state(self) -> dict[str, Tensor]:
        """Weights and sums of squares."""
        return self._weights | {f"{name}.sum": sums for name, sums in self._sums.items() if sums.shape[1]}
