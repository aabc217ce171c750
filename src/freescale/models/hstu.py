"""HSTU: blocks of pointwise attention with relative position and time bias, gated output."""

import torch
import torch.nn.functional as F  # noqa: N812  the name that everyone knows
from torch import Tensor, nn

from freescale.config import ModelConfig
from freescale.models.attention import hstu_attention
from freescale.models.keyed import Keys
from freescale.models.sequence import Layout

_TIME_BUCKETS = 128
_LOG_STEP = 0.301  # buckets grow by a factor of about 1.35


class RelativeBias(nn.Module):
    """What is added to a score for the distance of two events in positions and in time."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(longest).normal_(std=0.02))
        self.time = nn.Parameter(torch.empty(_TIME_BUCKETS + 1).normal_(std=0.02))

    def forward(self, distance: Tensor, query_time: Tensor, key_time: Tensor) -> Tensor:
        """Look up the bias of every pair; pairs that are masked anyway may be anything."""
        apart = (query_time - key_time).abs().clamp(min=1).to(self.time.dtype)
        bucket = (apart.log() / _LOG_STEP).long().clamp(max=_TIME_BUCKETS)
        return self.position[distance.clamp(0, len(self.position) - 1)] + self.time[bucket]


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: ModelConfig, longest: int, dropout: float, salt: int) -> None:
        super().__init__()
        self._heads, self._dropout, self._salt, self._longest = config.heads, dropout, salt, longest
        self.before = nn.LayerNorm(config.dim)
        self.uvqk = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.bias = RelativeBias(longest)
        self.after = nn.LayerNorm(config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, time: Tensor, layout: Layout, keys: Keys | None) -> Tensor:
        """Mix events of each sample; `keys` turn dropout on."""
        u, v, q, k = F.silu(self.uvqk(self.before(x))).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (self._heads, -1)) for part in (q, k, v))
        mixed = hstu_attention(q, k, v, time, layout, bias=self.bias, scale=float(self._longest))
        gated = u * self.after(mixed.flatten(1))
        if keys is not None:
            gated = keys.dropout(gated, self._dropout, salt=self._salt)
        return x + self.out(gated)


class HSTU(nn.Module):
    """Embedded events in, one vector per event out."""

    def __init__(self, config: ModelConfig, *, longest: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, longest, dropout, salt) for salt in range(config.layers))

    def forward(self, x: Tensor, time: Tensor, layout: Layout, keys: Keys | None = None) -> Tensor:
        """Encode packed events [tokens, dim] that happened at `time`."""
        for block in self.blocks:
            x = block(x, time, layout, keys)
        return x
