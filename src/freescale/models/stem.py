"""What every encoder has in common: what it does first, and its layers one after another."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor, nn

from freescale.config import ModelConfig
from freescale.models.keyed import Keys
from freescale.models.sequence import Layout


class Stem(nn.Module):
    """Embedded events are scaled, told their place by learned positions, and thinned out."""

    def __init__(self, config: ModelConfig, longest: int) -> None:
        super().__init__()
        self._scale, self._dropout = config.dim**0.5, config.dropout
        self.position = nn.Parameter(torch.empty(longest, config.dim).normal_(std=config.dim**-0.5))

    def forward(self, x: Tensor, layout: Layout, keys: Keys | None) -> Tensor:
        """Prepare packed events [tokens, dim]; `keys` turn dropout on."""
        x = x * self._scale + F.embedding(layout.place, self.position)
        return x if keys is None else keys.dropout(x, self._dropout, salt=0)


class Encoder(nn.Module):
    """Embedded events in, one vector per event out."""

    def __init__(self, config: ModelConfig, longest: int, blocks: Iterable[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.last = Stem(config, longest), nn.ModuleList(blocks), last

    def forward(self, x: Tensor, layout: Layout, keys: Keys | None = None) -> Tensor:
        """Encode packed events [tokens, dim]."""
        x = self.stem(x, layout, keys)
        for block in self.blocks:
            x = block(x, layout, keys)
        return self.last(x)
