"""Deterministic sample order: which samples are in step i, and which rank reads them.

The order depends on (seed, epoch, step) only. It has two levels. Row group g always belongs to virtual shard g mod V.
*Window* w takes the w-th group of every shard, and each shard permutes its groups independently. Inside a window, the
samples of all its groups are shuffled. With order = "log" both permutations are the identity.

Guarantees for order = "shuffle": every epoch is a new permutation of all samples. Two samples of one window can appear
in any order. A sample can be in any window. Samples of one row group stay in one window. Not guaranteed: two samples of
the *same* shard but different row groups never share a window.

The global batch of step i is positions [i B, (i + 1) B) of that order; the last batch is short. A rank reads the shards
v with v mod world_size = rank, so exactly one rank reads a row group, and the content of a step depends neither on the
world size nor on the number of workers. Everything is computed on demand in O(V + B) memory. Pure: numpy only.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freescale.errors import ConfigError

MAX_GROUP_ROWS = 1 << 22
"""Largest accepted row group. Samples of a window are numbered in memory, so a damaged count must not pass."""
Words = NDArray[np.uint64]
_Round = tuple[Words, np.uint64, np.uint64]
"""A key, and the number of bits of the left and of the right half."""
_WEYL, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ONE, _S27, _S30, _S31 = np.uint64(1), np.uint64(27), np.uint64(30), np.uint64(31)
_ROUNDS = 6  # four pass as random; six leave margin on tiny domains such as a few row groups
_GROUPS, _SAMPLES = 1, 2  # the two levels use unrelated keys


@dataclass(frozen=True)
class RowGroupLayout:
    """Number of rows in each row group: `common` everywhere, except in the groups listed in `odd`.

    A log of 10^10 samples has millions of row groups, so only exceptions are stored. Files that FreeScale writes have
    one exception each, the last group.
    """

    groups: int
    common: int
    odd: NDArray[np.int64]
    """Indices of the groups with another size, ascending."""
    odd_rows: NDArray[np.int64]
    """Their sizes."""

    @staticmethod
    def from_counts(counts: Iterable[int]) -> "RowGroupLayout":
        """Build a layout from the number of rows of each group."""
        rows = np.fromiter(counts, dtype=np.int64)
        values, times = np.unique(rows, return_counts=True)
        common = int(values[times.argmax()]) if len(values) else 0
        odd = np.flatnonzero(rows != common)
        return RowGroupLayout(len(rows), common, odd, rows[odd])

    @property
    def rows(self) -> int:
        """Number of samples in the data set."""
        return self.groups * self.common + int((self.odd_rows - self.common).sum())

    def group_rows(self, groups: ArrayLike) -> NDArray[np.int64]:
        """Number of samples in each of these groups."""
        groups = np.asarray(groups, dtype=np.int64)
        rows = np.full(groups.shape, self.common, dtype=np.int64)
        if len(self.odd):
            place = np.minimum(np.searchsorted(self.odd, groups), len(self.odd) - 1)
            rows = np.where(self.odd[place] == groups, self.odd_rows[place], rows)
        return rows

    def first_rows(self, groups: ArrayLike) -> NDArray[np.int64]:
        """Index, in log order, of the first sample of each of these groups."""
        groups = np.asarray(groups, dtype=np.int64)
        return groups * self.common + self._excess[np.searchsorted(self.odd, groups)]

    @cached_property
    def _excess(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.odd_rows - self.common)])


def concat_ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the ranges [first, first + count)."""
    result = np.arange(int(count.sum()), dtype=np.int64)
    result += np.repeat(first - (np.cumsum(count) - count), count)
    return result


def splitmix64(values: ArrayLike) -> NDArray[np.uint64]:
    """Hash 64-bit integers with the finalizer of splitmix64."""
    z = np.atleast_1d(np.asarray(values)).astype(np.uint64)  # a copy, and an array: numpy warns when scalars wrap
    z += _WEYL
    z ^= z >> _S30
    z *= _M1
    z ^= z >> _S27
    z *= _M2
    z ^= z >> _S31
    return z


def derive_key(*parts: ArrayLike) -> NDArray[np.uint64]:
    """Hash several integers, or arrays of them, into one key or an array of keys."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = splitmix64(key ^ splitmix64(part))
    return key


class Permutation:
    """A keyed bijection of range(n), evaluated point by point. With an array of keys, each element has its own.

    A shuffle of 10^10 samples does not fit in memory, so it is computed: a Feistel network over the next power of two,
    applied again until the value is below n. Implemented here because the order of a run must not change with the
    version of a random number library.
    """

    def __init__(self, n: int, key: Words) -> None:
        bits = max(2, (n - 1).bit_length())
        halves = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        self.n = n
        self._rounds: list[_Round] = [(derive_key(key, r), halves[r % 2], halves[1 - r % 2]) for r in range(_ROUNDS)]

    def __call__(self, index: ArrayLike) -> NDArray[np.int64]:
        """Map each index to its image."""
        return self._walk(index, self._rounds, _round)

    def inverse(self, index: ArrayLike) -> NDArray[np.int64]:
        """Map each image back to its index."""
        return self._walk(index, self._rounds[::-1], _unround)

    def _walk(self, index: ArrayLike, rounds: Iterable[_Round], step: Callable[..., Words]) -> NDArray[np.int64]:
        # Values at or above n pass through the network again. This takes fewer than two passes on average, because the
        # domain is less than twice n.
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


class WindowShare(NamedTuple):
    """The samples of one window that one rank reads, in epoch order."""

    groups: NDArray[np.int64]
    """Row groups that the rank reads."""
    position: NDArray[np.int64]
    """Position of each sample in the epoch, ascending."""
    source: NDArray[np.int64]
    """Row of each sample in the concatenation of the rank's groups."""
    sample_id: NDArray[np.int64]
    """Row number of each sample in the log."""


@dataclass(frozen=True)
class EpochOrder:
    """The sample order of one epoch."""

    layout: RowGroupLayout
    kind: Literal["shuffle", "log"]
    shards: int
    seed: int
    epoch: int

    @property
    def windows(self) -> int:
        """Number of windows in the epoch; only the last may lack some shards."""
        return -(-self.layout.groups // self.shards)

    def window_groups(self, window: int) -> NDArray[np.int64]:
        """The row groups of a window, in the order of their shards."""
        shard = np.arange(min(self.shards, self.layout.groups - window * self.shards), dtype=np.int64)
        return shard + self.shards * self._permute(shard, np.full_like(shard, window), backward=False)

    def window_start(self, window: int) -> int:
        """Position of the first sample of a window."""
        groups = min(window * self.shards, self.layout.groups)
        windows, excess = self._odd_windows
        return groups * self.layout.common + int(excess[np.searchsorted(windows, window)])

    def window_at(self, position: int) -> int:
        """The window that contains a position."""
        return bisect_right(range(self.windows), position, key=self.window_start) - 1

    def windows_in(self, begin: int, end: int) -> range:
        """The windows that overlap positions [begin, end)."""
        return range(self.window_at(begin), self.window_at(end - 1) + 1) if begin < end else range(0)

    def share(self, window: int, *, rank: int, world_size: int) -> WindowShare:
        """One rank's share of a window, in time and memory proportional to that share."""
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
        """Windows that contain the groups of uncommon size, and the cumulative excess of samples."""
        odd = self.layout.odd
        windows = self._permute(odd % self.shards, odd // self.shards, backward=True)
        by_window = np.argsort(windows, kind="stable")
        excess = np.cumsum((self.layout.odd_rows - self.layout.common)[by_window])
        return windows[by_window], np.concatenate([[0], excess])

    def _permute(self, shard: NDArray[np.int64], index: NDArray[np.int64], *, backward: bool) -> NDArray[np.int64]:
        """Permute the group index inside each shard, or invert that. Shards have n or n + 1 groups."""
        if self.kind == "log":
            return index
        fewest, more = divmod(self.layout.groups, self.shards)
        result = np.empty_like(index)
        for mask, n in ((shard < more, fewest + 1), (shard >= more, fewest)):
            if mask.any():
                order = Permutation(n, derive_key(self.seed, self.epoch, _GROUPS, shard[mask]))
                result[mask] = (order.inverse if backward else order)(index[mask])
        return result


@dataclass
class Cursor:
    """A position in the training data that any world size can resume from."""

    seed: int
    order: Literal["shuffle", "log"]
    global_batch: int
    shards: int
    samples: int
    ends: tuple[int, ...] = ()
    """Samples up to the end of each partition; no step spans two of them. Empty: there are no partitions."""
    epoch: int = 0
    step: int = 0
    """Completed steps of this epoch."""

    def __post_init__(self) -> None:
        ends = self.ends or (self.samples,)
        self._bounds = [0, *ends]
        steps = (-(-(end - begin) // self.global_batch) for begin, end in pairwise(self._bounds))
        self.first_steps = [0, *accumulate(steps)]
        """The first step of each partition, and the number of all steps."""

    @property
    def steps(self) -> int:
        """Steps per epoch. The last one of a partition may be short."""
        return self.first_steps[-1]

    def advance(self) -> None:
        """Mark one step as completed."""
        self.step += 1
        if self.step >= self.steps:
            self.epoch, self.step = self.epoch + 1, 0

    def span(self, step: int) -> tuple[int, int]:
        """Epoch positions [begin, end) of a step's global batch."""
        partition = bisect_right(self.first_steps, step, hi=len(self.first_steps) - 1) - 1
        begin = self._bounds[partition] + (step - self.first_steps[partition]) * self.global_batch
        return begin, min(begin + self.global_batch, self._bounds[partition + 1])

    def state_dict(self) -> dict[str, Any]:
        """State needed to resume."""
        fields = asdict(self)
        return {"partitions": len(fields.pop("ends")), **fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state. Refuses a state with another seed, order, batch size, shard count or data size.

        Partitions may have been added at the end since.
        """
        current, state = self.state_dict(), {"partitions": 0, **state}  # older cursors know no partitions
        if state["partitions"] != current["partitions"]:
            state = self._continued(state)
        for name, value in current.items():
            if name not in state:
                raise ConfigError(f"the saved cursor has no '{name}'", remedy="take a cursor that this version saved")
            if name not in ("epoch", "step") and state[name] != value:
                saved = f"{name} = {state[name]!r}"
                remedy = f"resume with {saved}, or start the data from its beginning"
                raise ConfigError(f"the saved cursor has {saved}, this run has {value!r}", remedy=remedy)
        epoch, step = int(state["epoch"]), int(state["step"])
        if epoch < 0 or not 0 <= step < max(1, self.steps):
            what = f"the saved cursor is at step {step} of epoch {epoch}, which does not exist"
            raise ConfigError(what, remedy="take a cursor that this run saved")
        self.epoch, self.step = epoch, step

    def _continued(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of a cursor over fewer or more partitions as one of this cursor: the epoch goes on."""
        count, current = int(state["partitions"]), len(self.ends)
        if not count or not current or (count < current and state["samples"] != self.ends[count - 1]):
            return state
        done = int(state["step"]) if not state["epoch"] else self.first_steps[min(count, current)]
        epoch, step = divmod(min(done, self.steps), max(1, self.steps))
        return {**state, "partitions": current, "samples": self.samples, "epoch": epoch, "step": step}
