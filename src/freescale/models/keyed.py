"""Counter-based randomness that does not depend on the placement of samples.

Dropout masks and negatives are hashes of (seed, step, sample id, position), not draws from a generator. The rank that
computes a sample, and the other samples of its batch, cannot change them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freescale.hashing import splitmix64
from freescale.kernel_selection import uses_kernels
from freescale.models.jagged import JaggedLayout

_SIGN_BITS = -0x7FFF7FFF7FFF8000
"""The highest bit of each 16 bits."""


@dataclass(frozen=True)
class Keys:
    """One 64-bit key per token of a batch."""

    token: Tensor

    @staticmethod
    def from_layout(layout: JaggedLayout, sample_id: Tensor, *, seed: int, step: int) -> "Keys":
        """Derive the key of every token from seed, step, sample id and position.

        A candidate has the key that it would have in a separate sample, whose history ends at its anchor.
        """
        run = hash_keys(torch.tensor(seed)) ^ step  # on the host
        sample = hash_keys(sample_id ^ int(hash_keys(run)))
        return Keys(hash_keys(sample.repeat_interleave(layout.lengths) + layout.key_position))

    def dropout(self, x: Tensor, p: float, *, salt: int) -> Tensor:
        """Drop elements of [tokens, width] with probability `p`. `salt` separates the dropout sites of a model."""
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout probability is {p}, but must be at least 0 and below 1")
        if p == 0.0:
            return x
        threshold = min(round(p * 0x10000), 0xFFFF)  # at 0x10000 the scale below would divide by zero
        if uses_kernels(x, "dropout"):
            return _KernelDropout.apply(x, self.token, salt, threshold)
        return x * kept_elements(self.token, x.shape[1], salt=salt, threshold=threshold) / (1.0 - threshold / 0x10000)

    def randint(self, count: int, high: int, *, salt: int) -> Tensor:
        """Draw `count` integers in [0, high) for every token."""
        words = hash_keys(self.token[:, None] ^ _lanes(salt, count, self.token.device))
        return (words & 0x7FFFFFFFFFFFFFFF) % high


class _KernelDropout(torch.autograd.Function):
    """Dropout by one kernel forward and one backward, which computes the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_keys: Tensor, salt: int, threshold: int) -> Tensor:  # pyrefly: ignore[bad-override]
        from freescale.models import fused_launch

        ctx.save_for_backward(token_keys)
        ctx.site = {"salt": salt, "threshold": threshold}
        return fused_launch.dropout(x, token_keys, **ctx.site)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from freescale.models import fused_launch

        (token_keys,) = ctx.saved_tensors
        return fused_launch.dropout(gradients[0], token_keys, **ctx.site), None, None, None


def kept_elements(token_keys: Tensor, width: int, *, salt: int, threshold: int) -> Tensor:
    """Return which elements of [tokens, width] dropout keeps: those whose 16 bits of a hash reach `threshold`."""
    words = hash_keys(token_keys[:, None] ^ _lanes(salt, -(-width // 4), token_keys.device))
    # Four elements share a hash. A flipped highest bit lets signed integers compare as unsigned ones.
    signed = words.bitwise_xor_(_SIGN_BITS).view(torch.int16)
    return signed[:, :width] >= threshold - 0x8000


def hash_keys(z: Tensor) -> Tensor:
    """Hash 64 bits to 64 bits, element by element: splitmix64, on a GPU by one kernel."""
    if uses_kernels(z, "keyed randomness"):
        from freescale.models import fused_launch

        return fused_launch.splitmix64(z)
    return splitmix64(z)


def _lanes(salt: int, count: int, device: torch.device) -> Tensor:
    return hash_keys(torch.arange(count, device=device) + (salt << 32))
