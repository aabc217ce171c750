"""Counter-based randomness that does not depend on the placement of samples.

Dropout masks and negatives are hashes of (seed, step, sample id, position), not draws from a generator. The rank that
computes a sample, and the other samples of its batch, cannot change them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from freescale.hashing import splitmix64
from freescale.models.jagged import JaggedLayout


@dataclass(frozen=True)
class Keys:
    """One 64-bit key per token of a batch."""

    token: Tensor

    @staticmethod
    def from_layout(layout: JaggedLayout, sample_id: Tensor, *, seed: int, step: int) -> "Keys":
        """Derive the key of every token from seed, step, sample id and position.

        A candidate has the key that it would have in a separate sample, whose history ends at its anchor.
        """
        run = splitmix64(torch.tensor([seed], device=sample_id.device)) ^ step
        sample = splitmix64(sample_id ^ splitmix64(run))
        return Keys(splitmix64(sample.repeat_interleave(layout.lengths) + layout.key_position))

    def dropout(self, x: Tensor, p: float, *, salt: int) -> Tensor:
        """Drop elements of [tokens, width] with probability `p`. `salt` separates the dropout sites of a model."""
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout probability is {p}, but must be at least 0 and below 1")
        if p == 0.0:
            return x
        threshold = min(round(p * 0x10000), 0xFFFF)  # at 0x10000 the scale below would divide by zero
        words = splitmix64(self.token[:, None] ^ _lanes(salt, -(-x.shape[1] // 4), x.device))
        uniform = torch.stack([words >> shift & 0xFFFF for shift in (0, 16, 32, 48)], dim=-1)
        kept = uniform.flatten(1)[:, : x.shape[1]] >= threshold  # four elements share a hash
        return x * kept / (1.0 - threshold / 0x10000)

    def randint(self, count: int, high: int, *, salt: int) -> Tensor:
        """Draw `count` integers in [0, high) for every token."""
        words = splitmix64(self.token[:, None] ^ _lanes(salt, count, self.token.device))
        return (words & 0x7FFFFFFFFFFFFFFF) % high


def _lanes(salt: int, count: int, device: torch.device) -> Tensor:
    return splitmix64(torch.arange(count, device=device) + (salt << 32))
