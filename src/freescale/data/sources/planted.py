"""A made-up ranking log whose best possible score is known.

Every item has a hidden group and is good or bad, both a hash of its id, so that all logs over one catalogue agree on
them. A user's events come mostly from one group. Whether a candidate is clicked or liked is drawn with a chance that
follows from two facts alone: is its group the commonest one of the history, and is it good. The chance of every label
is kept in a column beside it (`true_click` for `label_click`), whose name is not one that a loader reads by itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.data.order.permute import Permutation, key_of
from freescale.data.sources.synthetic import listed, times
from freescale.data.store import writer
from freescale.data.store.manifest import Manifest

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
GROUPS = 8
FEWEST_ITEMS = 2 * GROUPS
EVENTS = (8, 24)
CANDIDATES = (8, 16)
CHANCES = {"label_click": ((0.08, 0.08), (0.60, 0.60)), "label_like": ((0.04, 0.30), (0.15, 0.75))}
"""Of each label: [candidate is of the history's group][candidate is good]."""
_LOYAL = 0.7  # share of a user's events that are drawn from the favourite group; the others are any item
_OFFERED = 0.5  # the same for candidates
_BLOCK = 4096


class Items(NamedTuple):
    """The hidden side of a catalogue: item i is of group[i], and good or not."""

    group: Ints
    good: NDArray[np.bool_]

    @staticmethod
    def of(catalogue: int) -> "Items":
        """Deal items over groups, and good ones over each group, by a hash of their ids."""
        number = Permutation(catalogue, key_of(catalogue)).inverse(np.arange(catalogue))
        return Items(number % GROUPS, number // GROUPS % 2 == 1)

    def draw(self, group: Ints, share: float, rng: np.random.Generator) -> Ints:
        """One item for each of `group`: with chance `share` of that group, else any."""
        by_group = np.argsort(self.group, kind="stable")
        first = np.searchsorted(self.group[by_group], np.arange(GROUPS + 1))
        within = first[group] + (rng.random(len(group)) * np.diff(first)[group]).astype(np.int64)
        anywhere = rng.integers(0, len(self.group), len(group))
        return by_group[np.where(rng.random(len(group)) < share, within, anywhere)]

    def commonest(self, offsets: Ints, item: Ints) -> Ints:
        """The group that most events of each history are of; of equally common ones the first."""
        row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        counts = np.bincount(row * GROUPS + self.group[item], minlength=GROUPS * (len(offsets) - 1))
        return counts.reshape(-1, GROUPS).argmax(1)

    def chances(self, label: str, candidate: Ints, group: Ints) -> Floats:
        """How likely candidates are to get a label, when `group` is the commonest one of the history before each."""
        match = (self.group[candidate] == group).astype(np.int64)
        return np.array(CHANCES[label])[match, self.good[candidate].astype(np.int64)]


def write(target: str | Path, *, users: int, catalogue: int = 256, seed: int = 0) -> Manifest:
    """Write a planted log. Another seed gives other users over the same items, as a test set needs them."""
    note = f"synthetic: planted ranking over {catalogue:,} items in {GROUPS} hidden groups, seed {seed}"
    blocks, rows = _blocks(users, Items.of(catalogue), seed), writer.rows_per_group(users, users * EVENTS[1])
    with writer.new_folder(target) as folder:
        return writer.write(folder, blocks, rows_per_group=rows, items=catalogue, note=note, expected_rows=users)


def truth(folder: str | Path, label: str) -> tuple[Floats, Floats]:
    """The chance of every label of a planted log, and what was drawn (0 or 1)."""
    columns = [_true(label), label]
    tables = [pq.read_table(file, columns=columns) for file in sorted(Path(folder).glob("*.parquet"))]
    chance, drawn = (pa.concat_tables(tables)[name].combine_chunks().flatten().to_numpy() for name in columns)
    return chance, drawn.astype(np.float64)


def optimum(folder: str | Path, label: str) -> float:
    """Normalised entropy of a label of a planted log that nobody can beat, but by luck: that of its true chances."""
    chance, _ = truth(folder, label)
    return normalised_entropy(chance, chance)


def normalised_entropy(said: Floats, drawn: Floats) -> float:
    """Mean log loss of what was said, over that of saying the mean always. `drawn` may be chances too: on average."""
    return float(_log_loss(said, drawn) / _log_loss(drawn.mean(), drawn))


def _blocks(users: int, items: Items, seed: int) -> Iterator[pa.Table]:
    for first in range(0, users, _BLOCK):
        rng = np.random.default_rng([seed, first])
        yield _block(np.arange(first, min(first + _BLOCK, users), dtype=np.int64), seed, items, rng)


def _block(user: Ints, seed: int, items: Items, rng: np.random.Generator) -> pa.Table:
    events, offered = _offsets(EVENTS, len(user), rng), _offsets(CANDIDATES, len(user), rng)
    favourite = rng.integers(0, GROUPS, len(user))
    item = items.draw(np.repeat(favourite, np.diff(events)), _LOYAL, rng)
    group = np.repeat(items.commonest(events, item), np.diff(offered))
    candidate = items.draw(group, _OFFERED, rng)
    columns = {
        "user_id": pa.array(user + (seed % 2**31 << 32)),
        "item_id": listed(events, item),
        "timestamp": listed(events, times(user, events, rng)),
        "candidate_id": listed(offered, candidate),
    }
    for label in CHANCES:
        chance = items.chances(label, candidate, group)
        columns[label] = listed(offered, (rng.random(len(chance)) < chance).astype(np.int8))
        columns[_true(label)] = listed(offered, chance)
    return pa.table(columns)


def _true(label: str) -> str:
    return label.replace("label_", "true_")


def _offsets(between: tuple[int, int], rows: int, rng: np.random.Generator) -> Ints:
    return np.concatenate([[0], np.cumsum(rng.integers(between[0], between[1] + 1, rows))])


def _log_loss(said: Floats | np.float64, drawn: Floats) -> np.floating:
    return -np.mean(drawn * np.log(said) + (1 - drawn) * np.log(1 - said))
