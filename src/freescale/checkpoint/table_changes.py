"""Dynamic tables that differ from a checkpoint: they have grown since, or had a fixed vocabulary then.

A table that grows keeps its buckets, and each of them gets more slots. Its owner reads the old slots and inserts their
ids, ascending, into the new ones: the result depends on the ids of a bucket only, not on the world size. A vocabulary
becomes dynamic in the same way: the id of a row is its number in the vocabulary, which is what the data holds. Every id
takes its row and its optimizer state along.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freescale import config as configs
from freescale.checkpoint import tensor_files
from freescale.checkpoint.tensor_files import LocalRows, MismatchError
from freescale.data.vocabulary import MISSING_ID
from freescale.embedding.row_order import RowOrder
from freescale.embedding.sharded import ShardedTables
from freescale.embedding.tables import Table
from freescale.embedding.zero_collision_ids import DynamicIds, candidate_layout
from freescale.embedding.zero_collision_layout import BucketLayout, SlotArrays

_POSITIONS_AT_ONCE = 1 << 20
"""Of a vocabulary table, which every rank reads whole."""
_MORE_ROWS = "give it more rows: 4/3 of its ids, and at least 65,536"


class TableChange(NamedTuple):
    """A dynamic table, and what a checkpoint holds of it."""

    checkpoint: Path
    facts: Mapping[str, Any]
    table: Table
    stored: RowOrder
    """Rows of the stored table, and their positions."""
    dynamic: bool
    """Whether it was dynamic already."""

    @property
    def layout(self) -> BucketLayout:
        """Buckets and slots now."""
        assert self.table.layout is not None
        return self.table.layout

    def load(self, tensors: Mapping[str, LocalRows]) -> None:
        """Load the table. `tensors`: all of a model."""
        name = f"tables.{self.table.name}"
        own = {n.removeprefix(name).lstrip("."): rows for n, rows in tensors.items() if f"{n}.".startswith(f"{name}.")}
        (self._grow if self.dynamic else self._convert)(own)

    def _grow(self, own: Mapping[str, LocalRows]) -> None:
        """Insert the ids of the buckets of this rank into more slots."""
        small, owned = self._stored_layout(), self._owned(own)
        before = {}
        for name, rows in own.items():
            layout = candidate_layout(small) if name.startswith("candidate_") else small
            local = rows.local.new_empty(len(owned) * layout.stride, *rows.local.shape[1:])
            before[name] = LocalRows(local, owned.start * layout.stride, RowOrder(layout.rows, shards=1))
        self._read(before)
        arrays = {name: rows.local.view(len(owned), -1) for name, rows in before.items() if name not in ("", "sum")}
        waits = 2 if any(name.startswith("candidate_") for name in arrays) else 1
        grown, moves = DynamicIds(small, owned=owned, admit_after=waits, state=arrays).grow(self.layout.slots)
        self._require_slots(moves.lost)
        _copy_slots(grown, own)
        for name in own.keys() & {"", "sum"}:
            rows = before[name].local[moves.before - before[name].first]
            own[name].local.detach()[moves.after - own[name].first] = rows

    def _convert(self, own: Mapping[str, LocalRows]) -> None:
        """Give slots to the numbers of a vocabulary. They count as used in the last step, at the oldest time."""
        owned, device = self._owned(own), own["ids"].local.device
        ids, numbers = self._vocabulary()
        mine = ~self.layout.is_foreign(ids, owned)
        ids, numbers = ids[mine].to(device), numbers[mine]
        table = DynamicIds(self.layout, owned=owned, device=device)
        found = table.assign(ids, step=max(0, self.facts["step"] - 1), time=0)
        self._require_slots(found.without_slot)
        _copy_slots(table, own)
        target = torch.full((self.stored.rows,), -1)
        target[numbers] = found.rows.cpu() - own[""].first
        for name in own.keys() & {"", "sum"}:
            for stored, rows in self._stored_rows(own[name], name):
                row = target[stored]
                own[name].local.detach()[row[row >= 0].to(device)] = rows[row >= 0].to(device)

    def _vocabulary(self) -> tuple[Tensor, Tensor]:
        """Return the ids of the vocabulary, ascending, and their rows. Rows that unknown ids shared have no id."""
        config = configs.parse(self.facts["config"], where=str(self.checkpoint))
        users = [feature for name, feature in config.features.items() if (feature.table or name) == self.table.name]
        missing = any(feature.missing == "default" for feature in users)
        numbers = torch.arange(self.stored.rows - config.data.oov_rows - missing)
        if not missing:
            return numbers, numbers
        last = torch.tensor([self.stored.rows - 1])
        return torch.cat([torch.tensor([MISSING_ID]), numbers]), torch.cat([last, numbers])

    def _stored_rows(self, like: LocalRows, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the numbers of stored rows, and their values, part by part."""
        for first in range(0, self.stored.positions, _POSITIONS_AT_ONCE):
            count = min(_POSITIONS_AT_ONCE, self.stored.positions - first)
            rows = torch.empty(count, *like.local.shape[1:], dtype=like.local.dtype)
            self._read({name: LocalRows(rows, first, self.stored)})
            numbers = torch.from_numpy(self.stored.rows_at(np.arange(first, first + count)))
            yield numbers[numbers >= 0], rows[numbers >= 0]

    def _read(self, rows: Mapping[str, LocalRows]) -> None:
        name = f"tables.{self.table.name}"
        named = {f"{name}.{short}" if short else name: local for short, local in rows.items()}
        tensor_files.read(self.checkpoint, self.facts["ranks"], named)

    def _owned(self, own: Mapping[str, LocalRows]) -> range:
        """Return the buckets of this rank."""
        first, stride = own["ids"].first, self.layout.stride
        return range(first // stride, (first + len(own["ids"].local)) // stride)

    def _stored_layout(self) -> BucketLayout:
        """Return buckets and slots of the checkpoint. Refuse fewer slots than that."""
        buckets = self.facts.get("buckets", {}).get(self.table.name, self.layout.buckets)
        slots = self.stored.rows // buckets - 1
        if buckets == self.layout.buckets and slots < self.layout.slots:
            return BucketLayout(buckets, slots)
        what = f"table '{self.table.name}' has {buckets * slots:,} slots there, and cannot shrink to"
        what += f" {self.layout.buckets * self.layout.slots:,}"
        raise MismatchError(what, where=str(self.checkpoint), remedy=f"give it at least {buckets * slots} rows")

    def _require_slots(self, lost: int) -> None:
        if lost:
            slots = self.layout.buckets * self.layout.slots
            what = f"{lost:,} ids of table '{self.table.name}' would find no slot among {slots:,}, and lose their rows"
            raise MismatchError(what, where=str(self.checkpoint), remedy=_MORE_ROWS)


def find_changes(checkpoint: Path, facts: Mapping[str, Any], tables: ShardedTables) -> list[TableChange]:
    """Return the dynamic tables whose rows differ from those of a checkpoint."""
    stored, changes = tensor_files.stored_rows(checkpoint, facts["ranks"]), []
    for table in [table for table in tables.tables if table.layout is not None]:
        weights = stored.get(f"tables.{table.name}")
        dynamic = f"tables.{table.name}.ids" in stored
        if weights is not None and (not dynamic or weights != table.order):
            changes.append(TableChange(checkpoint, facts, table, weights, dynamic))
    return changes


def _copy_slots(table: DynamicIds, own: Mapping[str, LocalRows]) -> None:
    """Copy the slots of a table to those of the training. What it lacks, candidates, becomes empty."""
    arrays = table.state_dict()
    for name, rows in own.items():
        if name in arrays:
            rows.local.copy_(arrays[name].view(-1))
        elif name.startswith("candidate_"):
            buckets = len(table.owned)
            empty = SlotArrays.empty(buckets, len(rows.local) // buckets - 1, rows.local.device)
            rows.local.copy_(getattr(empty, name.removeprefix("candidate_")).view(-1))
