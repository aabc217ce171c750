"""Own rows as torch tensors, their optimizer in a few readable lines, any precision. What `fused` must agree with."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from freescale.config import TablesConfig
from freescale.embedding.tables import Table
from freescale.embedding.unique import deduplicate


class PlainShard:
    """Rows and their optimizer, in torch. `state`: as it lives; whoever made it may keep it elsewhere too."""

    def __init__(self, state: Mapping[str, Tensor], config: TablesConfig) -> None:
        self._state, self._config = dict(state), config

    def look_up(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read rows."""
        return {name: self._state[name].index_select(0, rows) for name, rows in local.items()}

    def update(self, local: dict[str, Tensor], gradients: dict[str, Tensor], *, lr: Mapping[str, float]) -> None:
        """One change per row, from the sum of its gradients."""
        for name, gradient in gradients.items():
            weight = self._state[name]
            rows, index = deduplicate(local[name], rows=len(weight))
            total = weight.new_zeros(len(rows), weight.shape[1]).index_add_(0, index, gradient)
            weight.index_add_(0, rows, total.mul_(self._rate(name, rows, total, lr[name])), alpha=-1)

    def _rate(self, name: str, rows: Tensor, total: Tensor, lr: float) -> Tensor | float:
        """By what each number of a change is multiplied, after its square was counted."""
        if self._config.optimizer == "sgd":
            return lr
        square = total.square()
        if self._config.optimizer == "rowwise_adagrad":
            square = square.mean(1, keepdim=True)
        sums = self._state[f"{name}.sum"].view(-1, square.shape[1])
        sums.index_add_(0, rows, square)
        return lr / sums.index_select(0, rows).sqrt_().add_(self._config.eps)

    def state(self) -> dict[str, Tensor]:
        """Weights and sums of squares."""
        return dict(self._state)


def plain_shard(
    tables: Sequence[Table], config: TablesConfig, *, rank: int, world_size: int, dtype: torch.dtype
) -> PlainShard:
    """Allocate the own rows of tables."""
    owned = {table.name: len(table.owned(rank, world_size)) for table in tables}
    state = {table.name: torch.zeros(owned[table.name], table.dim, dtype=dtype) for table in tables}
    if config.optimizer != "sgd":
        width = {table.name: table.dim if config.optimizer == "adagrad" else 1 for table in tables}
        state |= {f"{name}.sum": torch.zeros(rows, width[name], dtype=dtype) for name, rows in owned.items()}
    return PlainShard(state, config)
