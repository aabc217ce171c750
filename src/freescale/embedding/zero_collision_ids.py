"""Dynamic ids: the owner of whole buckets assigns slots to raw ids, admits new ids and evicts old ones.

The result depends on the ids, steps and event times of each bucket only: not on the number of owners, on the order in
which a batch names its ids, on clocks or on random numbers. Arrays are changed in place and are the whole state.
"""

import zlib
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from freescale.data.order import derive_key
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy, SlotArrays, StepTime
from freescale.embedding.zero_collision_native import NativeSlots, fill_initial_rows, load_library
from freescale.embedding.zero_collision_torch import TorchSlots
from freescale.errors import ConfigError
from freescale.hashing import logical_shift_right, splitmix64
from freescale.log import warning_once

_SLOTS_PER_CANDIDATE, _FEWEST_CANDIDATES = 8, 8
_OLDEST = -(1 << 31)
_CACHED_NUMBERS = 1 << 13  # whose hashes stay in a core's cache
_BUCKETS_AT_ONCE = 4096  # whose masks are in memory together


class Slots(Protocol):
    """Lookup and insertion, in C or with torch operators."""

    def find(self, ids: Tensor, now: StepTime | None = None) -> tuple[Tensor, Tensor]:
        """Return rows, and the places of the ids that have no slot."""
        ...

    def insert(self, ids: Tensor, now: StepTime, policy: EvictionPolicy) -> tuple[Tensor, Tensor]:
        """Return the rows of new ids, and the ids that had them."""
        ...

    def sample(self, rows: Tensor) -> Tensor:
        """Return used slots instead of free ones."""
        ...

    def release(self, rows: Tensor) -> None:
        """Free slots."""
        ...


def open_slots(arrays: SlotArrays, layout: BucketLayout, first: int) -> Slots:
    """Return lookup and insertion for the device of the arrays."""
    if arrays.ids.device.type != "cpu":
        return TorchSlots(arrays, layout, first)
    library = load_library()
    if isinstance(library, str):
        warning_once(f"dynamic ids: torch operators because {library}; C code takes a tenth of the time or less")
        return TorchSlots(arrays, layout, first)
    return NativeSlots(arrays, layout, first, library)


class Assignment(NamedTuple):
    """The rows of a step's ids."""

    rows: Tensor
    """Of each id: its slot, or the shared row of its bucket."""
    new: Tensor
    """Places of the ids that got their slot in this step. Their rows have to be initialized."""
    evicted: Tensor
    """The ids that lost these slots; EMPTY where the slot was free."""
    waiting: int
    """Ids with a shared row because they are not admitted yet."""
    without_slot: int
    """Ids with a shared row because no slot of their window is free or may be evicted."""


class RowMoves(NamedTuple):
    """Where rows go when a table grows."""

    before: Tensor
    after: Tensor
    lost: int
    """Ids that have no slot in the grown table."""


class Candidates:
    """Counts the steps that use ids which have no slot yet: a small table of its own, the least recent leave it."""

    policy = EvictionPolicy("lru", protected=0)

    def __init__(self, arrays: SlotArrays, layout: BucketLayout, first: int) -> None:
        self.arrays, self.layout = arrays, candidate_layout(layout)
        self._offset = first * self.layout.stride
        self._slots = open_slots(arrays, self.layout, first)

    def count(self, ids: Tensor, now: StepTime) -> tuple[Tensor, Tensor]:
        """Return the rows of ids in this table, and how many steps have used them (0 if there is no room)."""
        rows, absent = self._slots.find(ids, now)
        rows[absent] = self._slots.insert(ids[absent], now, self.policy)[0]
        return rows, self.arrays.count.view(-1)[rows - self._offset]

    def remove(self, rows: Tensor) -> None:
        """Forget the ids at these rows."""
        self._slots.release(rows)


def candidate_layout(layout: BucketLayout) -> BucketLayout:
    """Return the layout of the candidates of a table."""
    return BucketLayout(layout.buckets, max(_FEWEST_CANDIDATES, layout.slots // _SLOTS_PER_CANDIDATE))


class DynamicIds:
    """The ids of the buckets `owned`, all of them unless told otherwise.

    `admit_after`: an id gets a slot in the n-th step that uses it. Until then, and without a free slot, it has its
    bucket's shared row.
    """

    def __init__(
        self,
        layout: BucketLayout,
        *,
        owned: range | None = None,
        policy: EvictionPolicy | None = None,
        admit_after: int = 1,
        device: torch.device | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        self.layout, self.policy = layout, policy or EvictionPolicy()
        self.policy.check()
        if admit_after < 1:
            what = f"admit_after = {admit_after}: an id is first seen in step 1"
            raise ConfigError(what, remedy="give 1 to admit every id at once")
        self.owned, self.admit_after = owned or range(layout.buckets), admit_after
        state = state or empty_state(layout, len(self.owned), admit_after=admit_after, device=device)
        self.arrays = SlotArrays(*(state[name] for name in SlotArrays._fields))
        self._slots = open_slots(self.arrays, layout, self.owned.start)
        self.candidates: Candidates | None = None
        if admit_after > 1:
            arrays = SlotArrays(*(state[f"candidate_{name}"] for name in SlotArrays._fields))
            self.candidates = Candidates(arrays, layout, self.owned.start)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the row of each id, the shared one of its bucket if it has no slot. Any order; changes nothing."""
        return self._slots.find(ids)[0]

    def assign(self, ids: Tensor, *, step: int, time: int) -> Assignment:
        """Return the rows of a step's ids, and give slots to the new ones.

        `ids`: distinct, ascending, those of all ranks that these buckets hold. `time`: the latest event time of the
        step, in seconds; it matters for the policy `ttl`.
        """
        now = StepTime.of(step, time)
        rows, absent = self._slots.find(ids, now)
        if self.candidates is None:
            places, admitted = None, absent
        else:
            places, steps = self.candidates.count(ids[absent], now)
            is_admitted = steps >= self.admit_after
            places, admitted = places[is_admitted], absent[is_admitted]
        if not len(admitted):  # on a device the host would wait for the sizes of nothing
            return Assignment(rows, admitted, admitted, len(absent), 0)
        inserted, evicted = self._slots.insert(ids[admitted], now, self.policy)
        rows[admitted] = inserted
        has_slot = self.is_slot(inserted).nonzero()[:, 0]  # the host waits once
        new = admitted[has_slot]
        if self.candidates is not None and places is not None:
            self.candidates.remove(places[has_slot])
        return Assignment(rows, new, evicted[has_slot], len(absent) - len(admitted), len(admitted) - len(new))

    def sample(self, numbers: Tensor) -> Tensor:
        """Return the rows of slots by number, as negatives: each has an id.

        A free slot stands for the next used one of its window, or for the shared row if there is none.
        """
        return self.sample_rows(self.layout.slot_row(numbers))

    def sample_rows(self, rows: Tensor) -> Tensor:
        """Do the same for slots by row."""
        return self._slots.sample(rows)

    def is_slot(self, rows: Tensor) -> Tensor:
        """Return which rows are slots and not shared."""
        return self.layout.is_slot(rows)

    def expire(self, *, step: int, time: int) -> int:
        """Free all slots whose time to live has passed; return their number. `assign` does so only where it needs one.

        All owners have to call this in the same steps.
        """
        if self.policy.kind != "ttl":
            return 0
        now, expired = StepTime.of(step, time), 0
        for first in range(0, len(self.owned), _BUCKETS_AT_ONCE):
            ids, last_step, times, _ = (array[first : first + _BUCKETS_AT_ONCE] for array in self.arrays)
            old = (ids != EMPTY) & (last_step < now.step - self.policy.protected)
            old &= times < max(now.time - self.policy.ttl, _OLDEST)
            rows = old.view(-1).nonzero()[:, 0]
            self._slots.release(rows + (self.owned.start + first) * self.layout.stride)
            expired += len(rows)
        return expired

    def identities(self) -> Tensor:
        """Return the ids by row, [rows, 1]: what FBGEMM's `zero_collision_hash` reads (see `fbgemm_arguments`)."""
        return self.arrays.ids.view(-1, 1)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state: tensors of [buckets, ...], so that owners can be changed by cutting the first dimension."""
        state = self.arrays._asdict()
        if self.candidates is not None:
            state |= {f"candidate_{name}": array for name, array in self.candidates.arrays._asdict().items()}
        return state

    def grow(self, slots: int) -> tuple["DynamicIds", RowMoves]:
        """Return a table with so many slots per bucket and the same ids, and where the rows of this one go."""
        layout, first = BucketLayout(self.layout.buckets, slots), self.owned.start
        if slots < self.layout.slots:
            what = f"a table with {self.layout.slots} slots per bucket cannot shrink to {slots}"
            raise ConfigError(what, remedy=f"give it at least {self.layout.slots * self.layout.buckets} slots")
        arrays, moves = move(self.arrays, self.layout, layout, first)
        state = arrays._asdict()
        if self.candidates is not None:
            small = candidate_layout(layout)
            arrays, _ = move(self.candidates.arrays, self.candidates.layout, small, first)
            state |= {f"candidate_{name}": array for name, array in arrays._asdict().items()}
        grown = DynamicIds(layout, owned=self.owned, policy=self.policy, admit_after=self.admit_after, state=state)
        return grown, moves


def empty_state(
    layout: BucketLayout, buckets: int, *, admit_after: int = 1, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Return the state of so many buckets without ids."""
    state = SlotArrays.empty(buckets, layout.slots, device)._asdict()
    if admit_after > 1:
        arrays = SlotArrays.empty(buckets, candidate_layout(layout).slots, device)
        state |= {f"candidate_{name}": array for name, array in arrays._asdict().items()}
    return state


def move(before: SlotArrays, old: BucketLayout, new: BucketLayout, first: int) -> tuple[SlotArrays, RowMoves]:
    """Insert all ids, ascending, into free slots of another layout of the same buckets."""
    after = SlotArrays.empty(len(before.ids), new.slots, before.ids.device)
    used = (before.ids.view(-1) != EMPTY).nonzero()[:, 0]
    ids, order = before.ids.view(-1)[used].sort()
    rows, _ = open_slots(after, new, first).insert(ids, StepTime(0, 0), EvictionPolicy())
    kept = new.is_slot(rows)
    source, target = used[order][kept], rows[kept] - first * new.stride
    for name in ("last_step", "time", "count"):
        getattr(after, name).view(-1)[target] = getattr(before, name).view(-1)[source]
    buckets = torch.arange(first, first + len(before.ids), device=ids.device)
    shared = [buckets * layout.stride + layout.slots for layout in (old, new)]
    moves = torch.cat([source + first * old.stride, shared[0]]), torch.cat([rows[kept], shared[1]])
    return after, RowMoves(*moves, lost=len(ids) - len(target))


def initial_rows(ids: Tensor, dim: int, *, table: str, seed: int, deviation: float) -> Tensor:
    """Return the initial rows of ids, in fp64: a hash of (seed, table, id), whatever slot and rank they are on."""
    key = initial_key(table, seed)
    column, scale = torch.arange(dim, device=ids.device), deviation * 3.0**0.5
    rows = torch.empty(len(ids), dim, dtype=torch.float64, device=ids.device)
    library = load_library() if ids.device.type == "cpu" else ""
    if not isinstance(library, str):
        fill_initial_rows(rows, ids, key=key, scale=scale, library=library)
        return rows
    chunk = max(1, _CACHED_NUMBERS // dim) if ids.device.type == "cpu" else max(1, len(ids))
    for part, values in zip(ids.split(chunk), rows.split(chunk), strict=True):
        number = splitmix64(splitmix64(part ^ key)[:, None] + column)
        unit = logical_shift_right(number, 11).to(torch.float64).mul_(2.0**-53)
        torch.mul(unit.mul_(2.0).sub_(1.0), scale, out=values)
    return rows


def initial_key(table: str, seed: int) -> int:
    """Return what the initial rows of a table are hashed with."""
    return int(derive_key(seed, zlib.crc32(table.encode())).view("int64")[0])


def fbgemm_arguments(ids: Tensor, layout: BucketLayout) -> tuple[Tensor, Tensor]:
    """Return `local_sizes` and `offsets` with which FBGEMM's `zero_collision_hash` finds the rows of ids."""
    return torch.full_like(ids, layout.slots), layout.bucket_of(ids) * layout.stride
