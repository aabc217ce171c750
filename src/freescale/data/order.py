"""Sample order."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freescale.errors import ConfigError

MAX_GROUP_ROWS = 1 << 22
"""Of one row group. Samples of a window are numbered in memory, so a file may not claim any number."""


@dataclass(frozen=True)
class RowGroupLayout:
    """Row groups of `common` rows, except those listed in `odd`."""

    groups: int
    common: int
    odd: NDArray[np.int64]
    """Numbers of the groups with another size, ascending."""
    odd_rows: NDArray[np.int64]
    """Their sizes."""

    @staticmethod
    def from_counts(counts: Iterable[int]) -> "RowGroupLayout":
        """Find the common size and the exceptions."""
        rows = np.fromiter(counts, dtype=np.int64)
        values, times = np.unique(rows, return_counts=True)
        common = int(values[times.argmax()]) if len(values) else 0
        odd = np.flatnonzero(rows != common)
        return RowGroupLayout(len(rows), common, odd, rows[odd])

    @property
    def rows(self) -> int:
        """Samples in the whole data set."""
        return self.groups * self.common + int((self.odd_rows - self.common).sum())

    def group_rows(self, groups: ArrayLike) -> NDArray[np.int64]:
        """Samples in each of these groups."""
        groups = np.asarray(groups, dtype=np.int64)
        rows = np.full(groups.shape, self.common, dtype=np.int64)
        if len(self.odd):
            place = np.minimum(np.searchsorted(self.odd, groups), len(self.odd) - 1)
            rows = np.where(self.odd[place] == groups, self.odd_rows[place], rows)
        return rows

    def first_rows(self, groups: ArrayLike) -> NDArray[np.int64]:
        """The number, in log order, of the first sample of each of these groups."""
        groups = np.asarray(groups, dtype=np.int64)
        return groups * self.common + self._excess[np.searchsorted(self.odd, groups)]

    @cached_property
    def _excess(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.odd_rows - self.common)])


def concat_ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lay the ranges [first, first + count) end to end."""
    laid = np.arange(int(count.sum()), dtype=np.int64)
    laid += np.repeat(first - (np.cumsum(count) - count), count)
    return laid


Words = NDArray[np.uint64]
_Round = tuple[Words, np.uint64, np.uint64]
"""A key, and the bits of the left and of the right half."""
_WEYL, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ONE, _S27, _S30, _S31 = np.uint64(1), np.uint64(27), np.uint64(30), np.uint64(31)
_ROUNDS = 6  # four already pass as random; six leave margin on the tiny domains that row groups give


def splitmix64(values: ArrayLike) -> NDArray[np.uint64]:
    """Hash 64 bits to 64 bits (the finalizer of splitmix64)."""
    z = np.atleast_1d(np.asarray(values)).astype(np.uint64)  # a copy, and an array: scalars warn when they wrap
    z += _WEYL
    z ^= z >> _S30
    z *= _M1
    z ^= z >> _S27
    z *= _M2
    z ^= z >> _S31
    return z


def derive_key(*parts: ArrayLike) -> NDArray[np.uint64]:
    """Fold several numbers, or arrays of them, into one key (or an array of keys)."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = splitmix64(key ^ splitmix64(part))
    return key


class Permutation:
    """A bijection of range(n) chosen by a key. Keys may be an array: then each element has its own bijection."""

    def __init__(self, n: int, key: Words) -> None:
        bits = max(2, (n - 1).bit_length())
        halves = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        self.n = n
        self._rounds: list[_Round] = [(derive_key(key, r), halves[r % 2], halves[1 - r % 2]) for r in range(_ROUNDS)]

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
    return (right << left_bits) | (left ^ _lowest(splitmix64(right ^ key), left_bits))


def _unround(value: Words, key: Words, left_bits: np.uint64, right_bits: np.uint64) -> Words:
    right, left = value >> left_bits, _lowest(value, left_bits)
    return ((left ^ _lowest(splitmix64(right ^ key), left_bits)) << right_bits) | right


def _lowest(value: Words, bits: np.uint64) -> Words:
    return value & ((_ONE << bits) - _ONE)


_GROUPS, _SAMPLES = 1, 2  # the two levels draw from unrelated keys


class WindowShare(NamedTuple):
    """What one rank holds of one window, in the order of the epoch."""

    groups: NDArray[np.int64]
    """The row groups that the rank reads."""
    position: NDArray[np.int64]
    """Position of each sample in the epoch, ascending."""
    source: NDArray[np.int64]
    """Where each sample is found when the rank's groups are laid end to end."""
    sample_id: NDArray[np.int64]
    """Its row number in the log."""


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch."""

    layout: RowGroupLayout
    kind: Literal["shuffle", "log"]
    shards: int
    seed: int
    epoch: int

    @property
    def windows(self) -> int:
        """How many windows the epoch has; only the last may lack some shards."""
        return -(-self.layout.groups // self.shards)

    def window_groups(self, window: int) -> NDArray[np.int64]:
        """The row groups of a window, in the order of their shards."""
        shard = np.arange(min(self.shards, self.layout.groups - window * self.shards), dtype=np.int64)
        return shard + self.shards * self._turn(shard, np.full_like(shard, window), backward=False)

    def window_start(self, window: int) -> int:
        """Position of the first sample of a window."""
        groups = min(window * self.shards, self.layout.groups)
        windows, excess = self._odd_windows
        return groups * self.layout.common + int(excess[np.searchsorted(windows, window)])

    def window_at(self, position: int) -> int:
        """The window that holds a position: starts are never decreasing."""
        return bisect_right(range(self.windows), position, key=self.window_start) - 1

    def windows_in(self, begin: int, end: int) -> range:
        """The windows that positions [begin, end) touch."""
        return range(self.window_at(begin), self.window_at(end - 1) + 1) if begin < end else range(0)

    def share(self, window: int, *, rank: int, world_size: int) -> WindowShare:
        """What one rank holds of a window; computed from its own samples alone."""
        groups = self.window_groups(window)
        rows = self.layout.group_rows(groups)
        first = np.cumsum(rows) - rows
        total = int(rows.sum())
        groups, rows, first = groups[rank::world_size], rows[rank::world_size], first[rank::world_size]
        inside = concat_ranges(first, rows)
        if self.kind == "shuffle" and total:
            inside = Permutation(total, derive_key(self.seed, self.epoch, _SAMPLES, window))(inside)
        source = np.argsort(inside, kind="stable")
        sample_id = concat_ranges(self.layout.first_rows(groups), rows)
        return WindowShare(groups, self.window_start(window) + inside[source], source, sample_id[source])

    @cached_property
    def _odd_windows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """In which windows the groups of uncommon size fall, and the running excess of samples they bring."""
        odd = self.layout.odd
        windows = self._turn(odd % self.shards, odd // self.shards, backward=True)
        by_window = np.argsort(windows, kind="stable")
        excess = np.cumsum((self.layout.odd_rows - self.layout.common)[by_window])
        return windows[by_window], np.concatenate([[0], excess])

    def _turn(self, shard: NDArray[np.int64], index: NDArray[np.int64], *, backward: bool) -> NDArray[np.int64]:
        """Map each shard's turn to its group (or back). Shards have n or n + 1 groups."""
        if self.kind == "log":
            return index
        fewest, more = divmod(self.layout.groups, self.shards)
        result = np.empty_like(index)
        for chosen, n in ((shard < more, fewest + 1), (shard >= more, fewest)):
            if chosen.any():
                order = Permutation(n, derive_key(self.seed, self.epoch, _GROUPS, shard[chosen]))
                result[chosen] = (order.inverse if backward else order)(index[chosen])
        return result


@dataclass
class Cursor:
    """A position in the log: a few numbers that any number of ranks can continue from."""

    seed: int
    order: Literal["shuffle", "log"]
    global_batch: int
    shards: int
    samples: int
    epoch: int = 0
    step: int = 0
    """Steps of this epoch that are done."""

    @property
    def steps(self) -> int:
        """Steps in an epoch, the last short one included."""
        return -(-self.samples // self.global_batch)

    def advance(self) -> None:
        """Count one step as done."""
        self.step += 1
        if self.step >= self.steps:
            self.epoch, self.step = self.epoch + 1, 0

    def span(self, step: int) -> tuple[int, int]:
        """Positions of a step's global batch."""
        return step * self.global_batch, min((step + 1) * self.global_batch, self.samples)

    def state_dict(self) -> dict[str, int | str]:
        """Everything needed to continue."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from there. What defines the order must be unchanged, or step i would mean other samples."""
        for name, mine in asdict(self).items():
            if name not in state:
                raise ConfigError(f"the saved cursor has no '{name}'", remedy="take a cursor that this version saved")
            if name not in ("epoch", "step") and state[name] != mine:
                saved = f"{name} = {state[name]!r}"
                remedy = f"resume with {saved}, or start the data from its beginning"
                raise ConfigError(f"the saved cursor counts on {saved}, this run has {mine!r}", remedy=remedy)
        epoch, step = int(state["epoch"]), int(state["step"])
        if epoch < 0 or not 0 <= step < max(1, self.steps):
            what = f"the saved cursor is at step {step} of epoch {epoch}, which does not exist"
            raise ConfigError(what, remedy="take a cursor that this run saved")
        self.epoch, self.step = epoch, step
