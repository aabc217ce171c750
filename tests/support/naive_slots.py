"""The rules of zero-collision tables, one id after the other and by linear search: what the tables must match."""

from functools import cache

from freescale.embedding.zero_collision_ids import candidate_layout
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy


@cache
def splitmix(key: int) -> int:
    z = (key + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = (z ^ z >> shift) * factor % 2**64
    return z


@cache
def murmur(key: int) -> int:
    """MurmurHash3 of (key, 0) with seed 0 for 128 bits, and the xor of its halves."""

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) % 2**64

    def final(h: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
            h = (h ^ h >> 33) * factor % 2**64
        return h

    first = rotated(rotated(key * 0x87C37B91114253D5 % 2**64, 31) * 0x4CF5AD432745937F % 2**64, 27)
    first = (first * 5 + 0x52DCE729) % 2**64
    second = (first * 5 + 0x38495AB5) % 2**64 ^ 16
    first = ((first ^ 16) + second) % 2**64
    second = (second + first) % 2**64
    first, second = final(first), final(second)
    first = (first + second) % 2**64
    return first ^ (second + first) % 2**64


class NaiveSlot:
    """A slot of the reference."""

    def __init__(self) -> None:
        self.id, self.last_step, self.time, self.count = EMPTY, 0, 0, 0


class NaiveTable:
    """The rules of a table, one id after the other, by linear search."""

    def __init__(self, layout: BucketLayout, policy: EvictionPolicy) -> None:
        self.layout, self.policy = layout, policy
        self.slots = [[NaiveSlot() for _ in range(layout.slots)] for _ in range(layout.buckets)]

    def window(self, key: int) -> tuple[int, list[int]]:
        bucket, first = splitmix(key) * self.layout.buckets >> 64, murmur(key) % self.layout.slots
        return bucket, [(first + probe) % self.layout.slots for probe in range(min(128, self.layout.slots))]

    def find(self, key: int) -> NaiveSlot | None:
        bucket, window = self.window(key)
        found = [self.slots[bucket][slot] for slot in window if self.slots[bucket][slot].id == key]
        return found[0] if found else None

    def use(self, key: int, step: int, time: int) -> bool:
        slot = self.find(key)
        if slot is not None and slot.last_step != step:
            slot.last_step, slot.time, slot.count = step, max(slot.time, time), slot.count + 1
        return slot is not None

    def insert(self, key: int, step: int, time: int) -> int | None:
        """Return the id that had the slot; None without one."""
        bucket, window = self.window(key)
        best: NaiveSlot | None = None
        for number in window:
            slot = self.slots[bucket][number]
            if slot.id == EMPTY:
                best = slot
                break
            if self.is_evictable(slot, step, time) and (best is None or self.key(slot) < self.key(best)):
                best = slot
        if best is None:
            return None
        had, best.id, best.last_step, best.time, best.count = best.id, key, step, time, 1
        return had

    def is_evictable(self, slot: NaiveSlot, step: int, time: int) -> bool:
        expired = self.policy.kind != "ttl" or time - slot.time > self.policy.ttl
        return self.policy.kind != "none" and step - slot.last_step > self.policy.protected and expired

    def sample(self, number: int) -> int:
        """Return the row of a used slot."""
        bucket, first = number % self.layout.buckets, number // self.layout.buckets
        for probe in range(min(128, self.layout.slots)):
            slot = (first + probe) % self.layout.slots
            if self.slots[bucket][slot].id != EMPTY:
                return bucket * (self.layout.slots + 1) + slot
        return bucket * (self.layout.slots + 1) + self.layout.slots

    def key(self, slot: NaiveSlot) -> tuple[int, ...]:
        by = {"ttl": (slot.time,), "lru": (slot.last_step,), "lfu": (slot.count, slot.last_step)}
        return by[self.policy.kind]

    def columns(self) -> list[list[list[int]]]:
        names = "id", "last_step", "time", "count"
        return [[[getattr(slot, name) for slot in bucket] for bucket in self.slots] for name in names]


class NaiveIds:
    """A table with candidates."""

    def __init__(self, layout: BucketLayout, policy: EvictionPolicy, admit_after: int) -> None:
        self.table, self.admit_after = NaiveTable(layout, policy), admit_after
        self.candidates = NaiveTable(candidate_layout(layout), EvictionPolicy("lru", protected=0))

    def assign(self, ids: list[int], step: int, time: int) -> tuple[list[int], list[int], int, int]:
        """Return new and evicted ids, and how many wait or have no slot."""
        absent = [key for key in ids if not self.table.use(key, step, time)]
        counting = [key for key in absent if not self.candidates.use(key, step, time)]
        for key in counting if self.admit_after > 1 else []:
            self.candidates.insert(key, step, time)
        admitted = [key for key in absent if self.steps(key) >= self.admit_after]
        had = {key: self.table.insert(key, step, time) for key in admitted}
        new = [key for key in admitted if had[key] is not None]
        for key in new:
            if (slot := self.candidates.find(key)) is not None:
                slot.id = EMPTY
        evicted = [value for value in had.values() if value is not None]
        return new, evicted, len(absent) - len(admitted), len(admitted) - len(new)

    def steps(self, key: int) -> int:
        slot = self.candidates.find(key)
        return 1 if self.admit_after == 1 else 0 if slot is None else slot.count
