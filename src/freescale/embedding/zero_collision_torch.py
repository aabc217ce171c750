"""Lookup and insertion in a zero-collision table with torch operators: for GPUs, and for CPUs without a C compiler.

Bit for bit what zero_collision.c computes. New ids are sorted by bucket. A round inserts at most one id per bucket, in
ascending order inside each, so that no two of a round meet in a slot: no atomics, and the result of one insertion after
the other. A step has as many rounds as its fullest bucket has new ids, a handful.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy, SlotArrays, StepTime

_CHUNK = 1 << 16  # ids whose windows are read at once, 64 MB
_FREE, _NEVER = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


class TorchSlots:
    """The slots of the buckets from `first` on. Rows are those of the whole table."""

    def __init__(self, arrays: SlotArrays, layout: BucketLayout, first: int) -> None:
        self._layout, self._owned = layout, range(first, first + len(arrays.ids))
        self._ids, self._last_step, self._time, self._count = (array.view(-1) for array in arrays)

    def find(self, ids: Tensor, now: StepTime | None = None) -> tuple[Tensor, Tensor]:
        """Return the row of each id, the shared one of its bucket if it has no slot, and the places of the latter.

        With a step, note that it uses the others.
        """
        is_foreign = self._layout.is_foreign(ids, self._owned)
        rows = torch.empty_like(ids)
        for part, row in zip(ids.split(_CHUNK), rows.split(_CHUNK), strict=True):
            window, shared = self._windows(part)
            valid = window.clamp(0, len(self._ids) - 1)  # a foreign id has no window here
            row.copy_(_at_first(self._ids[valid] == part[:, None], window, shared))
        found = self._ids[rows.clamp(0, len(self._ids) - 1)] == ids
        absent, foreign = _places(found.logical_not(), is_foreign)
        if foreign:
            raise self._layout.foreign_ids(ids, self._owned)
        if now is not None:
            self._note_uses(rows, found, now)
        return rows + self._offset, absent

    def insert(self, ids: Tensor, now: StepTime, policy: EvictionPolicy) -> tuple[Tensor, Tensor]:
        """Give slots to ascending ids that have none; return their rows, and the ids that had them (or EMPTY)."""
        rows, evicted = torch.empty_like(ids), torch.empty_like(ids)
        for place in self._rounds(ids):
            new = ids[place]
            window, shared = self._windows(new)
            row = _at_first(self._is_best(window, now, policy), window, shared)
            taken = row != shared
            rows[place], evicted[place] = row, self._ids[row]
            self._ids[row] = torch.where(taken, new, EMPTY)
            self._last_step[row] = torch.where(taken, now.step, self._last_step[row])
            self._time[row] = torch.where(taken, now.time, self._time[row])
            self._count[row] = torch.where(taken, 1, self._count[row])
        return rows + self._offset, evicted

    def release(self, rows: Tensor) -> None:
        """Free the slots at rows."""
        self._ids[rows - self._offset] = EMPTY

    def sample(self, rows: Tensor) -> Tensor:
        """Return for each slot the row of the first used one of the window that begins there, or the shared row."""
        found = torch.empty_like(rows)
        for part, row in zip(rows.split(_CHUNK), found.split(_CHUNK), strict=True):
            local = part - self._offset
            slot = local % self._layout.stride
            window, shared = self._windows_at(local - slot, slot)
            row.copy_(_at_first(self._ids[window] != EMPTY, window, shared))
        return found + self._offset

    def _note_uses(self, rows: Tensor, found: Tensor, now: StepTime) -> None:
        """Note that a step uses rows. A second note of a step is void. Shared rows keep what they have."""
        last_step, time = self._last_step[rows], self._time[rows]
        new = found & (last_step != now.step)
        self._last_step[rows] = torch.where(new, now.step, last_step)
        self._time[rows] = torch.where(new, time.clamp(min=now.time), time)
        self._count[rows] += new.to(torch.int32)

    @property
    def _offset(self) -> int:
        return self._owned.start * self._layout.stride

    def _windows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots that each id may have, in the order of probing, and the shared row."""
        begin = (self._layout.bucket_of(ids) - self._owned.start) * self._layout.stride
        return self._windows_at(begin, self._layout.first_slot(ids))

    def _windows_at(self, begin: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows that begin at slots of the buckets whose first rows are `begin`, and the shared rows."""
        probe = torch.arange(self._layout.window, device=slot.device)
        return begin[:, None] + (slot[:, None] + probe) % self._layout.slots, begin + self._layout.slots

    def _rounds(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the places of ids: in every round one of each bucket that has more, the smallest first."""
        bucket, order = self._layout.bucket_of(ids).sort(stable=True)
        ordinal = torch.arange(len(ids), device=ids.device) - torch.searchsorted(bucket, bucket)
        by_round = ordinal.argsort(stable=True)
        sizes = torch.zeros_like(ordinal).scatter_add_(0, ordinal, torch.ones_like(ordinal))
        yield from order[by_round].split([size for size in sizes.tolist() if size])  # the host waits once

    def _is_best(self, window: Tensor, now: StepTime, policy: EvictionPolicy) -> Tensor:
        """Return which slots of a window are the best for a new id. Free ones are better than all others."""
        key = torch.where(self._ids[window] == EMPTY, _FREE, self._eviction_key(window, now, policy))
        best = key.amin(1, keepdim=True)
        return (key == best) & (best < _NEVER)

    def _eviction_key(self, window: Tensor, now: StepTime, policy: EvictionPolicy) -> Tensor:
        """Return a key per slot: the smallest is evicted, _NEVER is not."""
        if policy.kind == "none":
            return torch.full_like(window, _NEVER)
        last_step = self._last_step[window].to(torch.int64)
        evictable = now.step - last_step > policy.protected
        key = last_step
        if policy.kind == "lfu":
            key = (self._count[window].to(torch.int64) << 32) | last_step
        if policy.kind == "ttl":
            key = self._time[window].to(torch.int64)
            evictable &= now.time - key > policy.ttl
        return torch.where(evictable, key, _NEVER)


def _places(marks: Tensor, faults: Tensor) -> tuple[Tensor, int]:
    """Return the places of marks, and the number of faults. The host waits once."""
    count, faulty = torch.stack([marks.sum(), faults.sum()]).tolist()
    order = torch.where(marks, 0, 1).argsort(stable=True)
    return order[:count], faulty


def _at_first(marks: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
    """Return the value at the first mark of each row. (`argmax` may return any.)"""
    columns = marks.shape[1]
    first = torch.where(marks, torch.arange(columns, device=marks.device), columns).amin(1)
    value = values.gather(1, first.clamp(max=columns - 1)[:, None])[:, 0]
    return torch.where(first < columns, value, otherwise)
