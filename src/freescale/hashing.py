"""64-bit hashes of tensors, bit for bit the same on every device. Pure.

torch has no arithmetic of unsigned 64-bit integers; signed integers wrap to the same bits.
"""

from torch import Tensor

SPLITMIX64 = _WEYL, _M1, _M2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of splitmix64, as signed integers."""
MURMUR3 = _C1, _C2, _F1, _F2 = -0x783C846EEEBDAC2B, 0x4CF5AD432745937F, -0xAE502812AA7333, -0x3B314601E57A13AD
"""The multipliers of MurmurHash3, as signed integers."""


def splitmix64(z: Tensor) -> Tensor:
    """Hash 64 bits to 64 bits, element by element (the finalizer of splitmix64)."""
    z = z + _WEYL
    z = z.bitwise_xor_(logical_shift_right(z, 30)).mul_(_M1)
    z = z.bitwise_xor_(logical_shift_right(z, 27)).mul_(_M2)
    return z.bitwise_xor_(logical_shift_right(z, 31))


def murmur3(x: Tensor) -> Tensor:
    """Hash 64 bits to 64 bits as FBGEMM's zero-collision tables do: MurmurHash3 of (x, 0), halves combined by xor."""
    first = _rotate_left(_rotate_left(x * _C1, 31) * _C2, 27) * 5 + 0x52DCE729
    second = first * 5 + 0x38495AB5
    first, second = first ^ 16, second ^ 16
    first = first + second
    second = second + first
    first, second = _finalize(first), _finalize(second)
    first = first + second
    return first ^ (second + first)


def unsigned_remainder(x: Tensor, divisor: int) -> Tensor:
    """Return the remainder of x, read as unsigned."""
    return (logical_shift_right(x, 1) % divisor * 2 + (x & 1)) % divisor


def logical_shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift zeros into the highest bits."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return x << bits | logical_shift_right(x, 64 - bits)


def _finalize(h: Tensor) -> Tensor:
    h = (h ^ logical_shift_right(h, 33)) * _F1
    h = (h ^ logical_shift_right(h, 33)) * _F2
    return h ^ logical_shift_right(h, 33)
