"""SASRec: a causal transformer over the events of a history, with learned positions."""

from torch import Tensor, nn

from freescale.config import ModelConfig
from freescale.models.attention.softmax import softmax_attention
from freescale.models.keyed import Keys
from freescale.models.sequence import Layout
from freescale.models.stem import Encoder


class Block(nn.Module):
    """One layer: attention on normalised queries, then two feed-forward layers."""

    def __init__(self, config: ModelConfig, salt: int) -> None:
        super().__init__()
        self._heads, self._dropout, self._salt = config.heads, config.dropout, 4 * salt
        self.before = nn.LayerNorm(config.dim)
        self.q, self.k, self.v, self.out = (nn.Linear(config.dim, config.dim) for _ in range(4))
        self.between = nn.LayerNorm(config.dim)
        self.widen, self.narrow = nn.Linear(config.dim, config.dim), nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, layout: Layout, keys: Keys | None) -> Tensor:
        """Mix events of each sample; `keys` turn dropout on."""

        def dropped(y: Tensor, place: int) -> Tensor:
            return y if keys is None else keys.dropout(y, self._dropout, salt=self._salt + place)

        normed = self.before(x)
        q, k, v = (part.unflatten(-1, (self._heads, -1)) for part in (self.q(normed), self.k(x), self.v(x)))
        x = normed + dropped(self.out(softmax_attention(q, k, v, layout).flatten(1)), 0)
        x = self.between(x)
        hidden = dropped(self.widen(x).relu(), 1)
        return x + dropped(self.narrow(hidden), 2)


class SASRec(Encoder):
    """Layers of softmax attention, normalised at the end."""

    def __init__(self, config: ModelConfig, *, longest: int) -> None:
        blocks = (Block(config, salt) for salt in range(1, config.layers + 1))
        super().__init__(config, longest, blocks, nn.LayerNorm(config.dim))
