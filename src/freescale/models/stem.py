"""What every encoder does first: embedded events are scaled, told their place, and thinned out."""

import torch
from torch import Tensor, nn

from freescale.config import ModelConfig
from freescale.models.keyed import Keys
from freescale.models.sequence import Layout


class Stem(nn.Module):
    """Learned positions under the embeddings."""

    def __init__(self, config: ModelConfig, longest: int) -> None:
        super().__init__()
        self._scale, self._dropout = config.dim**0.5, config.dropout
        self.position = nn.Parameter(torch.empty(longest, config.dim).normal_(std=config.dim**-0.5))

    def forward(self, x: Tensor, layout: Layout, keys: Keys | None) -> Tensor:
        """Prepare packed events [tokens, dim]; `keys` turn dropout on."""
        x = x * self._scale + self.position[layout.place]
        return x if keys is None else keys.dropout(x, self._dropout, salt=0)
