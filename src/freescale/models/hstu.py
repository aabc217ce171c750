"""HSTU: blocks of pointwise attention with relative position and time bias, gated output."""

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor, nn

from freescale.config import ModelConfig
from freescale.models.attention.operators import hstu_attention
from freescale.models.keyed import Keys
from freescale.models.sequence import TIME_BUCKETS, Bias, Layout
from freescale.models.stem import Encoder


class RelativeBias(nn.Module):
    """What is added to a score for the distance of two events in positions and in time."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(longest).normal_(std=0.02))
        self.time = nn.Parameter(torch.empty(TIME_BUCKETS).normal_(std=0.02))

    def forward(self) -> Bias:
        """Give the amounts to attention, which adds them."""
        return Bias(self.position, self.time)


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, longest: int, salt: int) -> None:
        super().__init__()
        self._heads, self._dropout, self._salt, self._longest = config.heads, config.dropout, salt, longest
        self.before = nn.LayerNorm(config.dim)
        self.uvqk = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.bias = RelativeBias(longest)
        self.after = nn.LayerNorm(config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, layout: Layout, keys: Keys | None) -> Tensor:
        """Mix events of each sample; `keys` turn dropout on."""
        u, v, q, k = F.silu(self.uvqk(self.before(x))).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (self._heads, -1)) for part in (q, k, v))
        mixed = hstu_attention(q, k, v, layout, bias=self.bias(), scale=float(self._longest))
        gated = u * self.after(mixed.flatten(1))
        if keys is not None:
            gated = keys.dropout(gated, self._dropout, salt=self._salt)
        return x + self.out(gated)


class HSTU(Encoder):
    """Layers of pointwise attention."""

    def __init__(self, config: ModelConfig, *, longest: int) -> None:
        blocks = (Block(config, longest, salt) for salt in range(1, config.layers + 1))
        super().__init__(config, longest, blocks, nn.Identity())
