"""Proves from a schedule that no row is read before its last write and that no buffer is overwritten while in use.

The check unrolls several steps. Lanes and dependencies alone determine which operations are complete before another
begins, whatever their durations. Every two operations that may access the same row or buffer slot must then be ordered
as in a serial step. Pure and torch-free.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from freescale.overlap.schedule import Operation, RowSet, Schedule

_STEPS = 8  # more than any dependency or slot spans, so the result holds for all steps
_UPDATES = 2  # the last phase of a batch, see `_phase`
_MEMBERS: dict[RowSet, tuple[tuple[int, bool], ...]] = {
    "collision": ((-1, True),),
    "exclusive": ((-1, False),),
    "urgent": ((1, True),),
    "deferred": ((1, False),),
    "assigned": ((-1, False), (-2, False), (-3, False)),
    "evicted": ((-1, True),),
    "replicated": (),
}
"""For each row set: the offsets of other batches, and whether the rows are in them."""


class OperationInstance(NamedTuple):
    """One operation on one batch."""

    operation: Operation
    batch: int

    def __str__(self) -> str:
        return f"{self.operation.key} of batch {self.batch}"


class Hazard(NamedTuple):
    """Two operations that may run in the wrong order."""

    first: OperationInstance
    """Must be complete before the other begins, which the schedule does not ensure."""
    then: OperationInstance
    reason: str

    def __str__(self) -> str:
        return f"nothing makes '{self.then}' wait for '{self.first}': {self.reason}"


class HazardError(ValueError):
    """Raised for a schedule under which a stale row or buffer may be read."""


def require_safe(schedule: Schedule) -> Schedule:
    """Return the schedule if it is safe; else raise with the first offending pair."""
    for hazard in hazards(schedule):
        raise HazardError(str(hazard))
    return schedule


def hazards(schedule: Schedule) -> Iterator[Hazard]:
    """Yield every pair of operations whose order matters and is not ensured."""
    instances = [OperationInstance(o, step + o.batch) for step in range(_STEPS) for o in schedule.operations]
    before = _happens_before(instances)
    for (i, a), (j, b) in itertools.combinations(enumerate(instances), 2):
        if (_leaves_out(a, b) or _leaves_out(b, a)) and not (before[j] >> i | before[i] >> j) & 1:
            yield Hazard(a, b, "one assigns rows that the other may be updating")
        conflict = _conflict(schedule, a, b)
        if conflict is None:
            continue
        swapped, reason = conflict
        first, then = (j, i) if swapped else (i, j)
        if not before[then] >> first & 1:
            yield Hazard(instances[first], instances[then], reason)


def _happens_before(instances: list[OperationInstance]) -> list[int]:
    """Return for each instance, as bits, the instances that are complete when it begins."""
    place = {(run.operation.key, run.batch): at for at, run in enumerate(instances)}
    before: list[int] = []
    last_on_lane: dict[str, int] = {}
    for at, run in enumerate(instances):
        step = run.batch - run.operation.batch
        needed = [(key, step + batch) for key, batch in run.operation.dependencies()]
        directly = [place[key] for key in needed if key in place]
        if run.operation.lane in last_on_lane:
            directly.append(last_on_lane[run.operation.lane])
        before.append(0)
        for earlier in directly:
            before[at] |= before[earlier] | 1 << earlier
        last_on_lane[run.operation.lane] = at
    return before


def _conflict(schedule: Schedule, a: OperationInstance, b: OperationInstance) -> tuple[bool, str] | None:
    """Return whether `b` must come first and why, if the order of two instances matters."""
    for early, late, swapped in ((a, b, False), (b, a, True)):
        reason = _row_conflict(early, late) or _fill_conflict(early, late) or _slot_conflict(schedule, early, late)
        reason = reason or _change_conflict(early, late)
        if reason:
            return swapped, reason
    return None


def _row_conflict(early: OperationInstance, late: OperationInstance) -> str:
    """Return the conflict if both may access a row, at least one writing it, and a serial step has this order."""
    a, b = early.operation, late.operation
    for early_rows, late_rows in itertools.product((*a.reads, *a.writes), (*b.reads, *b.writes)):
        wrote, writes = early_rows in a.writes, late_rows in b.writes
        phases = _phase(early_rows, writes=wrote), _phase(late_rows, writes=writes)
        in_order = early.batch < late.batch or (early.batch == late.batch and phases[0] < phases[1])
        left_out = late_rows == "evicted" and phases[0] == _UPDATES and _leaves_out(early, late)
        may_share = not left_out and _may_share(early.batch, early_rows, late.batch, late_rows)
        if (wrote or writes) and in_order and may_share:
            return f"it {'changes' if writes else 'reads'} {late_rows} rows, which may be {early_rows} rows of that one"
    return ""


def _leaves_out(early: OperationInstance, late: OperationInstance) -> bool:
    """Return whether one updates rows except for those that the other evicts. Either may come first, but not both."""
    is_update = any(_phase(rows, writes=True) == _UPDATES for rows in early.operation.writes)
    return is_update and "evicted" in late.operation.writes and early.batch == late.batch - 1


def _phase(rows: RowSet, *, writes: bool) -> int:
    """Return when a batch accesses rows: it initializes them, reads them, and updates them."""
    return 0 if rows in ("assigned", "evicted") else _UPDATES if writes else 1


def _may_share(batch: int, rows: RowSet, other: int, others: RowSet) -> bool:
    """Return whether a row can be in both sets: they agree about every batch. Replicated rows are in no other set."""
    if (rows == "replicated") != (others == "replicated"):
        return False
    claims: dict[int, bool] = {}
    for number, kind in ((batch, rows), (other, others)):
        others_of_kind = ((number + away, member) for away, member in _MEMBERS[kind])
        for about, contains in ((number, True), *others_of_kind):
            if claims.setdefault(about, contains) != contains:
                return False
    return True


def _fill_conflict(early: OperationInstance, late: OperationInstance) -> str:
    """Return the conflict if the later one uses the buffer that the earlier one fills."""
    buffer = early.operation.fills
    if early.batch == late.batch and buffer and buffer in late.operation.uses and early.operation is not late.operation:
        return f"it uses {buffer} of its batch, which that one fills"
    return ""


def _slot_conflict(schedule: Schedule, early: OperationInstance, late: OperationInstance) -> str:
    """Return the conflict if the later one fills the slot that the earlier one uses."""
    buffer = late.operation.fills
    touched = buffer and (buffer in early.operation.uses or buffer == early.operation.fills)
    if touched and late.batch == early.batch + schedule.slots[buffer]:
        return f"it overwrites the slot of {buffer} that is still in use there"
    return ""


def _change_conflict(early: OperationInstance, late: OperationInstance) -> str:
    """Return the conflict if both change the same thing, for one batch after the other."""
    if early.operation.changes and early.operation.changes == late.operation.changes and early.batch < late.batch:
        return f"it changes {late.operation.changes}, which that one has to change first"
    return ""
