"""The encoders: HSTU and SASRec. They map embedded events to one vector per event."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn

from freescale.config import ModelConfig
from freescale.errors import UsageError
from freescale.models.attention.operators import hstu_attention, softmax_attention
from freescale.models.jagged import TIME_BUCKETS, BiasTables, JaggedLayout
from freescale.models.keyed import Keys
from freescale.models.plain_layout import PlainLayout
from freescale.visibility import Visibility


class InputEmbedding(nn.Module):
    """Scales embedded events, adds learned positions and applies dropout."""

    def __init__(self, config: ModelConfig, max_seq_len: int) -> None:
        super().__init__()
        self._scale, self._dropout = config.dim**0.5, config.dropout
        self.position = nn.Parameter(torch.empty(max_seq_len, config.dim).normal_(std=config.dim**-0.5))
        self._memory = config.memory
        if config.memory == "segments":
            self.summary = nn.Parameter(torch.empty(config.summaries, config.dim).normal_(std=config.dim**-0.5))

    def forward(self, x: Tensor, layout: JaggedLayout | PlainLayout, keys: Keys | None) -> Tensor:
        """Embed packed events [tokens, dim], 0 at summary tokens, which are embedded here. `keys` enable dropout."""
        x = x * self._scale + F.embedding(layout.limits, self.position)
        self._check(layout.visibility)
        if isinstance(layout, JaggedLayout):
            if layout.summaries is not None:
                tokens, place = layout.summaries
                x = x.index_add(0, tokens, F.embedding(place, self.summary).to(x.dtype))
        elif layout.summary_place is not None and self._memory == "segments":
            of_summaries = F.embedding(layout.summary_place.clamp(min=0), self.summary)
            x = x + torch.where(layout.summary_place[:, None] >= 0, of_summaries, 0.0)
        return x if keys is None else keys.dropout(x, self._dropout, salt=0)

    def _check(self, rule: Visibility | None) -> None:
        """Refuse a layout with another rule than that of the model."""
        given = "full" if rule is None else "segments" if rule.segment else "local"
        if given != self._memory:
            what = f"the model was built for model.memory = {self._memory}, but its batch is laid out for {given}"
            remedy = "give `visibility=Visibility.of_model(config.model, ...)` to TokenMap.from_batch"
            raise UsageError(what, remedy=remedy)


class Encoder(nn.Module):
    """An input embedding, a stack of blocks and a final module."""

    def __init__(self, config: ModelConfig, max_seq_len: int, blocks: Iterable[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.last = InputEmbedding(config, max_seq_len), nn.ModuleList(blocks), last

    def forward(self, x: Tensor, layout: JaggedLayout | PlainLayout, keys: Keys | None = None) -> Tensor:
        """Encode packed events [tokens, dim]."""
        x = self.stem(x, layout, keys)
        for block in self.blocks:
            x = block(x, layout, keys)
        return self.last(x)


class RelativeBias(nn.Module):
    """Learned biases for the distance of two events in positions and in time."""

    def __init__(self, max_seq_len: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(max_seq_len).normal_(std=0.02))
        self.time = nn.Parameter(torch.empty(TIME_BUCKETS).normal_(std=0.02))

    def forward(self) -> BiasTables:
        """Return the tables; attention adds them to its scores."""
        return BiasTables(self.position, self.time)


class HSTUBlock(nn.Module):
    """One HSTU layer: pointwise attention with relative biases and a gated output."""

    def __init__(self, config: ModelConfig, max_seq_len: int, salt: int) -> None:
        super().__init__()
        self._heads, self._dropout, self._salt, self._max_seq_len = config.heads, config.dropout, salt, max_seq_len
        self.before = nn.LayerNorm(config.dim)
        self.uvqk = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.bias = RelativeBias(max_seq_len)
        self.after = nn.LayerNorm(config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, layout: JaggedLayout | PlainLayout, keys: Keys | None) -> Tensor:
        """Mix the events of each sample. `keys` enable dropout."""
        u, v, q, k = F.silu(self.uvqk(self.before(x))).chunk(4, dim=-1)
        q, k, v = (part.unflatten(-1, (self._heads, -1)) for part in (q, k, v))
        mixed = hstu_attention(q, k, v, layout, bias=self.bias(), scale=float(self._max_seq_len))
        gated = u * self.after(mixed.flatten(1))
        if keys is not None:
            gated = keys.dropout(gated, self._dropout, salt=self._salt)
        return x + self.out(gated)


class HSTU(Encoder):
    """Blocks of pointwise attention."""

    def __init__(self, config: ModelConfig, *, max_seq_len: int) -> None:
        blocks = (HSTUBlock(config, max_seq_len, salt) for salt in range(1, config.layers + 1))
        super().__init__(config, max_seq_len, blocks, nn.Identity())


class SASRecBlock(nn.Module):
    """One SASRec layer: softmax attention on normalized queries, then a feed-forward network."""

    def __init__(self, config: ModelConfig, salt: int) -> None:
        super().__init__()
        self._heads, self._dropout, self._salt = config.heads, config.dropout, 4 * salt
        self.before = nn.LayerNorm(config.dim)
        self.q, self.k, self.v, self.out = (nn.Linear(config.dim, config.dim) for _ in range(4))
        self.between = nn.LayerNorm(config.dim)
        self.widen, self.narrow = nn.Linear(config.dim, config.dim), nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, layout: JaggedLayout | PlainLayout, keys: Keys | None) -> Tensor:
        """Mix the events of each sample. `keys` enable dropout."""

        def dropout(y: Tensor, site: int) -> Tensor:
            return y if keys is None else keys.dropout(y, self._dropout, salt=self._salt + site)

        normed = self.before(x)
        q, k, v = (part.unflatten(-1, (self._heads, -1)) for part in (self.q(normed), self.k(x), self.v(x)))
        x = normed + dropout(self.out(softmax_attention(q, k, v, layout).flatten(1)), 0)
        x = self.between(x)
        hidden = dropout(self.widen(x).relu(), 1)
        return x + dropout(self.narrow(hidden), 2)


class SASRec(Encoder):
    """Blocks of softmax attention, normalized at the end."""

    def __init__(self, config: ModelConfig, *, max_seq_len: int) -> None:
        blocks = (SASRecBlock(config, salt) for salt in range(1, config.layers + 1))
        super().__init__(config, max_seq_len, blocks, nn.LayerNorm(config.dim))


def build_encoder(config: ModelConfig, *, max_seq_len: int) -> nn.Module:
    """Build the encoder of a config for samples of up to `max_seq_len` tokens."""
    return {"hstu": HSTU, "sasrec": SASRec}[config.kind](config, max_seq_len=max_seq_len)
