"""The hashes of `hashing` in Triton kernels, bit for bit."""

import triton
import triton.language as tl

from freescale.hashing import MURMUR3, SPLITMIX64

_WEYL, _M1, _M2 = (tl.constexpr(constant & 0xFFFFFFFFFFFFFFFF) for constant in SPLITMIX64)
_C1, _C2, _F1, _F2 = (tl.constexpr(constant & 0xFFFFFFFFFFFFFFFF) for constant in MURMUR3)


@triton.jit
def splitmix64(z):
    """Hash 64 unsigned bits to 64 bits."""
    z = z + _WEYL
    z = (z ^ (z >> 30)) * _M1
    z = (z ^ (z >> 27)) * _M2
    return z ^ (z >> 31)


@triton.jit
def murmur3(x):
    """Hash 64 unsigned bits to 64 bits as FBGEMM's zero-collision tables do."""
    first = _rotate_left(_rotate_left(x * _C1, 31) * _C2, 27) * 5 + 0x52DCE729
    second = first * 5 + 0x38495AB5
    first, second = first ^ 16, second ^ 16
    first += second
    second += first
    first, second = _finalize(first), _finalize(second)
    first += second
    return first ^ (second + first)


@triton.jit
def _rotate_left(x, bits: tl.constexpr):
    return (x << bits) | (x >> (64 - bits))


@triton.jit
def _finalize(h):
    h = (h ^ (h >> 33)) * _F1
    h = (h ^ (h >> 33)) * _F2
    return h ^ (h >> 33)
