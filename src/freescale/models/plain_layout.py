"""Attention in plain torch operators, for serving: padded histories, and candidates that read their keys and values.

The encoders call attention with a layout. Given one of these, the same modules can be traced by `torch.export`: shapes
are ordinary dynamic sizes, and no operator of this package is left. Work is linear in the number of candidates, and
the keys and values of a history can be kept for later candidates, and with a rule of visibility for later events.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor

from freescale.models.jagged import CELL_SHIFT, BiasTables, EventTimes, is_visible
from freescale.visibility import Visibility


class PlainLayout(Protocol):
    """A layout that computes attention itself. Packed tensors are [samples * columns, heads, width]."""

    limits: Tensor
    """Position of each token: [samples * columns]."""
    visibility: Visibility | None
    """The rule of the model. None: a token sees all earlier ones."""
    summary_place: Tensor | None
    """The place of each summary token among those of its segment, -1 for other tokens: [samples * columns]."""

    def hstu(self, q: Tensor, k: Tensor, v: Tensor, bias: BiasTables, scale: float) -> Tensor:
        """Pointwise attention."""
        ...

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scaled dot-product attention."""
        ...


class PlainHistories:
    """Histories padded to [samples, columns]. A token sees itself and the earlier ones."""

    visibility: Visibility | None = None
    summary_place: Tensor | None = None

    def __init__(self, times: EventTimes, *, buckets: Tensor) -> None:
        """`buckets`: see `jagged.time_bucket_table`. What follows the end of a history does not change it."""
        self._samples, self._columns = times.event.shape
        self._position = torch.arange(self._columns, device=times.event.device)
        self.times, self._buckets = times, buckets
        self.limits = self._position.expand(self._samples, -1).reshape(-1)
        self.kept: list[Tensor] = []
        """Keys and values of each layer so far: [samples * heads, columns, width] each."""

    def hstu(self, q: Tensor, k: Tensor, v: Tensor, bias: BiasTables, scale: float) -> Tensor:
        """Pointwise attention."""
        q, k, v = self._keep(q, k, v)
        distance = (self._position[:, None] - self._position).clamp(min=0)
        interval = self.times.query[:, :, None] - self.times.event[:, None, :]
        added = bias.position[distance] + bias.time[_time_bucket(interval, self._buckets)]
        score = torch.bmm(q, k.mT).unflatten(0, (self._samples, -1))
        weights = F.silu(score + added[:, None]) * self._seen() / scale
        return _pack(torch.bmm(weights.flatten(0, 1), v), self._samples)

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scaled dot-product attention."""
        return _pack(F.scaled_dot_product_attention(*self._keep(q, k, v), attn_mask=self._seen()), self._samples)

    def _keep(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_pad(x, self._samples, self._columns) for x in (q, k, v))
        self.kept += [k, v]
        return q, k, v

    def _seen(self) -> Tensor:
        return self._position <= self._position[:, None]


class KeptTokens(NamedTuple):
    """What is kept of histories."""

    position: Tensor
    """[samples, kept]; -1 is padding."""
    time: Tensor
    """[samples, kept]"""
    values: Tensor
    """Keys and values, layer after layer: [samples, heads, kept, layers * 2 * width]."""

    def of_layer(self, layer: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer: [samples * heads, kept, width]."""
        keys, values = self.values.flatten(0, 1)[..., 2 * layer * width : 2 * (layer + 1) * width].chunk(2, dim=-1)
        return keys, values


class PlainAppended:
    """New tokens [samples, columns] of histories of which what later tokens see is kept."""

    def __init__(
        self, position: Tensor, times: EventTimes, kept: KeptTokens, *, rule: Visibility, buckets: Tensor
    ) -> None:
        """`position`, `times`: of the new tokens [samples, columns]; position -1 is padding."""
        self._samples, self._columns, self._earlier, self._layer = *position.shape, kept, 0
        self.visibility, self.limits = rule, position.clamp(min=0).reshape(-1)
        far = rule.far
        place = torch.where(rule.is_summary(position), (position - far.head) % far.period - far.segment, -1)
        self.summary_place = place.reshape(-1)
        self.key_position = torch.cat([kept.position, position], dim=1)
        self.key_time = torch.cat([kept.time, times.event], dim=1)
        query, key = position[:, :, None], self.key_position[:, None]
        # Padding sees padding, so that it has finite values, which nothing else sees.
        sees = is_visible(query, key, query, rule.begins(query, query), far) & (key >= 0)
        self._seen = (sees | (key == query))[:, None]
        self._distance = (query - key.clamp(min=0)).clamp(min=0)
        self._bucket = _time_bucket(times.query[:, :, None] - self.key_time[:, None], buckets)
        self.kept: list[Tensor] = []
        """Keys and values of each layer so far, the earlier ones first: [samples * heads, kept + columns, width]."""

    def hstu(self, q: Tensor, k: Tensor, v: Tensor, bias: BiasTables, scale: float) -> Tensor:
        """Pointwise attention."""
        q, k, v = self._extend(q, k, v)
        added = bias.position[self._distance] + bias.time[self._bucket]
        score = torch.bmm(q, k.mT).unflatten(0, (self._samples, -1))
        weights = F.silu(score + added[:, None]) * self._seen / scale
        return _pack(torch.bmm(weights.flatten(0, 1), v), self._samples)

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scaled dot-product attention."""
        q, k, v = self._extend(q, k, v)
        score = torch.bmm(q / q.shape[-1] ** 0.5, k.mT).unflatten(0, (self._samples, -1))
        weights = score.masked_fill(~self._seen, float("-inf")).softmax(-1)
        return _pack(torch.bmm(weights.flatten(0, 1), v), self._samples)

    def _extend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_pad(x, self._samples, self._columns) for x in (q, k, v))
        earlier = self._earlier.of_layer(self._layer, q.shape[-1])
        self._layer += 1
        k, v = (torch.cat([before, new], dim=1) for before, new in zip(earlier, (k, v), strict=True))
        self.kept += [k, v]
        return q, k, v


class PlainCandidates:
    """Candidates [samples, columns] after histories of these lengths. A candidate sees what is kept, and itself."""

    summary_place: Tensor | None = None

    def __init__(
        self,
        lengths: Tensor,
        time: Tensor,
        kept: KeptTokens,
        *,
        columns: int,
        buckets: Tensor,
        rule: Visibility | None = None,
    ) -> None:
        """`time`: the query time of each sample [samples]."""
        self._samples, self._columns, self._kept, self._layer = lengths.shape[0], columns, kept, 0
        self.visibility = rule
        self._distance = (lengths[:, None] - kept.position.clamp(min=0)).clamp(min=0)
        self._seen = ((kept.position >= 0) & (kept.position < lengths[:, None]))[:, None, None, :]
        self._bucket = _time_bucket(time[:, None] - kept.time, buckets)
        self.limits = lengths[:, None].expand(-1, columns).reshape(-1)

    def hstu(self, q: Tensor, k: Tensor, v: Tensor, bias: BiasTables, scale: float) -> Tensor:
        """Pointwise attention."""
        score, values = self._scores(q)
        added = (bias.position[self._distance] + bias.time[self._bucket])[:, None, None, :]
        weights = F.silu(score + added) * self._seen
        history = _pack(torch.bmm(weights.flatten(0, 1), values), self._samples)
        own = F.silu((q * k).sum(-1, keepdim=True) + bias.position[0] + bias.time[0]) * v
        return (history + own) / scale

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scaled dot-product attention."""
        score, values = self._scores(q / q.shape[-1] ** 0.5)
        own = _pad((q * k).sum(-1, keepdim=True) / q.shape[-1] ** 0.5, self._samples, self._columns)
        score = score.masked_fill(~self._seen, float("-inf")).flatten(0, 1)
        weights = torch.cat([score, own], dim=-1).softmax(-1)
        mixed = torch.bmm(weights[..., :-1], values) + weights[..., -1:] * _pad(v, self._samples, self._columns)
        return _pack(mixed, self._samples)

    def _scores(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the history of this layer, [samples, heads, columns, events], and its values."""
        keys, values = self._kept.of_layer(self._layer, q.shape[-1])
        self._layer += 1
        score = torch.bmm(_pad(q, self._samples, self._columns), keys.mT)
        return score.unflatten(0, (self._samples, -1)), values


def _time_bucket(interval: Tensor, buckets: Tensor) -> Tensor:
    """Return the buckets of intervals. Exact by way of fp64; Inductor miscompiles the bits of a converted integer."""
    return buckets[interval.double().float().abs().view(torch.int32) >> CELL_SHIFT]


def _pad(packed: Tensor, samples: int, columns: int) -> Tensor:
    """Return [samples * columns, heads, width] as [samples * heads, columns, width]."""
    return packed.unflatten(0, (samples, columns)).transpose(1, 2).flatten(0, 1).contiguous()


def _pack(padded: Tensor, samples: int) -> Tensor:
    return padded.unflatten(0, (samples, -1)).transpose(1, 2).flatten(0, 1)
