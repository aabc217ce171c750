"""A step as named operations on lanes, with what each must wait for. Torch-free: others than the trainer read it too.

An operation is only a name here; `train.step` says what it does. A lane does one thing at a time, in the order in which
things are issued. Operations of one step may work on different batches: while one is computed, rows of the next are
fetched, and gradients of the one before are still on their way. What an operation does to rows and buffers is written
down with it, so that `hazards` can prove that nothing stale is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from freescale.bubbles.events import CAUSES

Lane = Literal["host", "compute", "urgent", "deferred"]
"""Two lanes of traffic: somebody waits for what is urgent; what is deferred goes behind compute and gives way."""
RowSet = Literal["collision", "exclusive", "urgent", "deferred"]
"""Of the rows of a batch: also in the batch before, or not; also in the batch after, or not."""
Dependency = str | tuple[str, int]
"""An operation of the same batch, or of one so many batches later: ("update_deferred", -2)."""


@dataclass(frozen=True)
class Operation:
    """One thing that is done in a step."""

    name: str
    lane: Lane
    cause: str
    """Where its time goes: one of `bubbles.events.CAUSES`; of traffic, its class."""
    after: tuple[Dependency, ...] = ()
    """Keys of operations that must have ended."""
    part: int = 0
    """Which micro-batch it works on, where it works on one."""
    batch: int = 0
    """Which batch it works on: 0 the one that is computed in this step, 1 the next."""
    reads: tuple[RowSet, ...] = ()
    """Rows that it reads at their owner."""
    writes: tuple[RowSet, ...] = ()
    """Rows that it changes there."""
    fills: str = ""
    """The buffer that it writes."""
    uses: tuple[str, ...] = ()
    """Buffers that it reads."""

    @property
    def key(self) -> str:
        """What others wait for."""
        return f"{self.name}/{self.part}" if self.part else self.name

    def dependencies(self) -> list[tuple[str, int]]:
        """Keys of what must have ended, and the batch of each, as `batch` counts."""
        counted = [(after, 0) if isinstance(after, str) else after for after in self.after]
        return [(key, self.batch + later) for key, later in counted]


@dataclass(frozen=True)
class Schedule:
    """The operations of a step, in the order in which they are issued."""

    operations: tuple[Operation, ...]
    slots: Mapping[str, int] = field(default_factory=dict)
    """How many batches a buffer holds at once; what it holds of the oldest is overwritten by the next."""

    def __post_init__(self) -> None:
        place = {operation.key: (at, operation.batch) for at, operation in enumerate(self.operations)}
        if len(place) < len(self.operations):
            keys = [operation.key for operation in self.operations]
            raise ValueError(f"'{next(key for key in keys if keys.count(key) > 1)}' is issued twice")
        for at, operation in enumerate(self.operations):
            if operation.cause not in CAUSES:
                raise ValueError(f"'{operation.key}' has the cause '{operation.cause}', which no ledger knows")
            for key, batch in operation.dependencies():
                # An operation on batch b is issued `its batch` steps before step b.
                if key not in place or (batch - place[key][1], place[key][0]) >= (0, at):
                    raise ValueError(f"'{operation.key}' is issued before what it waits for: {key}")


def serial(*, sharded: bool, agrees: bool = True, micro_batches: int = 1) -> Schedule:
    """One thing after another. Without sharded tables there are no rows to move.

    `agrees`: whether ranks tell each other what a batch counts.
    """
    agree = (Operation("agree", "urgent", "other traffic", ("prepare",)),) if agrees else ()
    rows = (
        Operation("send_ids", "urgent", "ids", ("prepare",), fills="ids"),
        Operation("look_up", "compute", "forward", ("send_ids",), reads=("collision", "exclusive"), uses=("ids",)),
        Operation("send_rows", "urgent", "urgent rows", ("look_up",), fills="rows"),
    )
    compute = _compute(micro_batches, (*(o.key for o in agree), "send_rows" if sharded else "prepare"))
    last = compute[-1].key
    both: tuple[RowSet, ...] = ("urgent", "deferred")
    gradients = (
        Operation("send_gradients", "urgent", "row gradients", (last,), uses=("ids", "gradients")),
        Operation("update_rows", "compute", "optimizer", ("send_gradients",), writes=both, uses=("ids",)),
    )
    prepare = Operation("prepare", "host", "host", (("update_dense", -1),))
    dense = Operation("update_dense", "compute", "optimizer", (last,))
    moved = (*agree, *rows, *compute, *gradients) if sharded else (*agree, *compute)
    return Schedule((prepare, *moved, dense), {"ids": 1, "rows": 1, "gradients": 1})


def overlapped(*, agrees: bool = True, micro_batches: int = 1) -> Schedule:
    """Only rows that two consecutive batches share are waited for; all others travel behind compute.

    Rows of the next batch that this one does not touch are read and sent while this one is computed, once the rows that
    the batch before left for later have been changed. Gradients of rows that the next batch reads go first; the others
    follow behind the next step, and nothing is cut out or copied for them while somebody waits for shared rows.
    `agrees`: as in `serial`.
    """
    agree = (Operation("agree", "deferred", "other traffic", ("prepare",), batch=1),) if agrees else ()
    compute = _compute(micro_batches, (*(o.key for o in agree), "send_exclusive_rows", "send_collision_rows"))
    last, ids, divided, gradients = compute[-1].key, ("ids",), ("ids", "split"), ("ids", "gradients")
    others_changed: tuple[Dependency, ...] = ("send_split", ("update_deferred", -2))
    shared_changed: tuple[Dependency, ...] = ("send_split", ("update_urgent", -1))
    nobody_waits: tuple[Dependency, ...] = (last, ("send_collision_rows", 1))
    of_next = (
        Operation("send_ids", "deferred", "ids", ("prepare",), batch=1, fills="ids"),
        Operation("split", "deferred", "host", ("send_ids",), batch=1, uses=ids),
        Operation("send_split", "deferred", "ids", ("split",), batch=1, fills="split", uses=ids),
        Operation(
            "look_up_exclusive", "deferred", "forward", others_changed, batch=1, reads=("exclusive",), uses=divided
        ),
        Operation("send_exclusive_rows", "deferred", "deferred rows", ("look_up_exclusive",), batch=1, fills="rows"),
    )
    shared = (
        Operation("send_urgent_gradients", "urgent", "row gradients", (last, ("send_split", 1)), uses=gradients),
        Operation("update_urgent", "compute", "optimizer", ("send_urgent_gradients",), writes=("urgent",), uses=ids),
        Operation(
            "look_up_collision", "compute", "forward", shared_changed, batch=1, reads=("collision",), uses=divided
        ),
        Operation("send_collision_rows", "urgent", "urgent rows", ("look_up_collision",), batch=1, fills="rows"),
    )
    others = (
        Operation("send_deferred_gradients", "deferred", "row gradients", nobody_waits, uses=gradients),
        Operation(
            "update_deferred", "deferred", "optimizer", ("send_deferred_gradients",), writes=("deferred",), uses=ids
        ),
    )
    prepare = Operation("prepare", "deferred", "host", batch=1)
    dense = Operation("update_dense", "compute", "optimizer", (last,))
    operations = (prepare, *agree, *of_next, *compute, *shared, dense, *others)
    return Schedule(operations, {"ids": 2, "split": 2, "rows": 2, "gradients": 2})


def _compute(micro_batches: int, ready: tuple[Dependency, ...]) -> list[Operation]:
    """Both passes of every micro-batch. Rows are used until the last backward pass, which leaves their gradients."""
    found: list[Operation] = []
    for part in range(micro_batches):
        forward = Operation("forward", "compute", "forward", ready, part, uses=("rows",))
        backward = Operation("backward", "compute", "backward", (forward.key,), part, fills="gradients", uses=("rows",))
        found += [forward, backward]
    return found


_BUCKETS, _SMALLEST, _LARGEST = 16, 1 << 18, 25 << 20
"""Enough for the last to be short; none so small that a transfer is all latency, or larger than DDP's own."""


def bucket_bytes(dense: float) -> float:
    """At how many bytes a bucket is full, where the dense part has so many."""
    return min(max(dense / _BUCKETS, _SMALLEST), _LARGEST)
