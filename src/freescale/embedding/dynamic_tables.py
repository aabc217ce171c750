"""Dynamic ids in training: the owner of their buckets turns requested ids into rows, and initializes those of new ids.

A plan of an exchange holds ids instead of rows for these tables until `assign` or `look_up` has replaced them; of items
also slots by number, which are negatives. `assign` depends on the ids of all ranks, the step and the event time alone,
so the schedule, the world size and a restart change nothing. A second call for the same step changes nothing either: a
resumed run repeats what a prefetch has done.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from freescale.config import FeatureConfig, RunConfig
from freescale.data.vocabulary import FIRST_SLOT
from freescale.embedding.exchange import AllToAllPlan
from freescale.embedding.ids import deduplicate, deduplicate_up_to
from freescale.embedding.tables import RowKeys, Table
from freescale.embedding.zero_collision_ids import Assignment, DynamicIds, candidate_layout, initial_rows
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy
from freescale.errors import DataError
from freescale.kernel_selection import uses_kernels
from freescale.transport.c10d import C10d

if TYPE_CHECKING:
    from freescale.embedding.zero_collision_launch import MaskedAssignment

_LATEST = (1 << 32) - 1
"""Slots store event times in 32 bits."""


class SlotState(NamedTuple):
    """One array of the slots of this rank, for checkpoints."""

    local: Tensor
    first: int
    """Position of its first entry in the array of all ranks."""
    total: int
    """Entries of that array."""


class DynamicCounts(NamedTuple):
    """What has happened to the ids of this rank's buckets."""

    new: int = 0
    evicted: int = 0
    waiting: int = 0
    """Uses of a shared row by ids that are not admitted yet."""
    without_slot: int = 0
    """Uses of a shared row by ids for which there was no slot."""

    def add(self, more: Sequence[int], sign: int = 1) -> "DynamicCounts":
        """Return the counts with more of them, or with `sign` = -1 fewer."""
        return DynamicCounts(*(a + sign * b for a, b in zip(self, more, strict=True)))


class DeviceCounts:
    """Counts that one thread adds up on a device. Another thread reads them, and only then does the host wait."""

    def __init__(self, device: torch.device) -> None:
        self.faults = torch.zeros(1, dtype=torch.int64, device=device)
        """Becomes 1 when an id is not of the buckets of this rank."""
        sums = torch.zeros(len(DynamicCounts._fields) + 1, dtype=torch.int64, device=device)
        self._latest = sums, torch.accelerator.current_stream(device).record_event()
        """Counts and faults, and when they are computed."""

    def add(self, masks: Sequence[Tensor]) -> None:
        """Add the number of marks of each mask."""
        sums = self._latest[0] + torch.cat([torch.stack([mask.sum() for mask in masks]), self.faults])
        self._latest = sums, torch.accelerator.current_stream(sums.device).record_event()

    def read(self) -> DynamicCounts:
        """Return the counts so far. Raise if an id was sent to the wrong rank."""
        sums, computed = self._latest
        stream = torch.accelerator.current_stream(sums.device)
        stream.wait_event(computed)
        sums.record_stream(stream)
        *counts, faults = sums.tolist()
        if faults:
            what = "this rank got an id that is not in its buckets"
            raise DataError(what, remedy="ranks exchange ids wrongly: report it with the config of the run")
        return DynamicCounts(*counts)


class _OwnedIds:
    """The ids of one table in the buckets of this rank, and their rows."""

    def __init__(self, table: Table, feature: FeatureConfig, rank: int, world_size: int, device: torch.device) -> None:
        assert table.layout is not None
        self.table, self.layout, self._feature = table, table.layout, feature
        self._owned = self.layout.owned(rank, world_size)
        self.first = self._owned.start * self.layout.stride
        self.counts, self._reported = DynamicCounts(), DynamicCounts()
        self.used = 0
        """Slots in use when the arrays were opened."""
        self.device_counts = None if device.type == "cpu" else DeviceCounts(device)
        self.ids = self._open(None, device)

    def _open(self, state: dict[str, Tensor] | None, device: torch.device | None = None) -> DynamicIds:
        policy = EvictionPolicy(self._feature.eviction, self._feature.ttl)
        admit = self._feature.admit_after
        return DynamicIds(self.layout, owned=self._owned, policy=policy, admit_after=admit, device=device, state=state)

    def reopen(self) -> None:
        """Adopt arrays whose contents a checkpoint has replaced."""
        self.ids = self._open(self.ids.state_dict())
        counts = self._read_counts()
        self.used = int((self.ids.identities() != EMPTY).sum()) - counts.new + counts.evicted

    def assign(self, unique: Tensor, *, step: int, time: int) -> Assignment:
        """Give slots to new ids of a step."""
        return self.ids.assign(unique, step=step, time=self._stored(time))

    def assign_masked(self, requests: Tensor, is_wanted: Tensor, *, step: int, time: int) -> "MaskedAssignment":
        """Give slots to new ids of a step, without waiting for the device."""
        from freescale.embedding.zero_collision_launch import assign_masked

        assert self.device_counts is not None
        faults = self.device_counts.faults
        return assign_masked(self.ids, requests, is_wanted, faults, step=step, time=self._stored(time))

    def _stored(self, time: int) -> int:
        """Return an event time within the range of slots, unless it decides what is evicted."""
        return time if self._feature.eviction == "ttl" else min(max(time, 0), _LATEST)

    def _read_counts(self) -> DynamicCounts:
        return self.counts if self.device_counts is None else self.counts.add(self.device_counts.read())

    def take_counts(self) -> tuple[DynamicCounts, int]:
        """Return what has happened since the last call, and the slots in use."""
        counts = self._read_counts()
        changes, self._reported = counts.add(self._reported, -1), counts
        return changes, self.used + counts.new - counts.evicted

    def distinct(self, requests: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distinct slots, by number, and the distinct ids of requests, and the place of each request."""
        if not self.table.sampled:
            unique, index = deduplicate(requests, rows=None)
            return unique[:0], unique, index
        (unique, index), slots = deduplicate_up_to(requests, FIRST_SLOT)
        return FIRST_SLOT - unique[:slots], unique[slots:], index

    def state(self) -> dict[str, SlotState]:
        """Return all arrays."""
        found = {}
        for name, array in self.ids.state_dict().items():
            layout: BucketLayout = candidate_layout(self.layout) if name.startswith("candidate_") else self.layout
            first = self._owned.start * layout.stride
            found[f"{self.table.name}.{name}"] = SlotState(array.view(-1), first, layout.rows)
        return found


class DynamicTables:
    """The tables of a training whose ids are dynamic. `weights`: the local rows and their optimizer state, by name."""

    def __init__(
        self,
        tables: Sequence[Table],
        weights: Mapping[str, Tensor],
        config: RunConfig,
        *,
        rank: int,
        world_size: int,
        first_rows: Mapping[str, int],
    ) -> None:
        self._weights, self._config, self._first_rows = weights, config, first_rows
        self._owned = {
            table.name: _OwnedIds(
                table, config.dynamic_tables[table.name], rank, world_size, weights[table.name].device
            )
            for table in tables
            if table.layout is not None
        }
        keys = RowKeys(tables, world_size).first_keys()
        self._first_key = {table.name: key for table, key in zip(tables, keys, strict=True)}

    def assign(self, plan: AllToAllPlan, *, step: int) -> tuple[AllToAllPlan, dict[str, Tensor]]:
        """Replace the ids of a plan by rows. New ids get slots, whose rows are initialized.

        Also return the local rows, of each table with sampled slots, that other ids had.
        """
        evicted: dict[str, Tensor] = {}

        def rows_of(owned: _OwnedIds, ids: Tensor) -> Tensor:
            is_masked = uses_kernels(ids, "dynamic ids")
            assign = self._assign_masked if is_masked else self._assign_compact
            rows, lost = assign(owned, ids, step=step, time=plan.latest)
            if owned.table.sampled:
                evicted[owned.table.name] = lost - owned.first + self._first_rows.get(owned.table.name, 0)
            return rows

        return self._with_rows(plan, rows_of), evicted

    def _assign_compact(self, owned: _OwnedIds, ids: Tensor, *, step: int, time: int) -> tuple[Tensor, Tensor]:
        """Return the row of each request, and the rows that other ids had."""
        slots, unique, index = owned.distinct(ids)
        found = owned.assign(unique, step=step, time=time)
        lost = (found.evicted != EMPTY).nonzero()[:, 0] if len(found.new) else found.new
        owned.counts = owned.counts.add([len(found.new), len(lost), found.waiting, found.without_slot])
        new = found.rows[found.new]
        self._initialize(owned, new - owned.first, unique[found.new])
        return torch.cat([owned.ids.sample(slots), found.rows])[index], new[lost]

    def _assign_masked(self, owned: _OwnedIds, ids: Tensor, *, step: int, time: int) -> tuple[Tensor, Tensor]:
        """Do the same without waiting for the device. Rows that no id had are those before the first one."""
        ordered, order = ids.sort()
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[1:] = ordered[1:] != ordered[:-1]
        is_id = ordered > FIRST_SLOT if owned.table.sampled else torch.ones_like(is_first)
        found = owned.assign_masked(ordered, is_first & is_id, step=step, time=time)
        is_lost = found.is_new & (found.evicted != EMPTY)
        assert owned.device_counts is not None
        owned.device_counts.add([found.is_new, is_lost, found.is_waiting, found.is_without_slot])
        self._initialize_masked(owned, found, ordered)
        first = torch.where(is_first, torch.arange(len(ordered), device=ids.device), 0).cummax(0).values
        rows = found.rows[first]
        if owned.table.sampled:
            slots = owned.layout.slot_row((FIRST_SLOT - ordered).clamp(min=0))
            rows = torch.where(is_id, rows, owned.ids.sample_rows(torch.where(is_id, owned.first, slots)))
        return torch.empty_like(rows).scatter_(0, order, rows), torch.where(is_lost, found.rows, owned.first - 1)

    def look_up(self, plan: AllToAllPlan) -> AllToAllPlan:
        """Replace the ids of a plan by rows, and change nothing: ids without a slot have a shared row."""

        def rows_of(owned: _OwnedIds, ids: Tensor) -> Tensor:
            slots, unique, index = owned.distinct(ids)
            return torch.cat([owned.layout.slot_row(slots), owned.ids.lookup(unique)])[index]

        return self._with_rows(plan, rows_of)

    def identify(self, plan: AllToAllPlan, name: str) -> Tensor:
        """Return the number of the slot of each requested id, and the id in each requested slot; EMPTY for none."""
        owned, requests = self._owned[name], plan.local_keys[name]
        slots, unique, index = owned.distinct(requests)
        ids = owned.ids.identities()[owned.layout.slot_row(slots) - owned.first, 0]
        return torch.cat([ids, owned.layout.slot_number(owned.ids.lookup(unique))])[index]

    def _with_rows(self, plan: AllToAllPlan, rows_of: Callable[[_OwnedIds, Tensor], Tensor]) -> AllToAllPlan:
        rows, keys = plan.local_rows, plan.local_keys
        for name, owned in self._owned.items():
            row = rows_of(owned, keys[name])
            keys[name] = row + self._first_key[name]
            rows[name] = row - owned.first + self._first_rows.get(name, 0)
        return plan._replace(rows=torch.cat([*rows.values()]), keys=torch.cat([*keys.values()]))

    def _initialize(self, owned: _OwnedIds, rows: Tensor, ids: Tensor) -> None:
        """Write the initial values of ids: those of their last owner are gone."""
        if not len(rows):
            return
        name, weight = owned.table.name, self._weights[owned.table.name]
        seed, deviation = self._config.seed, self._config.tables.init
        initial = initial_rows(ids, owned.table.dim, table=name, seed=seed, deviation=deviation)
        weight[rows] = initial.to(weight.dtype)
        if f"{name}.sum" in self._weights:
            self._weights[f"{name}.sum"][rows] = 0.0

    def _initialize_masked(self, owned: _OwnedIds, found: "MaskedAssignment", ids: Tensor) -> None:
        """Write the initial values of new ids, without waiting for the device."""
        from freescale.embedding.zero_collision_launch import initialize_rows

        name, sums = owned.table.name, self._weights.get(f"{owned.table.name}.sum")
        drawn = {"table": name, "seed": self._config.seed, "deviation": self._config.tables.init}
        initialize_rows(self._weights[name], sums, found.rows - owned.first, ids, found.is_new, **drawn)

    def reduce_counts(self, transport: C10d) -> dict[str, float]:
        """Return what happened in each table since the last call, and its load, over all ranks: `ids/TABLE/new`."""
        taken = [owned.take_counts() for owned in self._owned.values()]
        counts = torch.tensor([[*changes, used] for changes, used in taken])
        totals = transport.reduce_values(counts.flatten(), name="dynamic ids").view(counts.shape).tolist()
        found: dict[str, float] = {}
        for (name, owned), (*changes, used) in zip(self._owned.items(), totals, strict=True):
            found |= {f"ids/{name}/{what}": n for what, n in zip(DynamicCounts._fields, changes, strict=True)}
            found[f"ids/{name}/load"] = used / (owned.layout.buckets * owned.layout.slots)
        return found

    def state(self) -> dict[str, SlotState]:
        """Return the arrays of all slots, which `reopen` adopts when their contents were replaced."""
        return {name: array for owned in self._owned.values() for name, array in owned.state().items()}

    def reopen(self) -> None:
        """Adopt the contents of the arrays."""
        for owned in self._owned.values():
            owned.reopen()
