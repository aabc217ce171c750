"""The order of the rows of a table over the ranks. Pure: numpy only.

Every rank owns a contiguous block of positions; `RowOrder` maps rows to positions. `freescale data import` numbers
items by popularity, so with positions equal to rows the owner of the first block would be the busiest by far. The
`zigzag` order deals rows to many small shards in zig-zag: to the shards in order, then in reverse order. Any contiguous
block of shards then holds popular and rare rows alike. Rows after the vocabulary are shared by unknown items: a hash
selects the row, so their popularity does not depend on their number. The order does not depend on the number of ranks,
so a checkpoint can be read by any.
"""

from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Owners = Literal["zigzag", "block"]
Ints = NDArray[np.int64]
A = TypeVar("A", bound=Any)
_MOST_SHARDS = 1 << 14
_FEWEST_ROWS_PER_SHARD = 8


class RowOrder(NamedTuple):
    """The positions of the rows of a table. With one shard a row's position is its number.

    Row i goes to the shard whose number has the last bits of the Gray code of i, in reverse order. The last k bits of
    Gray codes run through all values, then through the same values in reverse order, and so on, for every k; their
    reversal makes shards with equal last bits neighbours. So rows are dealt in zig-zag to any 2 ** k equal blocks of
    positions, for all k at once.
    """

    rows: int
    shards: int
    """A power of two."""

    @staticmethod
    def of(rows: int, owners: Owners) -> "RowOrder":
        """Return the order of a table with so many rows."""
        fit = max(1, min(_MOST_SHARDS, rows // _FEWEST_ROWS_PER_SHARD))
        return RowOrder(rows, 1 if owners == "block" else 1 << (fit.bit_length() - 1))

    @property
    def positions(self) -> int:
        """Number of positions: as many for each shard, so that a few at the ends of shards have no row."""
        return self.shards * self._per_shard

    def position(self, rows: A, reversal: A) -> A:
        """Return the positions of rows. `reversal`: `bit_reversal` of the shards. Both of numpy, or both of torch."""
        if self.shards == 1:
            return rows
        shard = reversal[(rows ^ (rows >> 1)) & (self.shards - 1)]
        return shard * self._per_shard + rows // self.shards

    def rows_at(self, positions: Ints) -> Ints:
        """Return the rows at positions; -1 where there is none."""
        if self.shards == 1:
            return positions
        shard, dealt = np.divmod(positions, self._per_shard)
        code = bit_reversal(self.shards)[shard] ^ ((dealt & 1) * (self.shards >> 1))
        shift = 1
        while shift < self.shards:  # from a Gray code to its number
            code = code ^ (code >> shift)
            shift *= 2
        row = dealt * self.shards + code
        return np.where(row < self.rows, row, -1)

    def count(self, positions: range) -> int:
        """Return the number of rows at these positions. Only the last position of a shard may have none."""
        last = np.arange(1, self.shards + 1) * self._per_shard - 1
        empty = last[self.rows_at(last) < 0]
        return len(positions) - int(((empty >= positions.start) & (empty < positions.stop)).sum())

    @property
    def _per_shard(self) -> int:
        return -(-self.rows // self.shards)


def bit_reversal(values: int) -> Ints:
    """Return each of 2 ** k values with its k bits in reverse order."""
    reversed_ = np.zeros(1, dtype=np.int64)
    while len(reversed_) < values:
        reversed_ = np.concatenate([2 * reversed_, 2 * reversed_ + 1])
    return reversed_


def interleave(counts: ArrayLike) -> Ints:
    """Return a permutation of ids after which contiguous blocks of rows are equally busy: the row of each id.

    `counts`: how often each id occurs. For tables whose owners hold contiguous blocks, as those of TorchRec.
    """
    popularity = np.argsort(-np.asarray(counts), kind="stable")
    order = RowOrder.of(len(popularity), "zigzag")
    at = order.rows_at(np.arange(order.positions))
    rows = np.empty(len(popularity), dtype=np.int64)
    rows[popularity[at[at >= 0]]] = np.arange(len(popularity))
    return rows
