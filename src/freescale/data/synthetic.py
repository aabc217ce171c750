"""Synthetic."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.data import writer
from freescale.data.dataset import Manifest
from freescale.data.order import Permutation, derive_key

Preset = Literal["kuairand", "ml1m", "heavy"]
Popularity = Literal["public", "production"]
_EXPONENT = {"public": 0.7, "production": 1.05}
_START = 1_700_000_000
_SECONDS_BETWEEN_USERS = 5
_SECONDS_BETWEEN_EVENTS = 3600.0
_BLOCK_EVENTS = 1 << 20
_TRIAL = 20_000


def draw_lengths(preset: Preset, users: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw events per user."""
    if preset == "kuairand":
        return np.clip(rng.lognormal(8.93, 0.93, users), 1, 21_000).astype(np.int64)
    if preset == "ml1m":
        return 20 + rng.lognormal(4.28, 1.23, users).astype(np.int64)
    weights = np.arange(1, 4097, dtype=np.float64) ** -1.2
    return 1 + np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(users)).astype(np.int64)


def draw_items(count: int, catalogue: int, popularity: Popularity, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw item ids. The popular ones lie anywhere in the table, as they do when ids are dealt by arrival."""
    # The inverse of a power law's integral over [1, n + 1): no table of n weights, and exact in the tail.
    slope = 1.0 - _EXPONENT[popularity]
    top = float(catalogue + 1) ** slope
    rank = (1.0 + rng.random(count) * (top - 1.0)) ** (1.0 / slope)
    rank = np.minimum(rank.astype(np.int64) - 1, catalogue - 1)
    return Permutation(catalogue, derive_key(catalogue))(rank)


def write_log(
    target: str | Path,
    preset: Preset,
    *,
    users: int,
    catalogue: int = 100_000,
    popularity: Popularity = "public",
    seed: int = 0,
    shorter: int = 1,
) -> Manifest:
    """Write a synthetic data set; memory holds about a million events at a time.

    `shorter`: how many times shorter histories are than the preset's, for machines that cannot train on whole ones.
    """

    def drawn(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.maximum(1, draw_lengths(preset, count, rng) // shorter)

    per_user = float(drawn(_TRIAL, np.random.default_rng(seed)).mean())
    note = f"synthetic: {preset}, {popularity} popularity over {catalogue:,} items, seed {seed}"
    note += f", {shorter} times shorter" if shorter > 1 else ""
    blocks = _blocks(drawn, users, catalogue, popularity, seed, max(1, int(_BLOCK_EVENTS / per_user)))
    rows = writer.rows_per_group(users, int(users * per_user))
    with writer.atomic_folder(target) as folder:
        return writer.write_dataset(
            folder, blocks, rows_per_group=rows, items=catalogue, note=note, expected_rows=users
        )


def _blocks(
    drawn: Callable[[int, np.random.Generator], NDArray[np.int64]],
    users: int,
    catalogue: int,
    popularity: Popularity,
    seed: int,
    block: int,
) -> Iterator[pa.Table]:
    for first in range(0, users, block):
        rng = np.random.default_rng([seed, first])
        user = np.arange(first, min(first + block, users), dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(drawn(len(user), rng))])
        item = list_array(offsets, draw_items(int(offsets[-1]), catalogue, popularity, rng))
        yield pa.table(
            {"user_id": user, "item_id": item, "timestamp": list_array(offsets, draw_times(user, offsets, rng))}
        )


def draw_times(user: NDArray[np.int64], offsets: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Ascending times that end, for user u, at a moment that grows with u."""
    elapsed = np.cumsum(rng.exponential(_SECONDS_BETWEEN_EVENTS, int(offsets[-1]))).astype(np.int64)
    last = elapsed[offsets[1:] - 1]
    return elapsed + np.repeat(_START + user * _SECONDS_BETWEEN_USERS - last, np.diff(offsets))


def list_array(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.ListArray:
    """A list column: row i holds values offsets[i] to offsets[i + 1]."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


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
_PLANTED_BLOCK = 4096


class PlantedItems(NamedTuple):
    """The hidden side of a catalogue: item i is of group[i], and good or not."""

    group: Ints
    good: NDArray[np.bool_]

    @staticmethod
    def from_catalogue(catalogue: int) -> "PlantedItems":
        """Deal items over groups, and good ones over each group, by a hash of their ids."""
        number = Permutation(catalogue, derive_key(catalogue)).inverse(np.arange(catalogue))
        return PlantedItems(number % GROUPS, number // GROUPS % 2 == 1)

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


def write_planted_log(target: str | Path, *, users: int, catalogue: int = 256, seed: int = 0) -> Manifest:
    """Write a planted log. Another seed gives other users over the same items, as a test set needs them."""
    note = f"synthetic: planted ranking over {catalogue:,} items in {GROUPS} hidden groups, seed {seed}"
    blocks, rows = (
        _planted_blocks(users, PlantedItems.from_catalogue(catalogue), seed),
        writer.rows_per_group(users, users * EVENTS[1]),
    )
    with writer.atomic_folder(target) as folder:
        return writer.write_dataset(
            folder, blocks, rows_per_group=rows, items=catalogue, note=note, expected_rows=users
        )


def planted_truth(folder: str | Path, label: str) -> tuple[Floats, Floats]:
    """The chance of every label of a planted log, and what was drawn (0 or 1)."""
    columns = [_true(label), label]
    tables = [pq.read_table(file, columns=columns) for file in sorted(Path(folder).glob("*.parquet"))]
    chance, drawn = (pa.concat_tables(tables)[name].combine_chunks().flatten().to_numpy() for name in columns)
    return chance, drawn.astype(np.float64)


def planted_optimum(folder: str | Path, label: str) -> float:
    """Normalised entropy of a label of a planted log that nobody can beat, but by luck: that of its true chances."""
    chance, _ = planted_truth(folder, label)
    return normalised_entropy(chance, chance)


def normalised_entropy(said: Floats, drawn: Floats) -> float:
    """Mean log loss of what was said, over that of saying the mean always. `drawn` may be chances too: on average."""
    return float(_log_loss(said, drawn) / _log_loss(drawn.mean(), drawn))


def _planted_blocks(users: int, items: PlantedItems, seed: int) -> Iterator[pa.Table]:
    for first in range(0, users, _PLANTED_BLOCK):
        rng = np.random.default_rng([seed, first])
        yield _planted_block(np.arange(first, min(first + _PLANTED_BLOCK, users), dtype=np.int64), seed, items, rng)


def _planted_block(user: Ints, seed: int, items: PlantedItems, rng: np.random.Generator) -> pa.Table:
    events, offered = _offsets(EVENTS, len(user), rng), _offsets(CANDIDATES, len(user), rng)
    favourite = rng.integers(0, GROUPS, len(user))
    item = items.draw(np.repeat(favourite, np.diff(events)), _LOYAL, rng)
    group = np.repeat(items.commonest(events, item), np.diff(offered))
    candidate = items.draw(group, _OFFERED, rng)
    columns = {
        "user_id": pa.array(user + (seed % 2**31 << 32)),
        "item_id": list_array(events, item),
        "timestamp": list_array(events, draw_times(user, events, rng)),
        "candidate_id": list_array(offered, candidate),
    }
    for label in CHANCES:
        chance = items.chances(label, candidate, group)
        columns[label] = list_array(offered, (rng.random(len(chance)) < chance).astype(np.int8))
        columns[_true(label)] = list_array(offered, chance)
    return pa.table(columns)


def _true(label: str) -> str:
    return label.replace("label_", "true_")


def _offsets(between: tuple[int, int], rows: int, rng: np.random.Generator) -> Ints:
    return np.concatenate([[0], np.cumsum(rng.integers(between[0], between[1] + 1, rows))])


def _log_loss(said: Floats | np.float64, drawn: Floats) -> np.floating:
    return -np.mean(drawn * np.log(said) + (1 - drawn) * np.log(1 - said))
