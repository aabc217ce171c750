"""Synthetic logs with features of events, users and requests, and a known best score.

`yambda`: listens with artist, album and device; every listen can be a training sample. `kuairand-ranking`: videos with
an author, a set of tags and a duration; candidates at the end of every history.

Lengths: `yambda` is lognormal(7.90, 1.13) clipped at 27,738, which fits the published median, mean and maximum of
Yambda-5B (2,695, 4,763 and 27,738); `kuairand-ranking` is that of `kuairand`.

The labels follow the signal of `synthetic_signal`. Their probabilities are stored in columns (`true_like` for
`label_like`) that a loader does not read by default. Another seed gives other users of the same items.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.data import synthetic, writer
from freescale.data.manifest import Manifest
from freescale.data.synthetic import CANDIDATES, GROUPS, Floats, Ints, Popularity, list_array
from freescale.data.synthetic_signal import (
    HOURS,
    SIGNALS,
    TABS,
    Bools,
    Catalogue,
    Facts,
    FeaturePreset,
    Users,
    ends_of,
    facts_of,
    vocabularies,
)

_BLOCK_EVENTS = 1 << 20
_TRIAL = 20_000
_UNSEEN, _UNRATED = 0.1, 0.3  # fractions of listens without a played ratio, and of events without a rating
_EVENT_COLUMNS = 10  # of about 8 bytes
_ORGANIC = 0.6  # fraction of listens that the user chose
_FAVOURED = 0.5  # fraction of a history, and of the candidates, from the user's favourite group
_CLICKS = (0.8, 0.25)  # probability of a click in the history: on the favourite group, and on others


class Block(NamedTuple):
    """Histories that are drawn together."""

    user: Ints
    people: Users
    offsets: Ints
    item: Ints
    rng: np.random.Generator

    @property
    def row(self) -> Ints:
        """The row of every event."""
        return np.repeat(np.arange(len(self.user)), np.diff(self.offsets))

    def columns(self, item: Ints, seed: int) -> dict[str, pa.Array]:
        """The columns that every preset has."""
        return {
            "user_id": pa.array(self.user + (seed % 2**31 << 32)),
            "item_id": list_array(self.offsets, item),
            "timestamp": list_array(self.offsets, synthetic.draw_times(self.user, self.offsets, self.rng)),
            **self.people.columns(),
        }


def draw_lengths(preset: FeaturePreset, users: int, rng: np.random.Generator) -> Ints:
    """Draw the number of events of each user."""
    if preset == "yambda":
        return np.clip(rng.lognormal(7.90, 1.13, users), 1, 27_738).astype(np.int64)
    return synthetic.draw_lengths("kuairand", users, rng)


def write_feature_log(
    target: str | Path,
    preset: FeaturePreset,
    *,
    users: int,
    catalogue: int = 256,
    popularity: Popularity = "public",
    seed: int = 0,
    shorter: int = 1,
) -> Manifest:
    """Write a synthetic data set with features. Memory holds about a million events and the catalogue.

    `shorter`: factor by which histories are shorter than those of the preset.
    """

    def draw(count: int, rng: np.random.Generator) -> Ints:
        return np.maximum(1, draw_lengths(preset, count, rng) // shorter)

    per_user = float(draw(_TRIAL, np.random.default_rng(seed)).mean())
    items, make = Catalogue.from_size(catalogue), _yambda_table if preset == "yambda" else _ranking_table
    drawn = _blocks(draw, users, catalogue, popularity, seed, max(1, int(_BLOCK_EVENTS / per_user)))
    note = f"synthetic: {preset} with features and planted labels over {catalogue:,} items, seed {seed}"
    note += f", {shorter} times shorter" if shorter > 1 else ""
    with writer.atomic_folder(target) as folder:
        return writer.write_dataset(
            folder,
            (make(block, items, seed) for block in drawn),
            rows_per_group=writer.rows_per_group(users, int(users * per_user), _EVENT_COLUMNS),
            items=catalogue,
            note=note,
            features=vocabularies(preset, catalogue),
            expected_rows=users,
        )


def _blocks(
    draw: Callable[[int, np.random.Generator], Ints],
    users: int,
    catalogue: int,
    popularity: Popularity,
    seed: int,
    size: int,
) -> Iterator[Block]:
    for first in range(0, users, size):
        rng = np.random.default_rng([seed, first])
        user = np.arange(first, min(first + size, users), dtype=np.int64)
        offsets = ends_of(draw(len(user), rng))
        item = synthetic.draw_items(int(offsets[-1]), catalogue, popularity, rng)
        yield Block(user, Users.draw(len(user), rng), offsets, item, rng)


def _yambda_table(block: Block, items: Catalogue, seed: int) -> pa.Table:
    item, row, rng, signals = block.item, block.row, block.rng, SIGNALS["yambda"]
    device, chance = block.people.pick_devices(row, rng), rng.random(len(item))
    facts = facts_of(block.people, items, row, item, device)
    seen, rated = rng.random(len(item)) >= _UNSEEN, rng.random(len(item)) >= _UNRATED
    # A listen is full if its drawn chance is below its probability, that is, if its share is above this threshold.
    signal = signals["label_full_listen"]
    needed = 0.5 + (np.log(chance / (1 - chance)) - signal.log_odds(facts)) / signal.share
    share, full = _listen(block.offsets, items.group[item], np.where(seen, needed, np.inf))
    facts = facts._replace(share=share)
    true_like = signals["label_like"].probability(facts)
    like, organic = rated & (rng.random(len(item)) < true_like), rng.random(len(item)) < _ORGANIC
    played = np.floor(50 * full + (50 + full) * rng.random(len(item)))  # below 50, or 50 to 100
    action = 1 + 2 * full.astype(np.int64) + 4 * like + 16 * organic
    events = {
        "artist_id": items.artist[item],
        "album_id": items.album[item],
        "device_type": device,
        "is_organic": organic.astype(np.int8),
        "action": action,
        "true_full_listen": signal.probability(facts),
        "true_like": true_like,
    }
    partly = {"played_ratio_pct": (played, seen), "label_full_listen": (full, seen), "label_like": (like, rated)}
    return pa.table(
        block.columns(item, seed)
        | {name: list_array(block.offsets, values) for name, values in events.items()}
        | {name: _partial_lists(block.offsets, *values) for name, values in partly.items()}
    )


def _listen(offsets: Ints, group: Ints, needed: Floats) -> tuple[Floats, Bools]:
    """The share of every event, and whether its listen was full.

    A full listen raises the share of later events, so the events of a history are drawn one after another. Histories
    are independent: each pass draws one event of all those that are long enough.
    """
    lengths = np.diff(offsets)
    longest_first = np.argsort(-lengths, kind="stable")
    start, length = offsets[longest_first], lengths[longest_first]
    first_slot = np.arange(len(lengths)) * GROUPS
    heard, finished = np.zeros(len(lengths) * GROUPS), np.zeros(len(lengths) * GROUPS)
    share, full = np.empty(len(group)), np.empty(len(group), dtype=bool)
    for position, active in enumerate(np.searchsorted(-length, -np.arange(length[0]), "left").tolist()):
        event = start[:active] + position
        slot = first_slot[:active] + group[event]
        now = (finished[slot] + 1) / (heard[slot] + 2)
        share[event], full[event] = now, now > needed[event]
        heard[slot] += 1
        finished[slot] += full[event]
    return share, full


def _ranking_table(block: Block, items: Catalogue, seed: int) -> pa.Table:
    rng, rows = block.rng, len(block.user)
    favourite = rng.integers(0, GROUPS, rows)
    own = favourite[block.row]
    item = _favour(items, block.item, own, rng)
    click = rng.random(len(item)) < np.where(items.group[item] == own, *_CLICKS)
    like, long_view = click & (rng.random(len(item)) < 0.2), rng.random(len(item)) < 0.2 + 0.5 * click
    ends = ends_of(rng.integers(CANDIDATES[0], CANDIDATES[1] + 1, rows))
    row = np.repeat(np.arange(rows), np.diff(ends))
    shown = _favour(items, items.by_rank[rng.integers(0, len(items.by_rank), len(row))], favourite[row], rng)
    tab, columns = rng.integers(0, TABS, rows), block.columns(item, seed)
    last = columns["timestamp"].values.to_numpy()[block.offsets[1:] - 1]
    facts = facts_of(block.people, items, row, shown, tab[row])
    facts = facts._replace(share=_click_share(block, items.group[item], click)[row, items.group[shown]])
    columns |= {
        "author_id": list_array(block.offsets, items.artist[item]),
        "tags": items.tags_of(block.offsets, item),
        "duration": list_array(block.offsets, items.seconds[item].astype(np.float32)),
        "action": list_array(block.offsets, click.astype(np.int64) + 2 * like + 4 * long_view),
        "tab": pa.array(tab),
        "hour": pa.array(last // 3600 % HOURS),
        "candidate_id": list_array(ends, shown),
        "candidate_author_id": list_array(ends, items.artist[shown]),
        "candidate_tags": items.tags_of(ends, shown),
        "candidate_duration": list_array(ends, items.seconds[shown].astype(np.float32)),
    }
    return pa.table(columns | _candidate_labels(ends, facts, items.seconds[shown], rng))


def _favour(items: Catalogue, item: Ints, favourite: Ints, rng: np.random.Generator) -> Ints:
    """Replace some of the items by ones of the favourite group."""
    return np.where(rng.random(len(item)) < _FAVOURED, items.move(item, favourite), item)


def _click_share(block: Block, group: Ints, click: Bools) -> Floats:
    """Share of clicks in every history, by group: (clicks + 1) / (events + 2)."""
    slot, slots = block.row * GROUPS + group, len(block.user) * GROUPS
    share = (np.bincount(slot, click, slots) + 1) / (np.bincount(slot, minlength=slots) + 2)
    return share.reshape(-1, GROUPS)


def _candidate_labels(ends: Ints, facts: Facts, seconds: Floats, rng: np.random.Generator) -> dict[str, pa.Array]:
    columns = {}
    for label, signal in SIGNALS["kuairand-ranking"].items():
        chance = signal.probability(facts)
        columns[label] = list_array(ends, (rng.random(len(chance)) < chance).astype(np.int8))
        columns[synthetic.true_column(label)] = list_array(ends, chance)
    # The play time is drawn around a mean, which grows with the probability of a long view.
    mean = seconds * (0.2 + 0.6 * SIGNALS["kuairand-ranking"]["label_long_view"].probability(facts))
    columns["label_play_time"] = list_array(ends, (mean * rng.gamma(4.0, 0.25, len(mean))).astype(np.float32))
    return columns | {"true_play_time": list_array(ends, mean)}


def _partial_lists(offsets: Ints, values: NDArray[np.generic], known: Bools) -> pa.ListArray:
    """List column of float32, with null where the value is not known."""
    numbers = pa.array(values.astype(np.float32), mask=~known)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), numbers)
