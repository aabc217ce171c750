"""What decides the labels of synthetic logs with features: items, users, and the planted signal.

The log-odds of a label are a sum of known terms (`Signal`): how often the user finished (clicked) earlier items of the
same group, the quality of the item, whether the user's region likes the group, the user's subscription together with
the request, and the duration. Every term is a function of the columns. Groups are hidden, but artists, authors and tags
belong to one group each. The quality is a property of the item, so that a model needs a few hundred events per item
to learn it.

The catalogue depends on its size alone. Every key is its id.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from freescale.data.order import Permutation, derive_key
from freescale.data.synthetic import GROUPS, Floats, Ints, list_array

FeaturePreset = Literal["yambda", "kuairand-ranking"]
Bools = NDArray[np.bool_]
REGIONS, SUBSCRIPTIONS, DEVICES, TABS, HOURS = GROUPS, 3, 4, 4, 24
TAGS_PER_GROUP = 4
SECONDS = (5.0, 600.0)
"""Shortest and longest duration of an item."""
_ITEMS_PER_ARTIST, _ALBUMS_PER_ARTIST = 8, 4


class Facts(NamedTuple):
    """What decides the labels of an event or candidate."""

    share: Floats
    """How many of the user's earlier events of this group ended well: (positive + 1) / (events + 2)."""
    good: Bools
    """Whether the item is good."""
    home: Bools
    """Whether the user's region likes the group: it does if both have the same number."""
    limited: Bools
    """Whether the subscription is 0 and the request comes from device (tab) 0 or 1."""
    duration: Floats
    """The logarithm of the duration, from 0 (shortest) to 1 (longest)."""


class Signal(NamedTuple):
    """Weights of the facts in the log-odds of a label."""

    bias: float
    share: float
    good: float
    home: float
    limited: float
    duration: float = 0.0

    def log_odds(self, facts: Facts) -> Floats:
        """Log-odds of the label."""
        centred = self.share * (facts.share - 0.5) + self.duration * (facts.duration - 0.5)
        return self.bias + centred + self.good * facts.good + self.home * facts.home + self.limited * facts.limited

    def probability(self, facts: Facts) -> Floats:
        """Probability of the label."""
        return 1 / (1 + np.exp(-self.log_odds(facts)))


SIGNALS: Mapping[FeaturePreset, Mapping[str, Signal]] = {
    "yambda": {
        "label_full_listen": Signal(bias=-0.5, share=5.0, good=1.2, home=1.0, limited=-1.5),
        "label_like": Signal(bias=-3.0, share=4.0, good=1.8, home=1.0, limited=-1.5),
    },
    "kuairand-ranking": {
        "label_click": Signal(bias=-1.0, share=5.0, good=1.2, home=1.0, limited=-1.5),
        "label_like": Signal(bias=-3.0, share=4.0, good=1.8, home=1.0, limited=-1.5),
        "label_long_view": Signal(bias=-0.5, share=3.0, good=0.8, home=1.0, limited=-1.5, duration=-4.0),
    },
}
"""The binary labels of every preset."""


class Catalogue(NamedTuple):
    """Properties of every item. Artists are the authors of videos."""

    by_rank: Ints
    """Items, most popular first."""
    rank: Ints
    """Place of each item in that order."""
    group: Ints
    artist: Ints
    album: Ints
    good: Bools
    seconds: Floats
    tag_offsets: Ints
    tags: Ints

    @staticmethod
    def from_size(items: int) -> "Catalogue":
        """Assign the properties by hashes of the ids."""
        # `draw_items` maps popularity ranks to items with this permutation.
        order = Permutation(items, derive_key(items))
        rank = order.inverse(np.arange(items))
        quality, length = (Permutation(items, derive_key(items, salt))(rank) for salt in (1, 2))
        artists = count_artists(items)
        has_tag = (1 + quality // 2 % (2**TAGS_PER_GROUP - 1))[:, None] >> np.arange(TAGS_PER_GROUP) & 1
        item, tag = np.nonzero(has_tag)
        group = rank % GROUPS  # `artists` is a multiple of the groups, so an artist has one group
        seconds = SECONDS[0] * (SECONDS[1] / SECONDS[0]) ** (length / max(1, items - 1))
        return Catalogue(
            order(np.arange(items)),
            rank,
            group,
            rank % artists,
            rank % (_ALBUMS_PER_ARTIST * artists),
            quality % 2 == 1,
            seconds,
            ends_of(has_tag.sum(1)),
            group[item] + GROUPS * tag,
        )

    def move(self, item: Ints, group: Ints) -> Ints:
        """Items of the given groups, about as popular as `item`."""
        wanted = self.rank[item] - self.group[item] + group
        return self.by_rank[np.where(wanted < len(self.rank), wanted, group)]

    def tags_of(self, offsets: Ints, item: Ints) -> pa.ListArray:
        """Column of tag sets: row i has those of items offsets[i] to offsets[i + 1]."""
        sizes = np.diff(self.tag_offsets)[item]
        ends = ends_of(sizes)
        tags = self.tags[np.arange(ends[-1]) + np.repeat(self.tag_offsets[item] - ends[:-1], sizes)]
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), list_array(ends, tags))

    def log_duration(self, item: Ints) -> Floats:
        """Logarithm of the duration of items, from 0 to 1."""
        return np.log(self.seconds[item] / SECONDS[0]) / np.log(SECONDS[1] / SECONDS[0])


def count_artists(items: int) -> int:
    """Number of artists (authors) of a catalogue."""
    return GROUPS * max(1, items // (GROUPS * _ITEMS_PER_ARTIST))


def vocabularies(preset: FeaturePreset, items: int) -> dict[str, int]:
    """Size of the vocabulary of every categorical column."""
    users = {"region": REGIONS, "subscription": SUBSCRIPTIONS, "devices": DEVICES}
    artists = count_artists(items)
    if preset == "yambda":
        return {"artist_id": artists, "album_id": _ALBUMS_PER_ARTIST * artists, "device_type": DEVICES, **users}
    return {"author_id": artists, "tags": TAGS_PER_GROUP * GROUPS, "tab": TABS, "hour": HOURS, **users}


class Users(NamedTuple):
    """Features of the users of a block."""

    region: Ints
    subscription: Ints
    device_offsets: Ints
    devices: Ints
    account_age: Floats
    """Days; NaN where it is missing."""

    @staticmethod
    def draw(count: int, rng: np.random.Generator) -> "Users":
        """Draw users: everyone has at least one device; one account age in ten is missing."""
        owned = rng.random((count, DEVICES)) < 0.4
        owned[np.arange(count), rng.integers(0, DEVICES, count)] = True
        age = np.where(rng.random(count) < 0.1, np.nan, np.ceil(rng.exponential(700.0, count)))
        region, subscription = rng.integers(0, REGIONS, count), rng.integers(0, SUBSCRIPTIONS, count)
        return Users(region, subscription, ends_of(owned.sum(1)), np.nonzero(owned)[1], age)

    def pick_devices(self, row: Ints, rng: np.random.Generator) -> Ints:
        """One of the devices of each of these users."""
        place = rng.random(len(row)) * np.diff(self.device_offsets)[row]
        return self.devices[self.device_offsets[row] + place.astype(np.int64)]

    def columns(self) -> dict[str, pa.Array]:
        """Row columns."""
        missing = np.isnan(self.account_age)
        return {
            "region": pa.array(self.region),
            "subscription": pa.array(self.subscription),
            "devices": list_array(self.device_offsets, self.devices),
            "account_age": pa.array(self.account_age.astype(np.float32), mask=missing),
        }


def facts_of(people: Users, items: Catalogue, row: Ints, item: Ints, request: Ints) -> Facts:
    """Facts of events or candidates; the share is left at 1/2. `request`: their device or tab."""
    home, limited = people.region[row] == items.group[item], (people.subscription[row] == 0) & (request < 2)
    return Facts(np.full(len(item), 0.5), items.good[item], home, limited, items.log_duration(item))


def ends_of(lengths: Ints) -> Ints:
    """Offsets of lists of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)])
