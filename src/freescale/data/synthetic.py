"""Synthetic logs: seeded, of any size, with realistic lengths and popularity, or with a known best ranking score.

Lengths: `kuairand` is lognormal(8.93, 0.93) clipped at 21,000 and fits the published quantiles of KuaiRand-1K; `ml1m`
is 20 + lognormal(4.28, 1.23); `heavy` is Zipf 1.2 on [1, 4096]. Items: Zipf 0.7 as in public logs, 1.05 as in
production logs. Rows are sorted by their last event.

Planted ranking logs: every item has a hidden group and is good or bad, both from a hash of its id, so that all logs
with one catalogue agree. A user's events come mostly from one group. The probability of a click or like depends on two
facts only: whether the candidate is of the most common group of the history, and whether it is good. The probability of
every label is stored in a column (`true_click` for `label_click`) that a loader does not read by default.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.data import writer
from freescale.data.manifest import Manifest
from freescale.data.order import Permutation, derive_key

Preset = Literal["kuairand", "ml1m", "heavy"]
Popularity = Literal["public", "production"]
_EXPONENT = {"public": 0.7, "production": 1.05}
_START = 1_700_000_000
_SECONDS_BETWEEN_USERS = 5
_SECONDS_BETWEEN_EVENTS = 3600.0
_BLOCK_EVENTS = 1 << 20
_TRIAL = 20_000
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
GROUPS = 8
FEWEST_ITEMS = 2 * GROUPS
EVENTS = (8, 24)
CANDIDATES = (8, 16)
CHANCES = {"label_click": ((0.08, 0.08), (0.60, 0.60)), "label_like": ((0.04, 0.30), (0.15, 0.75))}
"""Probability of each label: [candidate is of the history's group][candidate is good]."""
_LOYAL = 0.7  # fraction of a user's events from the favourite group; the others are any item
_OFFERED = 0.5  # the same for candidates
_PLANTED_BLOCK = 4096
_TRUTH_ROWS = 1024
_BINS = 1 << 16


def draw_lengths(preset: Preset, users: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw the number of events of each user."""
    if preset == "kuairand":
        return np.clip(rng.lognormal(8.93, 0.93, users), 1, 21_000).astype(np.int64)
    if preset == "ml1m":
        return 20 + rng.lognormal(4.28, 1.23, users).astype(np.int64)
    weights = np.arange(1, 4097, dtype=np.float64) ** -1.2
    return 1 + np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(users)).astype(np.int64)


def draw_items(count: int, catalogue: int, popularity: Popularity, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw item ids. Popular ids are spread over the table, as when ids are assigned by arrival."""
    # Inverse CDF of a power law over [1, n + 1): needs no table of n weights and is exact in the tail.
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
    """Write a synthetic data set. Memory holds about a million events.

    `shorter`: factor by which histories are shorter than those of the preset, for small machines.
    """

    def draw(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return np.maximum(1, draw_lengths(preset, count, rng) // shorter)

    per_user = float(draw(_TRIAL, np.random.default_rng(seed)).mean())
    note = f"synthetic: {preset}, {popularity} popularity over {catalogue:,} items, seed {seed}"
    note += f", {shorter} times shorter" if shorter > 1 else ""
    blocks = _blocks(draw, users, catalogue, popularity, seed, max(1, int(_BLOCK_EVENTS / per_user)))
    rows = writer.rows_per_group(users, int(users * per_user))
    with writer.atomic_folder(target) as folder:
        return writer.write_dataset(
            folder, blocks, rows_per_group=rows, items=catalogue, note=note, expected_rows=users
        )


def _blocks(
    draw: Callable[[int, np.random.Generator], NDArray[np.int64]],
    users: int,
    catalogue: int,
    popularity: Popularity,
    seed: int,
    block: int,
) -> Iterator[pa.Table]:
    for first in range(0, users, block):
        rng = np.random.default_rng([seed, first])
        user = np.arange(first, min(first + block, users), dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(draw(len(user), rng))])
        item = list_array(offsets, draw_items(int(offsets[-1]), catalogue, popularity, rng))
        yield pa.table(
            {"user_id": user, "item_id": item, "timestamp": list_array(offsets, draw_times(user, offsets, rng))}
        )


def draw_times(user: NDArray[np.int64], offsets: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw ascending timestamps; the last one of a user grows with the user id."""
    elapsed = np.cumsum(rng.exponential(_SECONDS_BETWEEN_EVENTS, int(offsets[-1]))).astype(np.int64)
    last = elapsed[offsets[1:] - 1]
    return elapsed + np.repeat(_START + user * _SECONDS_BETWEEN_USERS - last, np.diff(offsets))


def list_array(offsets: NDArray[np.int64], values: NDArray[Any]) -> pa.ListArray:
    """List column in which row i contains values offsets[i] to offsets[i + 1]."""
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))


class PlantedItems(NamedTuple):
    """Hidden properties of a catalogue: the group of each item, and whether it is good."""

    group: Ints
    good: NDArray[np.bool_]

    @staticmethod
    def from_catalogue(catalogue: int) -> "PlantedItems":
        """Assign a group and a quality to every item by a hash of its id."""
        number = Permutation(catalogue, derive_key(catalogue)).inverse(np.arange(catalogue))
        return PlantedItems(number % GROUPS, number // GROUPS % 2 == 1)

    def draw(self, group: Ints, share: float, rng: np.random.Generator) -> Ints:
        """Draw one item per entry of `group`: from that group with probability `share`, else any item."""
        by_group = np.argsort(self.group, kind="stable")
        first = np.searchsorted(self.group[by_group], np.arange(GROUPS + 1))
        within = first[group] + (rng.random(len(group)) * np.diff(first)[group]).astype(np.int64)
        anywhere = rng.integers(0, len(self.group), len(group))
        return by_group[np.where(rng.random(len(group)) < share, within, anywhere)]

    def most_common_group(self, offsets: Ints, item: Ints) -> Ints:
        """Most common group of each history; the first one on ties."""
        row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        counts = np.bincount(row * GROUPS + self.group[item], minlength=GROUPS * (len(offsets) - 1))
        return counts.reshape(-1, GROUPS).argmax(1)

    def probabilities(self, label: str, candidate: Ints, group: Ints) -> Floats:
        """Label probability of candidates, where `group` is the most common group of the history."""
        match = (self.group[candidate] == group).astype(np.int64)
        return np.array(CHANCES[label])[match, self.good[candidate].astype(np.int64)]


def write_planted_log(target: str | Path, *, users: int, catalogue: int = 256, seed: int = 0) -> Manifest:
    """Write a planted ranking log. Another seed gives other users over the same items, for a test set."""
    note = f"synthetic: planted ranking over {catalogue:,} items in {GROUPS} hidden groups, seed {seed}"
    blocks, rows = (
        _planted_blocks(users, PlantedItems.from_catalogue(catalogue), seed),
        writer.rows_per_group(users, users * EVENTS[1]),
    )
    with writer.atomic_folder(target) as folder:
        return writer.write_dataset(
            folder, blocks, rows_per_group=rows, items=catalogue, note=note, expected_rows=users
        )


def true_column(label: str) -> str:
    """Name of the column with the probabilities of a label."""
    return label.replace("label_", "true_")


def planted_truth(folder: str | Path, label: str) -> tuple[Floats, Floats]:
    """Probability of every label of a planted log, and the drawn labels (0 or 1). Missing labels are left out."""
    chance, drawn = zip(*_truth_batches(folder, label), strict=True)
    return np.concatenate(chance), np.concatenate(drawn)


def _truth_batches(folder: str | Path, label: str) -> Iterator[tuple[Floats, Floats]]:
    columns = [true_column(label), label]
    for path in sorted(Path(folder).glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(_TRUTH_ROWS, columns=columns):
            chance, drawn = (batch[name].flatten().to_numpy(zero_copy_only=False) for name in columns)
            known = ~np.isnan(drawn.astype(np.float64))
            yield chance[known], drawn[known].astype(np.float64)


def planted_optimum(folder: str | Path, label: str) -> float:
    """Best expected normalised entropy of a label of a planted log: that of its true probabilities."""
    count = positive = loss = 0.0
    for chance, _ in _truth_batches(folder, label):
        count, positive = count + len(chance), positive + chance.sum()
        loss += len(chance) * _log_loss(chance, chance)
    mean = np.array([positive / count])
    return float(loss / count / _log_loss(mean, mean))


def planted_auc(folder: str | Path, label: str) -> float:
    """Best expected AUC of a label of a planted log: that of its true probabilities.

    The chance that the probability of a positive is above that of a negative, where every event counts as positive with
    its probability. Probabilities are rounded to 1/65,536, so that memory does not grow with the log.
    """
    positive, negative = np.zeros(_BINS), np.zeros(_BINS)
    for chance, _ in _truth_batches(folder, label):
        place = np.minimum((chance * _BINS).astype(np.int64), _BINS - 1)
        positive += np.bincount(place, chance, _BINS)
        negative += np.bincount(place, 1 - chance, _BINS)
    below = np.cumsum(negative) - negative / 2  # ties count half
    return float((positive * below).sum() / (positive.sum() * negative.sum()))


def normalised_entropy(predicted: Floats, labels: Floats) -> float:
    """Log loss of predictions over that of always predicting the mean. `labels` may be probabilities."""
    return float(_log_loss(predicted, labels) / _log_loss(labels.mean(), labels))


def _planted_blocks(users: int, items: PlantedItems, seed: int) -> Iterator[pa.Table]:
    for first in range(0, users, _PLANTED_BLOCK):
        rng = np.random.default_rng([seed, first])
        yield _planted_block(np.arange(first, min(first + _PLANTED_BLOCK, users), dtype=np.int64), seed, items, rng)


def _planted_block(user: Ints, seed: int, items: PlantedItems, rng: np.random.Generator) -> pa.Table:
    events, offered = _offsets(EVENTS, len(user), rng), _offsets(CANDIDATES, len(user), rng)
    favourite = rng.integers(0, GROUPS, len(user))
    item = items.draw(np.repeat(favourite, np.diff(events)), _LOYAL, rng)
    group = np.repeat(items.most_common_group(events, item), np.diff(offered))
    candidate = items.draw(group, _OFFERED, rng)
    columns = {
        "user_id": pa.array(user + (seed % 2**31 << 32)),
        "item_id": list_array(events, item),
        "timestamp": list_array(events, draw_times(user, events, rng)),
        "candidate_id": list_array(offered, candidate),
    }
    for label in CHANCES:
        chance = items.probabilities(label, candidate, group)
        columns[label] = list_array(offered, (rng.random(len(chance)) < chance).astype(np.int8))
        columns[true_column(label)] = list_array(offered, chance)
    return pa.table(columns)


def _offsets(between: tuple[int, int], rows: int, rng: np.random.Generator) -> Ints:
    return np.concatenate([[0], np.cumsum(rng.integers(between[0], between[1] + 1, rows))])


def _log_loss(predicted: Floats | np.float64, labels: Floats) -> np.floating:
    return -np.mean(labels * np.log(predicted) + (1 - labels) * np.log(1 - predicted))
