"""Samples of like length as padded matrices, for attention by operators that know no jagged tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.models.sequence import Bucket, Times, buckets

_ROWS = 192  # queries that attend at a time: their scores stay in the second cache of a core


@dataclass(frozen=True)
class Matrix:
    """The samples of a bucket: [samples * heads, longest, width], in the type that is computed in."""

    bucket: Bucket
    heads: int
    q: Tensor
    k: Tensor
    v: Tensor
    times: Times | None
    """[samples, longest] as fp64: exact to 2^53, and quicker to subtract and to convert than integers."""

    @property
    def samples(self) -> int:
        """How many it holds."""
        return len(self.bucket.index)

    def get(self, packed: Tensor) -> Tensor:
        """Tokens [tokens, heads, width] as this matrix holds them; 0 where none stands."""
        padded = self.bucket.gather(packed)
        held = padded if self.bucket.only else padded.masked_fill(~self.bucket.valid[:, :, None, None], 0)
        return _by_head(held).to(self.q.dtype)

    def put(self, found: Tensor, packed: Tensor) -> None:
        """The other way round."""
        self.bucket.scatter(found.unflatten(0, (-1, self.heads)).transpose(1, 2), packed)

    def places(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Of the queries of a block [queries, 1], and of the keys that they may see."""
        place = torch.arange(rows.stop, device=self.q.device)
        return place[rows, None], place

    def rows(self) -> Iterator[slice]:
        """Queries that attend at a time; all that they see lies before the end of such a block."""
        for begin in range(0, self.bucket.longest, _ROWS):
            yield slice(begin, min(begin + _ROWS, self.bucket.longest))


class Room:
    """Memory that one block after another uses: fresh memory would cost as much time as what is computed in it."""

    def __init__(self) -> None:
        self._held = torch.empty(0)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of batches of matrices; overwritten by the next one."""
        shape = (len(a), a.shape[1], b.shape[2])
        if math.prod(shape) > len(self._held) or a.dtype != self._held.dtype:
            self._held = a.new_empty(math.prod(shape))
        return torch.bmm(a, b, out=self._held[: math.prod(shape)].view(shape))


def matrices(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, times: Times | None = None) -> Iterator[Matrix]:
    """All samples of a batch, from tokens [tokens, heads, width]."""
    kind = computed_in(q)
    for bucket in buckets(spans):
        when = times and Times(bucket.gather(times.event).double(), bucket.gather(times.asked).double())
        padded_q, padded_k, padded_v = (_by_head(bucket.gather(one)).to(kind) for one in (q, k, v))
        yield Matrix(bucket, q.shape[1], padded_q, padded_k, padded_v, when)


def computed_in(x: Tensor) -> torch.dtype:
    """Halves are added up as fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_head(padded: Tensor) -> Tensor:
    """[samples, places, heads, width] as [samples * heads, places, width]."""
    return padded.transpose(1, 2).flatten(0, 1)
