"""Buckets, slots and eviction policies of a zero-collision table. Pure.

A table has a power of two of buckets, fixed at its creation, so that ranks can own whole buckets and no slot depends on
the world size. splitmix64 of an id selects its bucket, MurmurHash3 its first slot there; the id has that slot or one of
the next, circular inside the bucket, up to a window of 128. This is the layout of FBGEMM's `zero_collision_hash`, whose
read-only lookup finds the same slots. After its slots a bucket has one shared row, for ids without a slot.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from freescale.errors import ConfigError, DataError
from freescale.hashing import murmur3, splitmix64, unsigned_remainder

EMPTY = -1
"""The id of a free slot, which is FBGEMM's. No id may have this value."""
_SLOTS_PER_BUCKET = 1024
_FEWEST_BUCKETS, _MOST_BUCKETS = 64, 1 << 16
_WINDOW = 128
_MIDDLE_TIME = 1 << 31
"""Event times are stored in 32 bits, from 1970 to 2106."""


class BucketLayout(NamedTuple):
    """The rows of a table: in each bucket its slots, then its shared row."""

    buckets: int
    """A power of two."""
    slots: int
    """Per bucket."""

    @staticmethod
    def of(slots: int, *, buckets: int | None = None) -> "BucketLayout":
        """Return the layout of a table with at least so many slots. `buckets`: those that it was created with."""
        if slots < 1:
            raise ConfigError(f"a table of {slots} slots cannot hold an id", remedy="give it at least one slot")
        if buckets is None:
            fit = max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, slots // _SLOTS_PER_BUCKET))
            buckets = 1 << (fit.bit_length() - 1)
        return BucketLayout(buckets, -(-slots // buckets))

    @property
    def window(self) -> int:
        """Number of slots that an id may have."""
        return min(_WINDOW, self.slots)

    @property
    def stride(self) -> int:
        """Rows per bucket."""
        return self.slots + 1

    @property
    def rows(self) -> int:
        """Rows of the embedding table."""
        return self.buckets * self.stride

    def owned(self, rank: int, world_size: int) -> range:
        """Return the buckets of a rank."""
        if world_size > self.buckets:
            what = f"{world_size} ranks cannot own the {self.buckets} buckets of a table: some would own none"
            raise ConfigError(
                what, remedy=f"train on at most {self.buckets} ranks, or create the table with more slots"
            )
        return range(rank * self.buckets // world_size, (rank + 1) * self.buckets // world_size)

    def bucket_of(self, ids: Tensor) -> Tensor:
        """Return the bucket of each id: the highest bits of its hash."""
        bits = self.buckets.bit_length() - 1
        return splitmix64(ids) >> (64 - bits) & (self.buckets - 1) if bits else torch.zeros_like(ids)

    def slot_row(self, numbers: Tensor) -> Tensor:
        """Return the rows of slots by number. Consecutive numbers are in consecutive buckets."""
        return numbers % self.buckets * self.stride + numbers // self.buckets

    def is_slot(self, rows: Tensor) -> Tensor:
        """Return which rows are slots and not shared."""
        return rows % self.stride != self.slots

    def slot_number(self, rows: Tensor) -> Tensor:
        """Return the numbers of the slots at rows; EMPTY for shared rows."""
        slot = rows % self.stride
        return torch.where(slot == self.slots, EMPTY, slot * self.buckets + rows // self.stride)

    def first_slot(self, ids: Tensor) -> Tensor:
        """Return the first slot of each id inside its bucket."""
        return unsigned_remainder(murmur3(ids), self.slots)

    def is_foreign(self, ids: Tensor, owned: range) -> Tensor:
        """Return which ids these buckets cannot hold."""
        bucket = self.bucket_of(ids)
        return (ids == EMPTY) | (bucket < owned.start) | (bucket >= owned.stop)

    def foreign_ids(self, ids: Tensor, owned: range) -> DataError:
        """Return the error for ids of which some are foreign."""
        first = int(ids[self.is_foreign(ids, owned)][0])
        if first == EMPTY:
            return DataError(f"{EMPTY} cannot be an id: it marks free slots", remedy="give that item another id")
        what = f"id {first} is in bucket {int(self.bucket_of(torch.tensor([first])))}, this rank owns {owned}"
        return DataError(what, remedy="send each id to the owner of its bucket")


class SlotArrays(NamedTuple):
    """The slots of some buckets: [buckets, slots + 1]. The last column is the shared row, whose id is EMPTY."""

    ids: Tensor
    last_step: Tensor
    """The last step that used the slot."""
    time: Tensor
    """The latest event time of those steps, see `stored_time`."""
    count: Tensor
    """The number of steps that used the slot."""

    @staticmethod
    def empty(buckets: int, slots: int, device: torch.device | None = None) -> "SlotArrays":
        """Return free slots."""
        shape = (buckets, slots + 1)
        ids = torch.full(shape, EMPTY, dtype=torch.int64, device=device)
        return SlotArrays(ids, *(torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(3)))


class EvictionPolicy(NamedTuple):
    """Which id of a full window loses its slot to a new one.

    `none`: no id. `ttl`: the one with the oldest event time, if that is more than `ttl` seconds ago. `lru`: the least
    recently used. `lfu`: the least frequently used, of those the least recently used. Ties go to the first in the
    window. Slots that this step or one of the last `protected` steps used are never evicted.
    """

    kind: Literal["none", "ttl", "lru", "lfu"] = "none"
    ttl: int = 0
    protected: int = 3

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if self.kind not in ("none", "ttl", "lru", "lfu"):
            raise ConfigError(f"eviction policy '{self.kind}' is unknown", remedy="valid: none, ttl, lru, lfu")
        if (self.kind == "ttl") != (self.ttl > 0):
            what = f"eviction policy '{self.kind}' does not fit a ttl of {self.ttl} seconds"
            raise ConfigError(what, remedy="give a positive ttl with the policy 'ttl', and none with the others")


class StepTime(NamedTuple):
    """A step of training, and its event time as slots store it."""

    step: int
    time: int

    @staticmethod
    def of(step: int, time: int) -> "StepTime":
        """Return a step with the latest time of its events, in seconds."""
        return StepTime(step, stored_time(time))


def stored_time(seconds: int) -> int:
    """Return an event time as slots store it."""
    if not 0 <= seconds < 2 * _MIDDLE_TIME:
        what = f"event time {seconds} is not in the years 1970 to 2106"
        raise DataError(what, remedy="give event times in seconds since 1970")
    return seconds - _MIDDLE_TIME


def event_time(stored: Tensor) -> Tensor:
    """Return event times in seconds."""
    return stored.to(torch.int64) + _MIDDLE_TIME
