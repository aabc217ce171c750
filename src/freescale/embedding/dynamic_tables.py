"""Dynamic ids in training: the owner of their buckets turns requested ids into rows, and initializes those of new ids.

A plan of an exchange holds ids instead of rows for these tables until `assign` or `look_up` has replaced them; of items
also slots by number, which are negatives. `assign` depends on the ids of all ranks, the step and the event time alone,
so the schedule, the world size and a restart change nothing. A second call for the same step changes nothing either: a
resumed run repeats what a prefetch has done.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.config import FeatureConfig, RunConfig
from freescale.data.vocabulary import FIRST_SLOT
from freescale.embedding.exchange import AllToAllPlan
from freescale.embedding.ids import deduplicate, deduplicate_up_to
from freescale.embedding.tables import RowKeys, Table
from freescale.embedding.zero_collision_ids import Assignment, DynamicIds, candidate_layout, initial_rows
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy
from freescale.transport.c10d import C10d

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
    """What happened to the ids of this rank's buckets since it was last reported."""

    new: int = 0
    evicted: int = 0
    waiting: int = 0
    """Uses of a shared row by ids that are not admitted yet."""
    without_slot: int = 0
    """Uses of a shared row by ids for which there was no slot."""

    def add(self, assignment: Assignment, evicted: int) -> "DynamicCounts":
        """Return the counts with those of a step."""
        more = len(assignment.new), evicted, assignment.waiting, assignment.without_slot
        return DynamicCounts(*(a + b for a, b in zip(self, more, strict=True)))


class _OwnedIds:
    """The ids of one table in the buckets of this rank, and their rows."""

    def __init__(self, table: Table, feature: FeatureConfig, rank: int, world_size: int, device: torch.device) -> None:
        assert table.layout is not None
        self.table, self.layout, self._feature = table, table.layout, feature
        self._owned = self.layout.owned(rank, world_size)
        self.first = self._owned.start * self.layout.stride
        self.counts, self.used = DynamicCounts(), 0
        """Changes since they were last reported, and slots in use."""
        self.ids = self._open(None, device)

    def _open(self, state: dict[str, Tensor] | None, device: torch.device | None = None) -> DynamicIds:
        policy = EvictionPolicy(self._feature.eviction, self._feature.ttl)
        admit = self._feature.admit_after
        return DynamicIds(self.layout, owned=self._owned, policy=policy, admit_after=admit, device=device, state=state)

    def reopen(self) -> None:
        """Adopt arrays whose contents a checkpoint has replaced."""
        self.ids = self._open(self.ids.state_dict())
        self.used = int((self.ids.identities() != EMPTY).sum())

    def assign(self, unique: Tensor, *, step: int, time: int) -> Assignment:
        """Give slots to new ids of a step."""
        time = time if self._feature.eviction == "ttl" else min(max(time, 0), _LATEST)
        return self.ids.assign(unique, step=step, time=time)

    def count(self, found: Assignment, *, evicted: int) -> None:
        """Count what a step has changed."""
        self.counts, self.used = self.counts.add(found, evicted), self.used + len(found.new) - evicted

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
            slots, unique, index = owned.distinct(ids)
            found = owned.assign(unique, step=step, time=plan.latest)
            lost = (found.evicted != EMPTY).nonzero()[:, 0] if len(found.new) else found.new
            owned.count(found, evicted=len(lost))
            new = found.rows[found.new] - owned.first
            self._initialize(owned, new, unique[found.new])
            if owned.table.sampled:
                evicted[owned.table.name] = new[lost] + self._first_rows.get(owned.table.name, 0)
            return torch.cat([owned.ids.sample(slots), found.rows])[index]

        return self._with_rows(plan, rows_of), evicted

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

    def reduce_counts(self, transport: C10d) -> dict[str, float]:
        """Return what happened in each table since the last call, and its load, over all ranks: `ids/TABLE/new`."""
        counts = torch.tensor([[*owned.counts, owned.used] for owned in self._owned.values()])
        totals = transport.reduce_values(counts.flatten(), name="dynamic ids").view(counts.shape).tolist()
        found: dict[str, float] = {}
        for (name, owned), (*changes, used) in zip(self._owned.items(), totals, strict=True):
            found |= {f"ids/{name}/{what}": n for what, n in zip(DynamicCounts._fields, changes, strict=True)}
            found[f"ids/{name}/load"] = used / (owned.layout.buckets * owned.layout.slots)
            owned.counts = DynamicCounts()
        return found

    def state(self) -> dict[str, SlotState]:
        """Return the arrays of all slots, which `reopen` adopts when their contents were replaced."""
        return {name: array for owned in self._owned.values() for name, array in owned.state().items()}

    def reopen(self) -> None:
        """Adopt the contents of the arrays."""
        for owned in self._owned.values():
            owned.reopen()
