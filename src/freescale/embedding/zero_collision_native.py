"""Lookup and insertion in a zero-collision table by zero_collision.c: for CPUs. The same as `TorchSlots`."""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from freescale.embedding.zero_collision_layout import BucketLayout, EvictionPolicy, SlotArrays, StepTime
from freescale.native import compile_and_load

_Count, _Pointer = ctypes.c_int64, ctypes.c_void_p
_KINDS = ("none", "ttl", "lru", "lfu")
_WORD = 8  # tags are read by words


class _Table(ctypes.Structure):
    """The struct `table` of zero_collision.c."""

    _fields_ = (
        *((name, _Count) for name in ("bits", "first", "buckets", "slots", "window")),
        *((name, _Pointer) for name in ("ids", "last_step", "time", "count", "tags")),
    )


class _Policy(ctypes.Structure):
    """The struct `policy` of zero_collision.c."""

    _fields_ = tuple((name, _Count) for name in ("kind", "ttl", "protected", "step", "time"))


@lru_cache
def load_library() -> ctypes.CDLL | str:
    """Compile and load zero_collision.c; return the reason if that fails."""
    library = compile_and_load(Path(__file__).with_name("zero_collision.c"))
    if not isinstance(library, str):
        library.find.restype = _Count
    return library


class NativeSlots:
    """The slots of the buckets from `first` on. Rows are those of the whole table.

    Tags are computed here, one byte per slot, so that nothing else may change the ids of the arrays.
    """

    def __init__(self, arrays: SlotArrays, layout: BucketLayout, first: int, library: ctypes.CDLL) -> None:
        self._arrays = arrays
        self._library = library
        self._layout, self._owned = layout, range(first, first + len(arrays.ids))
        sizes = layout.buckets.bit_length() - 1, first, len(arrays.ids), layout.slots, layout.window
        self._tags = torch.empty(arrays.ids.numel() + _WORD, dtype=torch.uint8)
        self._table = ctypes.byref(_Table(*sizes, *map(Tensor.data_ptr, (*arrays, self._tags))))
        library.compute_tags(self._table)

    def find(self, ids: Tensor, now: StepTime | None = None) -> tuple[Tensor, Tensor]:
        """Return the row of each id, the shared one of its bucket if it has no slot, and the places of the latter.

        With a step, note that it uses the others.
        """
        ids = ids.contiguous()
        rows, absent = torch.empty_like(ids), torch.empty_like(ids)
        step, time = now or (-1, 0)
        missing = self._library.find(
            self._table, _address(ids), *map(_Count, (len(ids), step, time)), _address(rows), _address(absent)
        )
        if missing < 0:
            raise self._layout.foreign_ids(ids, self._owned)
        return rows, absent[:missing].clone()

    def insert(self, ids: Tensor, now: StepTime, policy: EvictionPolicy) -> tuple[Tensor, Tensor]:
        """Give slots to ascending ids that have none; return their rows, and the ids that had them (or EMPTY)."""
        ids = ids.contiguous()
        rows, evicted = torch.empty_like(ids), torch.empty_like(ids)
        by = _Policy(_KINDS.index(policy.kind), policy.ttl, policy.protected, now.step, now.time)
        self._library.insert(
            self._table, _address(ids), _Count(len(ids)), ctypes.byref(by), _address(rows), _address(evicted)
        )
        return rows, evicted

    def sample(self, rows: Tensor) -> Tensor:
        """Return for each slot the row of the first used one of the window that begins there, or the shared row."""
        rows = rows.contiguous()
        found = torch.empty_like(rows)
        self._library.sample(self._table, _address(rows), _Count(len(rows)), _address(found))
        return found

    def release(self, rows: Tensor) -> None:
        """Free the slots at rows."""
        rows = rows.contiguous()
        self._library.release(self._table, _address(rows), _Count(len(rows)))


def fill_initial_rows(rows: Tensor, ids: Tensor, *, key: int, scale: float, library: ctypes.CDLL) -> None:
    """Write the initial rows of ids, as `zero_collision_ids.initial_rows` does with torch operators."""
    sizes = map(_Count, (len(ids), rows.shape[1], key))
    library.initial_rows(_address(ids.contiguous()), *sizes, ctypes.c_double(scale), _address(rows))


def _address(x: Tensor) -> ctypes.c_void_p:
    return _Pointer(x.data_ptr())
