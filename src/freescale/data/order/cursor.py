"""Which samples are in step i, and which rank reads them: a function of (seed, epoch, step) and nothing else.

The order of an epoch has two levels. Row group g belongs to virtual shard g mod V, for good. *Window* w takes the w-th
group of every shard, where each shard walks its groups in its own order; inside a window the samples of all its groups
are mixed. With order = "log" both orders are the identity, so the log's own order comes out, sample by sample.

What that guarantees for order = "shuffle": every epoch is a permutation of all samples, new for every epoch; any two
samples of one window can meet in any order; a sample can be in any window; samples of one row group stay in one window.
What it does not: two samples of the *same* shard but different row groups never share a window.

The global batch of step i is positions [i B, (i + 1) B) of that order, the last one short. A rank reads the shards
v with v mod ranks = rank, so a row group is read by one rank only, and neither the number of ranks nor of workers has
any say in what a step holds. Everything is computed on demand: memory is O(V + B), whatever the size of the log.

Pure: no files, no torch, no process group.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freescale.data.order.layout import Layout, ranges
from freescale.data.order.permute import Permutation, key_of
from freescale.errors import ConfigError

_GROUPS, _SAMPLES = 1, 2  # the two levels draw from unrelated keys


class Share(NamedTuple):
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
class Order:
    """The order of one epoch."""

    layout: Layout
    kind: Literal["shuffle", "log"]
    shards: int
    seed: int
    epoch: int

    @property
    def windows(self) -> int:
        """How many windows the epoch has; only the last may lack some shards."""
        return -(-self.layout.groups // self.shards)

    def groups_of(self, window: int) -> NDArray[np.int64]:
        """The row groups of a window, in the order of their shards."""
        shard = np.arange(min(self.shards, self.layout.groups - window * self.shards), dtype=np.int64)
        return shard + self.shards * self._turn(shard, np.full_like(shard, window), backward=False)

    def start_of(self, window: int) -> int:
        """Position of the first sample of a window."""
        groups = min(window * self.shards, self.layout.groups)
        windows, excess = self._odd_windows
        return groups * self.layout.common + int(excess[np.searchsorted(windows, window)])

    def window_at(self, position: int) -> int:
        """The window that holds a position: starts are never decreasing."""
        return bisect_right(range(self.windows), position, key=self.start_of) - 1

    def windows_in(self, begin: int, end: int) -> range:
        """The windows that positions [begin, end) touch."""
        return range(self.window_at(begin), self.window_at(end - 1) + 1) if begin < end else range(0)

    def share(self, window: int, *, rank: int, world_size: int) -> Share:
        """What one rank holds of a window; computed from its own samples alone."""
        groups = self.groups_of(window)
        rows = self.layout.rows_of(groups)
        first = np.cumsum(rows) - rows
        total = int(rows.sum())
        groups, rows, first = groups[rank::world_size], rows[rank::world_size], first[rank::world_size]
        inside = ranges(first, rows)
        if self.kind == "shuffle" and total:
            inside = Permutation(total, key_of(self.seed, self.epoch, _SAMPLES, window))(inside)
        source = np.argsort(inside, kind="stable")
        sample_id = ranges(self.layout.first_row_of(groups), rows)
        return Share(groups, self.start_of(window) + inside[source], source, sample_id[source])

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
                order = Permutation(n, key_of(self.seed, self.epoch, _GROUPS, shard[chosen]))
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
