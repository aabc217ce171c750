"""An accepted schedule reads no stale row, whatever operations take; unsafe schedules are refused."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.overlap.hazards import HazardError, hazards, require_safe
from freescale.overlap.schedule import Dependency, Operation, RowSet, Schedule, overlapped, serial

SAFE = {
    "serial": serial(sharded=True),
    "serial in parts": serial(sharded=True, micro_batches=3),
    "without tables": serial(sharded=False),
    "overlapped": overlapped(),
    "overlapped in parts": overlapped(micro_batches=2),
    "serial with dynamic ids": serial(sharded=True, assigns=True),
    "overlapped with dynamic ids": overlapped(assigns=True, micro_batches=2),
    "serial with dynamic negatives": serial(sharded=True, assigns=True, samples=True),
    "overlapped with dynamic negatives": overlapped(assigns=True, samples=True),
    "serial with replicated rows": serial(sharded=True, replicates=True),
    "overlapped with replicated rows": overlapped(replicates=True, micro_batches=2),
}
STEPS, ROWS = 9, 12
EVICTS, ASSIGNS, READS, WRITES = -2, -1, 0, 1  # what a batch does with a row, in this order


def changed(schedule: Schedule | None = None, /, **changes: Callable[[Operation], Operation]) -> Schedule:
    """A schedule, by default the overlapped one, with some operations changed."""
    good = schedule or overlapped()
    return replace(good, operations=tuple(changes[o.name](o) if o.name in changes else o for o in good.operations))


def without(*keys: Dependency) -> Callable[[Operation], Operation]:
    return lambda o: replace(o, after=tuple(after for after in o.after if after not in keys))


def on(lane: str, *gone: Dependency) -> Callable[[Operation], Operation]:
    return lambda o: replace(without(*gone)(o), lane=lane)  # type: ignore[arg-type]


def reordered(name: str, behind: str, *gone: Dependency) -> Schedule:
    """One operation issued right behind another one, and no longer waiting for some."""
    operations = list(overlapped().operations)
    (moved,) = [o for o in operations if o.name == name]
    operations.remove(moved)
    place = [o.name for o in operations].index(behind) + 1
    operations.insert(place, without(*gone)(moved))
    return replace(overlapped(), operations=tuple(operations))


def a_step_late(*names: str) -> Schedule:
    """Some operations issued at the end of the step after, and nobody waits for them there."""
    operations = [without(("update_deferred", -2))(o) for o in overlapped().operations]
    late = [replace(o, batch=o.batch - 1) for o in operations if o.name in names]
    return replace(overlapped(), operations=(*(o for o in operations if o.name not in names), *late))


def with_slots(**slots: int) -> Schedule:
    return replace(overlapped(), slots={**overlapped().slots, **slots})


WRONG: dict[str, tuple[Schedule, str, str]] = {
    "the naive prefetch: all rows of the next batch are read behind compute": (
        changed(
            look_up_exclusive=lambda o: replace(o, reads=("collision", "exclusive")),
            look_up_collision=lambda o: replace(o, reads=()),
        ),
        "look_up_exclusive",
        "update_urgent",
    ),
    "rows are read before those that were left for later are changed": (
        a_step_late("send_deferred_gradients", "update_deferred"),
        "look_up_exclusive",
        "update_deferred",
    ),
    "shared rows are read before they are changed": (
        reordered("look_up_collision", "backward", ("update_urgent", -1)),
        "look_up_collision",
        "update_urgent",
    ),
    "what the next batch reads is changed later": (
        changed(
            update_urgent=lambda o: replace(o, writes=()),
            update_deferred=lambda o: replace(o, writes=("urgent", "deferred")),
        ),
        "look_up_collision",
        "update_deferred",
    ),
    "late changes behind compute": (
        changed(update_deferred=on("compute"), look_up_exclusive=without(("update_deferred", -2))),
        "look_up_exclusive",
        "update_deferred",
    ),
    "late changes behind urgent traffic": (
        changed(update_deferred=on("urgent"), look_up_exclusive=without(("update_deferred", -2))),
        "look_up_exclusive",
        "update_deferred",
    ),
    "two batches ahead": (
        changed(
            **{
                name: lambda o: replace(o, batch=2, after=tuple(a for a in o.after if isinstance(a, str)))
                for name in (
                    "prepare",
                    "agree",
                    "send_ids",
                    "split",
                    "send_split",
                    "look_up_exclusive",
                    "send_exclusive_rows",
                )
            }
        ),
        "look_up_exclusive",
        "update_deferred",
    ),
    "shared rows are read before it is known which they are": (
        changed(look_up_collision=without("send_split"), send_urgent_gradients=without(("send_split", 1))),
        "look_up_collision",
        "split",
    ),
    "one slot for rows": (with_slots(rows=1), "send_exclusive_rows", "rows"),
    "one slot for ids": (with_slots(ids=1), "send_ids", "ids"),
    "one slot for gradients": (with_slots(gradients=1), "backward", "gradients"),
    "ids are sent for the batch after next before their slot is free": (
        changed(prepare=on("host"), send_ids=on("host")),
        "send_ids",
        "ids",
    ),
    "forward does not wait for shared rows": (
        changed(forward=without("send_collision_rows", "agree")),
        "forward",
        "rows",
    ),
    "forward does not wait for the other rows": (changed(forward=without("send_exclusive_rows")), "forward", "rows"),
    "urgent gradients are sent before they are there": (
        reordered("send_urgent_gradients", "send_split", "backward"),
        "send_urgent_gradients",
        "gradients",
    ),
    "deferred gradients are sent before they are there": (
        changed(send_deferred_gradients=without("backward", ("send_collision_rows", 1))),
        "send_deferred_gradients",
        "gradients",
    ),
}


DYNAMIC = overlapped(assigns=True)
EXPIRE = Operation("expire_slots", "host", "host", changes="identities")
WRONG |= {
    "slots are assigned before the ids are there": (
        changed(DYNAMIC, assign_slots=on("host", "send_ids")),
        "assign_slots",
        "ids",
    ),
    "ids arrive on another lane": (
        changed(DYNAMIC, send_ids=on("urgent"), assign_slots=without("send_ids")),
        "assign_slots",
        "ids",
    ),
    "ids instead of rows are split": (changed(DYNAMIC, split=on("host", "assign_slots")), "split", "assign_slots"),
    "rows of new ids are read before they are initialized": (
        changed(DYNAMIC, look_up_exclusive=on("host", "send_split", ("update_deferred", -2))),
        "look_up_exclusive",
        "assign_slots",
    ),
    "a serial step reads rows before they are initialized": (
        changed(serial(sharded=True, assigns=True), look_up=on("host", "assign_slots")),
        "look_up",
        "assign_slots",
    ),
    "slots of the running step are evicted": (
        changed(DYNAMIC, assign_slots=lambda o: replace(o, writes=("collision",))),
        "assign_slots",
        "update_urgent",
    ),
    "slots are assigned two batches ahead": (
        changed(
            DYNAMIC,
            **{name: lambda o: replace(o, batch=2) for name in ("prepare", "agree", "send_ids", "assign_slots")},
        ),
        "send_ids",
        "ids",
    ),
    "one slot for the ids of assigned rows": (replace(DYNAMIC, slots={**DYNAMIC.slots, "ids": 1}), "send_ids", "ids"),
    "identities change on two lanes": (
        replace(DYNAMIC, operations=(*DYNAMIC.operations, EXPIRE)),
        "assign_slots",
        "expire_slots",
    ),
    "identities of a later batch change first": (
        changed(DYNAMIC, update_deferred=on("compute"), assign_slots=on("host", "send_ids")),
        "assign_slots",
        "update_deferred",
    ),
}

SAMPLED = overlapped(assigns=True, samples=True)
WRONG |= {
    "rows are assigned while the previous batch still reads them": (
        changed(SAMPLED, assign_slots=on("host", "send_ids")),
        "assign_slots",
        "look_up_exclusive",
    ),
    "rows are assigned while the previous batch updates them": (
        changed(SAMPLED, send_urgent_gradients=without(("send_split", 1)), look_up_collision=without("send_split")),
        "assign_slots",
        "may be updating",
    ),
    "slots are sent before they are assigned": (
        changed(SAMPLED, send_slots=on("urgent", "assign_slots")),
        "send_slots",
        "assign_slots",
    ),
    "compute does not wait for slots": (
        changed(SAMPLED, send_slots=on("host"), forward=without("send_slots")),
        "forward",
        "slots",
    ),
    "one slot for the slots of negatives": (
        replace(SAMPLED, slots={**SAMPLED.slots, "slots": 1}),
        "send_slots",
        "slots",
    ),
}

REPLICATED = overlapped(replicates=True)
WRONG |= {
    "replicated rows are read before they are changed": (
        changed(REPLICATED, update_replicated=on("host")),
        "read_replicated",
        "update_replicated",
    ),
    "replicated rows are changed before their gradients are summed": (
        changed(REPLICATED, update_replicated=without("reduce_replicated")),
        "update_replicated",
        "sums",
    ),
    "compute does not wait for replicated rows": (
        changed(REPLICATED, read_replicated=on("host")),
        "forward",
        "rows",
    ),
}


@pytest.mark.parametrize("name", SAFE)
def test_schedules_in_use_are_safe(name: str) -> None:
    require_safe(SAFE[name])


@pytest.mark.parametrize("name", WRONG)
def test_an_unsafe_schedule_is_refused_with_the_offending_pair(name: str) -> None:
    schedule, late, early = WRONG[name]
    found = [str(hazard) for hazard in hazards(schedule)]
    assert any(f"'{late} of" in text and early in text for text in found), found[:5]
    with pytest.raises(HazardError, match="nothing makes"):
        require_safe(schedule)


def run(schedule: Schedule, rng: np.random.Generator) -> dict[tuple[str, int], tuple[float, float]]:
    """When each operation on each batch begins and ends, if each takes a random time."""
    ends: dict[str, float] = {}
    when: dict[tuple[str, int], tuple[float, float]] = {}
    for step, o in itertools.product(range(STEPS), schedule.operations):
        needs = [when[key, step + batch][1] for key, batch in o.dependencies() if (key, step + batch) in when]
        begin = max([ends.get(o.lane, 0.0), *needs])
        ends[o.lane] = begin + float(rng.exponential() ** 3)
        when[o.key, step + o.batch] = begin, ends[o.lane]
    return when


def stale(schedule: Schedule, seed: int) -> bool:
    """Whether some row is read or changed out of order, with random batches and random times."""
    rng = np.random.default_rng(seed)
    when = run(schedule, rng)
    held = rng.random((STEPS + 4, ROWS)) < 0.5  # which rows are in which batch; the first is batch -1
    inside: dict[RowSet, Callable[[int], np.ndarray]] = {
        "collision": lambda b: held[b + 1] & held[b],
        "exclusive": lambda b: held[b + 1] & ~held[b],
        "urgent": lambda b: held[b + 1] & held[b + 2],
        "deferred": lambda b: held[b + 1] & ~held[b + 2],
        "assigned": lambda b: held[b + 1] & ~held[max(0, b - 2) : b + 1].any(0),
        "evicted": lambda b: held[b + 1] & held[b],
        "replicated": lambda b: held[b + 1],
    }
    replicates = any("replicated" in o.reads for o in schedule.operations)
    replicated = np.arange(ROWS) < replicates * ROWS // 3  # in no other set
    touched: list[list[tuple[int, int, float, float]]] = [[] for _ in range(ROWS)]
    for o in schedule.operations:
        for kind, sets in enumerate((o.reads, o.writes)):
            for rows, batch in itertools.product(sets, range(STEPS - 1)):
                if (o.key, batch) in when:
                    for row in np.flatnonzero(inside[rows](batch) & (replicated == (rows == "replicated"))):
                        phase = {"assigned": ASSIGNS, "evicted": EVICTS}.get(rows, kind)
                        touched[row].append((batch, phase, *when[o.key, batch]))
    for accesses in touched:
        for one, two in itertools.combinations(sorted(accesses), 2):
            left_out = two[1] == EVICTS and one[:2] == (two[0] - 1, WRITES)
            if left_out and one[2] > two[3]:
                continue
            if (one[1] or two[1]) and one[:2] != two[:2] and one[3] > two[2]:
                return True
    return False


@pytest.mark.parametrize("name", SAFE)
def test_a_safe_schedule_never_accesses_a_row_out_of_order(name: str) -> None:
    assert not any(stale(SAFE[name], seed) for seed in range(100))


@pytest.mark.parametrize("name", [name for name, (_, _, early) in WRONG.items() if early.startswith("update")])
def test_an_unsafe_schedule_can_access_a_row_out_of_order(name: str) -> None:
    assert any(stale(WRONG[name][0], seed) for seed in range(300))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_accepted_random_schedules_are_safe(seed: int) -> None:
    """Schedules with dependencies left out, lanes changed and operations moved, at random."""
    draw = np.random.default_rng(seed)
    operations = list(overlapped().operations)
    for _ in range(int(draw.integers(1, 4))):
        place = int(draw.integers(len(operations)))
        o = operations[place]
        kind = draw.integers(3)
        if kind == 0 and o.after:
            operations[place] = without(o.after[int(draw.integers(len(o.after)))])(o)
        elif kind == 1:
            operations[place] = replace(o, lane=draw.choice(["host", "compute", "urgent", "deferred"]))
        else:
            operations.insert(int(draw.integers(len(operations))), operations.pop(place))
    try:
        schedule = replace(overlapped(), operations=tuple(operations))
    except ValueError:
        return  # issued before what it waits for
    if not list(hazards(schedule)):
        assert not any(stale(schedule, seed) for seed in range(20))
