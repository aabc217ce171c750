"""A keyed permutation of range(n), evaluated point by point, and the hash under it.

A shuffle of 10^10 samples cannot be held in memory, but a bijection can be *computed*: a Feistel network over the
next power of two, walked until it lands below n. Written here rather than taken from a random number library, because
the order of a run must be the same under every version of every library. Pure: numpy and nothing else.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]
_Round = tuple[Words, np.uint64, np.uint64]
"""A key, and the bits of the left and of the right half."""
_WEYL, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ONE, _S27, _S30, _S31 = np.uint64(1), np.uint64(27), np.uint64(30), np.uint64(31)
_ROUNDS = 6  # four already pass as random; six leave margin on the tiny domains that row groups give


def mix(values: ArrayLike) -> NDArray[np.uint64]:
    """Hash 64 bits to 64 bits (the finalizer of splitmix64)."""
    z = np.atleast_1d(np.asarray(values)).astype(np.uint64)  # a copy, and an array: scalars warn when they wrap
    z += _WEYL
    z ^= z >> _S30
    z *= _M1
    z ^= z >> _S27
    z *= _M2
    z ^= z >> _S31
    return z


def key_of(*parts: ArrayLike) -> NDArray[np.uint64]:
    """Fold several numbers, or arrays of them, into one key (or an array of keys)."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = mix(key ^ mix(part))
    return key


class Permutation:
    """A bijection of range(n) chosen by a key. Keys may be an array: then each element has its own bijection."""

    def __init__(self, n: int, key: Words) -> None:
        bits = max(2, (n - 1).bit_length())
        halves = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        self.n = n
        self._rounds: list[_Round] = [(key_of(key, r), halves[r % 2], halves[1 - r % 2]) for r in range(_ROUNDS)]

    def __call__(self, index: ArrayLike) -> NDArray[np.int64]:
        """Where each index goes."""
        return self._walk(index, self._rounds, _round)

    def inverse(self, index: ArrayLike) -> NDArray[np.int64]:
        """Which index came here."""
        return self._walk(index, self._rounds[::-1], _unround)

    def _walk(self, index: ArrayLike, rounds: Iterable[_Round], step: Callable[..., Words]) -> NDArray[np.int64]:
        # A value that lands at or above n is sent through again. The orbit returns below n after fewer than two
        # passes on average, because the domain is less than twice n.
        value = np.atleast_1d(np.asarray(index)).astype(np.uint64)
        outside = np.ones(value.shape, dtype=bool)
        while outside.any():
            moved = value[outside]
            for key, left_bits, right_bits in rounds:
                moved = step(moved, key[outside] if len(key) > 1 else key, left_bits, right_bits)
            value[outside] = moved
            outside = value >= self.n
        return value.astype(np.int64).reshape(np.shape(index))


def _round(value: Words, key: Words, left_bits: np.uint64, right_bits: np.uint64) -> Words:
    left, right = value >> right_bits, _lowest(value, right_bits)
    return (right << left_bits) | (left ^ _lowest(mix(right ^ key), left_bits))


def _unround(value: Words, key: Words, left_bits: np.uint64, right_bits: np.uint64) -> Words:
    right, left = value >> left_bits, _lowest(value, left_bits)
    return ((left ^ _lowest(mix(right ^ key), left_bits)) << right_bits) | right


def _lowest(value: Words, bits: np.uint64) -> Words:
    return value & ((_ONE << bits) - _ONE)
