"""Synthetic logs of a catalogue that changes: on every day 5% of the items are replaced by new ones.

A place of the catalogue holds an item for 20 days, then the next one; places change in turn. Every item has a hidden
group, from a hash of its id, so a new item says nothing before its first events. A row is a session of one day: its
events come mostly from one group. Rows are in the order of days. Ids are raw: they need a dynamic table.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from freescale.data import writer
from freescale.data.manifest import Manifest
from freescale.data.order import splitmix64
from freescale.data.synthetic import Ints, list_array
from freescale.data.vocabulary import RAW_IDS

DAYS = 40
_LIFE = 20
"""Days that an item is in the catalogue: 5% leave on every day."""
_ITEMS_PER_GROUP = 20
_EVENTS = (5, 15)
_LOYAL = 0.8  # fraction of the events of a session from its group; the others are any item
_START, _DAY = 1_700_006_400, 86_400


def catalogue_of(day: int, catalogue: int, seed: int = 0) -> Ints:
    """Return the ids of the items of a day."""
    place = np.arange(catalogue)
    number = (day + place) // _LIFE
    return _hash(number * catalogue + place, seed)


def group_of(items: Ints, catalogue: int) -> Ints:
    """Return the hidden groups of items."""
    return _hash(items, 1) % max(1, catalogue // _ITEMS_PER_GROUP)


def write_drift_log(
    target: str | Path, *, users: int, catalogue: int = 1000, seed: int = 0, days: range = range(DAYS)
) -> Manifest:
    """Write a data set of so many sessions, spread over the days."""
    note = f"synthetic: drift, {catalogue:,} items of which 5% are replaced daily, days {days.start} to {days.stop - 1}"
    with writer.atomic_folder(target) as folder:
        return writer.write_dataset(
            folder,
            _sessions(users, catalogue, seed, days),
            rows_per_group=writer.rows_per_group(users, users * _EVENTS[1]),
            items=0,
            vocabulary=RAW_IDS,
            note=f"{note}, seed {seed}",
            expected_rows=users,
        )


def _sessions(users: int, catalogue: int, seed: int, days: range) -> Iterator[pa.Table]:
    first_user = 0
    for place, day in enumerate(days):
        rng = np.random.default_rng([seed, day])
        count = (place + 1) * users // len(days) - place * users // len(days)
        lengths = rng.integers(_EVENTS[0], _EVENTS[1] + 1, count)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        items = catalogue_of(day, catalogue, seed)
        group = group_of(items, catalogue)
        by_group = np.argsort(group, kind="stable")
        begin = np.searchsorted(group[by_group], np.arange(group.max() + 2))
        of_session = np.repeat(group[rng.integers(0, catalogue, count)], lengths)
        within = begin[of_session] + (rng.random(offsets[-1]) * np.diff(begin)[of_session]).astype(np.int64)
        anywhere = rng.integers(0, catalogue, offsets[-1])
        item = items[np.where(rng.random(offsets[-1]) < _LOYAL, by_group[within], anywhere)]
        time = _START + _DAY * day + np.sort(rng.integers(0, _DAY - _EVENTS[1], count))
        position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        yield pa.table(
            {
                "user_id": pa.array(np.arange(first_user, first_user + count)),
                "item_id": list_array(offsets, item),
                "timestamp": list_array(offsets, np.repeat(time, lengths) + position),
            }
        )
        first_user += count


def _hash(numbers: Ints, seed: int) -> Ints:
    """Return 63 bits."""
    mixed = splitmix64(numbers.astype(np.uint64) + splitmix64(np.array([seed], dtype=np.uint64)))
    return (mixed >> np.uint64(1)).astype(np.int64)
