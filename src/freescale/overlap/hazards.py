"""Proves from a schedule that no row is read before its last write and that no buffer is overwritten while in use.

Some steps are laid out one after another. What is certain to have ended before something begins follows from lanes and
dependencies alone, however long anything takes. Then every two operations that may touch the same row or the same slot
of a buffer must be certain to run in the order of a serial step. Pure, and torch-free.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from freescale.overlap.schedule import Operation, RowSet, Schedule

_STEPS = 8  # more than any dependency or slot reaches; what holds over so many holds over all
_BEFORE: dict[RowSet, tuple[int, bool]] = {"collision": (-1, True), "exclusive": (-1, False)}
_MEMBERS = _BEFORE | {"urgent": (1, True), "deferred": (1, False)}
"""Of a set of a batch's rows: in which other batch, counted from it, they are or are not."""


class OperationInstance(NamedTuple):
    """One operation on one batch."""

    operation: Operation
    batch: int

    def __str__(self) -> str:
        return f"{self.operation.key} of batch {self.batch}"


class Hazard(NamedTuple):
    """Two operations that may run in the wrong order."""

    first: OperationInstance
    """Must have ended before the other one begins, and that is not certain."""
    then: OperationInstance
    reason: str

    def __str__(self) -> str:
        return f"nothing makes '{self.then}' wait for '{self.first}': {self.reason}"


class HazardError(ValueError):
    """A schedule under which something stale may be read."""


def require_safe(schedule: Schedule) -> Schedule:
    """Give a schedule that is proven safe; refuse any other with the first offending pair."""
    for hazard in hazards(schedule):
        raise HazardError(str(hazard))
    return schedule


def hazards(schedule: Schedule) -> Iterator[Hazard]:
    """Every pair of operations whose order matters and is not certain."""
    runs = [OperationInstance(o, step + o.batch) for step in range(_STEPS) for o in schedule.operations]
    before = _happens_before(runs)
    for (i, one), (j, other) in itertools.combinations(enumerate(runs), 2):
        found = _conflict(schedule, one, other)
        if found is None:
            continue
        swapped, reason = found
        first, then = (j, i) if swapped else (i, j)
        if not before[then] >> first & 1:
            yield Hazard(runs[first], runs[then], reason)


def _happens_before(runs: list[OperationInstance]) -> list[int]:
    """Of each run, as bits, the runs that are certain to have ended when it begins."""
    place = {(run.operation.key, run.batch): at for at, run in enumerate(runs)}
    before: list[int] = []
    last_on_lane: dict[str, int] = {}
    for at, run in enumerate(runs):
        step = run.batch - run.operation.batch
        needed = [(key, step + batch) for key, batch in run.operation.dependencies()]
        directly = [place[one] for one in needed if one in place]
        if run.operation.lane in last_on_lane:
            directly.append(last_on_lane[run.operation.lane])
        before.append(0)
        for earlier in directly:
            before[at] |= before[earlier] | 1 << earlier
        last_on_lane[run.operation.lane] = at
    return before


def _conflict(schedule: Schedule, one: OperationInstance, other: OperationInstance) -> tuple[bool, str] | None:
    """Whether the order of two runs matters: if the other one must come first, and why."""
    for early, late, swapped in ((one, other, False), (other, one, True)):
        reason = _row_conflict(early, late) or _fill_conflict(early, late) or _slot_conflict(schedule, early, late)
        if reason:
            return swapped, reason
    return None


def _row_conflict(early: OperationInstance, late: OperationInstance) -> str:
    """Whether both may touch a row, at least one of them changing it, and a serial step runs them in this order."""
    a, b = early.operation, late.operation
    for mine, theirs in itertools.product((*a.reads, *a.writes), (*b.reads, *b.writes)):
        wrote, writes = mine in a.writes, theirs in b.writes
        in_order = early.batch < late.batch or (early.batch == late.batch and writes and not wrote)
        if (wrote or writes) and in_order and _may_share(early.batch, mine, late.batch, theirs):
            return f"it {'changes' if writes else 'reads'} {theirs} rows, which may be {mine} rows of that one"
    return ""


def _may_share(batch: int, rows: RowSet, other: int, others: RowSet) -> bool:
    """Whether a row can be in both sets: they do not contradict each other about any batch."""
    claims: dict[int, bool] = {}
    for number, kind in ((batch, rows), (other, others)):
        away, member = _MEMBERS[kind]
        for about, said in ((number, True), (number + away, member)):
            if claims.setdefault(about, said) != said:
                return False
    return True


def _fill_conflict(early: OperationInstance, late: OperationInstance) -> str:
    """Whether the later one uses what the earlier one fills."""
    buffer = early.operation.fills
    if early.batch == late.batch and buffer and buffer in late.operation.uses and early.operation is not late.operation:
        return f"it uses {buffer} of its batch, which that one fills"
    return ""


def _slot_conflict(schedule: Schedule, early: OperationInstance, late: OperationInstance) -> str:
    """Whether the later one fills the slot that the earlier one uses."""
    buffer = late.operation.fills
    touched = buffer and (buffer in early.operation.uses or buffer == early.operation.fills)
    if touched and late.batch == early.batch + schedule.slots[buffer]:
        return f"it overwrites the slot of {buffer} that is still in use there"
    return ""
