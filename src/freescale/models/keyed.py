"""Randomness that follows a sample wherever it is computed.

Dropout masks and negatives are hashes of (seed, step, sample id, position), never draws from a generator: which rank
holds a sample, and next to which others, cannot change them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.models.sequence import Layout

_WEYL, _M1, _M2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64, as signed integers


@dataclass(frozen=True)
class Keys:
    """One 64-bit key per token of a batch."""

    token: Tensor

    @staticmethod
    def of(layout: Layout, sample_id: Tensor, *, seed: int, step: int) -> "Keys":
        """Give every token its key: where its sample is computed has no part in it."""
        run = hashed(torch.tensor([seed], device=sample_id.device)) ^ step
        sample = hashed(sample_id ^ hashed(run))
        return Keys(hashed(sample.repeat_interleave(layout.lengths) + layout.position))

    def dropout(self, x: Tensor, p: float, *, salt: int) -> Tensor:
        """Drop elements of [tokens, width]. `salt` tells the places of a model apart."""
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout is {p}, but must be at least 0 and below 1")
        if p == 0.0:
            return x
        threshold = min(round(p * 0x10000), 0xFFFF)  # a kept share of 0 would divide by zero
        words = hashed(self.token[:, None] ^ _lane(salt, -(-x.shape[1] // 4), x.device))
        uniform = torch.stack([words >> shift & 0xFFFF for shift in (0, 16, 32, 48)], dim=-1)
        kept = uniform.flatten(1)[:, : x.shape[1]] >= threshold  # four elements share a hash
        return x * kept / (1.0 - threshold / 0x10000)

    def integers(self, count: int, below: int, *, salt: int) -> Tensor:
        """Draw `count` integers in [0, below) for every token."""
        words = hashed(self.token[:, None] ^ _lane(salt, count, self.token.device))
        return (words & 0x7FFFFFFFFFFFFFFF) % below


def hashed(z: Tensor) -> Tensor:
    """Hash 64 bits to 64 bits, element by element (the finalizer of splitmix64)."""
    z = z + _WEYL
    z = (z ^ _shifted(z, 30)) * _M1
    z = (z ^ _shifted(z, 27)) * _M2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return z >> bits & ((1 << (64 - bits)) - 1)


def _lane(salt: int, count: int, device: torch.device) -> Tensor:
    return hashed(torch.arange(count, device=device) + (salt << 32))
