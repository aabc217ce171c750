"""A step as named operations on lanes, with their dependencies. Torch-free: the simulator reads it too.

Here an operation is only a name; `train.step` implements it. A lane runs one operation at a time, in issue order.
Operations of one step may work on different batches: while one batch is computed, rows of the next are fetched and
gradients of the previous one are in flight. Each operation declares how it accesses rows and buffers, so that `hazards`
can prove that no stale row is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from freescale.bubbles.events import CAUSES

Lane = Literal["host", "compute", "urgent", "dense", "deferred"]
"""Three lanes carry traffic: compute waits for urgent transfers; all-reduces of dense gradients, which include those of
replicated rows, run beside these; deferred transfers overlap with compute and yield."""
RowSet = Literal["collision", "exclusive", "urgent", "deferred", "assigned", "evicted", "replicated"]
"""Rows of a batch: also in the previous batch, or not; also in the next batch, or not; newly assigned to dynamic ids,
which no batch of the last three steps has; newly assigned to them although the previous batch has sampled them as
negatives: it then leaves them out of its update; those that every rank has, in no other set."""
Dependency = str | tuple[str, int]
"""An operation of the same batch, or of one so many batches later: ("update_deferred", -2)."""


@dataclass(frozen=True)
class Operation:
    """An operation of a step."""

    name: str
    lane: Lane
    cause: str
    """The cause that its time is recorded under: one of `bubbles.events.CAUSES`."""
    after: tuple[Dependency, ...] = ()
    """Keys of operations that must be complete."""
    part: int = 0
    """The micro-batch that it works on, if any."""
    batch: int = 0
    """The batch that it works on: 0 is the one computed in this step, 1 the next."""
    reads: tuple[RowSet, ...] = ()
    """Rows that it reads on their owner, or, if they are replicated, on every rank."""
    writes: tuple[RowSet, ...] = ()
    """Rows that it updates there."""
    fills: str = ""
    """The buffer that it writes."""
    uses: tuple[str, ...] = ()
    """Buffers that it reads."""
    changes: str = ""
    """What it reads and changes for one batch after the other, such as the identities of dynamic ids."""

    @property
    def key(self) -> str:
        """Return the name that dependencies refer to."""
        return f"{self.name}/{self.part}" if self.part else self.name

    def dependencies(self) -> list[tuple[str, int]]:
        """Return the keys that must be complete, and the batch of each, counted like `batch`."""
        counted = [(after, 0) if isinstance(after, str) else after for after in self.after]
        return [(key, self.batch + later) for key, later in counted]


@dataclass(frozen=True)
class Schedule:
    """The operations of a step, in issue order."""

    operations: tuple[Operation, ...]
    slots: Mapping[str, int] = field(default_factory=dict)
    """Batches that a buffer holds at once; the next batch overwrites the oldest."""

    def __post_init__(self) -> None:
        place = {operation.key: (at, operation.batch) for at, operation in enumerate(self.operations)}
        if len(place) < len(self.operations):
            keys = [operation.key for operation in self.operations]
            raise ValueError(f"'{next(key for key in keys if keys.count(key) > 1)}' is issued twice")
        for at, operation in enumerate(self.operations):
            if operation.cause not in CAUSES:
                raise ValueError(f"'{operation.key}' has the cause '{operation.cause}', which is not one of the causes")
            for key, batch in operation.dependencies():
                # An operation on batch b is issued `its batch` steps before step b.
                if key not in place or (batch - place[key][1], place[key][0]) >= (0, at):
                    raise ValueError(f"'{operation.key}' is issued before what it waits for: {key}")


def serial(
    *,
    sharded: bool,
    agrees: bool = True,
    assigns: bool = False,
    samples: bool = False,
    replicates: bool = False,
    micro_batches: int = 1,
) -> Schedule:
    """Build the schedule without overlap. Without sharded tables there are no rows to move.

    `agrees`: whether the ranks exchange the loss terms of a batch. `assigns`: whether some ids are dynamic. `samples`:
    whether some of their slots are negatives. `replicates`: whether popular rows are on every rank.
    """
    agree = (Operation("agree", "urgent", "other traffic", ("prepare",)),) if agrees else ()
    assign = _assign_slots("compute", "urgent", samples=samples, batch=0) if assigns else ()
    ready = "assign_slots" if assigns else "send_ids"
    rows = (
        Operation("send_ids", "urgent", "ids", ("prepare",), fills="ids"),
        *assign,
        Operation("look_up", "compute", "forward", (ready,), reads=("collision", "exclusive"), uses=("ids",)),
        Operation("send_rows", "urgent", "urgent rows", ("look_up",), fills="rows"),
    )
    ready_rows = (*(o.key for o in (*agree, *assign)), "send_rows" if sharded else "prepare")
    compute = _compute(micro_batches, ready_rows, samples=samples)
    last = compute[-1].key
    read, reduce, update = _replicate(last, ("send_rows",)) if replicates else ((), (), ())
    both: tuple[RowSet, ...] = ("urgent", "deferred")
    gradients = (
        Operation("send_gradients", "urgent", "row gradients", (last,), uses=("ids", "gradients")),
        Operation("update_rows", "compute", "optimizer", ("send_gradients",), writes=both, uses=("ids",)),
    )
    prepare = Operation("prepare", "host", "host", (("update_dense", -1),))
    dense = Operation("update_dense", "compute", "optimizer", (last,))
    on_rows = (*rows, *read, *compute, *reduce, *gradients, *update)
    moved = (*agree, *on_rows) if sharded else (*agree, *compute)
    return Schedule((prepare, *moved, dense), {"ids": 1, "slots": 1, "rows": 1, "gradients": 1, "sums": 1})


def overlapped(
    *,
    agrees: bool = True,
    assigns: bool = False,
    samples: bool = False,
    replicates: bool = False,
    micro_batches: int = 1,
) -> Schedule:
    """Build the schedule of prioritized embedding communication (PEC).

    A step waits only for rows that two consecutive batches share; all others overlap with compute. Rows of the next
    batch that this one does not update are read and sent while this one is computed, once the deferred updates of the
    previous batch are applied. Gradients of rows that the next batch reads go first. The others follow during the next
    step, and nothing is packed for them while compute waits for shared rows. `agrees`, `assigns`, `samples`,
    `replicates`: as in `serial`.
    """
    agree = (Operation("agree", "deferred", "other traffic", ("prepare",), batch=1),) if agrees else ()
    assign = _assign_slots("deferred", "deferred", samples=samples, batch=1) if assigns else ()
    got = "send_exclusive_rows", "send_collision_rows"
    compute = _compute(micro_batches, (*(o.key for o in (*agree, *assign)), *got), samples=samples)
    last, ids, divided, gradients = compute[-1].key, ("ids",), ("ids", "split"), ("ids", "gradients")
    read, reduce, update = _replicate(last, got) if replicates else ((), (), ())
    exclusive_updated: tuple[Dependency, ...] = ("send_split", ("update_deferred", -2))
    collision_updated: tuple[Dependency, ...] = ("send_split", ("update_urgent", -1))
    collision_sent: tuple[Dependency, ...] = (last, ("send_collision_rows", 1), *(o.key for o in reduce))
    of_next = (
        Operation("send_ids", "deferred", "ids", ("prepare",), batch=1, fills="ids"),
        *assign,
        Operation("split", "deferred", "host", ("assign_slots" if assigns else "send_ids",), batch=1, uses=ids),
        Operation("send_split", "deferred", "ids", ("split",), batch=1, fills="split", uses=ids),
        Operation(
            "look_up_exclusive", "deferred", "forward", exclusive_updated, batch=1, reads=("exclusive",), uses=divided
        ),
        Operation("send_exclusive_rows", "deferred", "deferred rows", ("look_up_exclusive",), batch=1, fills="rows"),
    )
    shared = (
        Operation("send_urgent_gradients", "urgent", "row gradients", (last, ("send_split", 1)), uses=gradients),
        Operation("update_urgent", "compute", "optimizer", ("send_urgent_gradients",), writes=("urgent",), uses=ids),
        Operation(
            "look_up_collision", "compute", "forward", collision_updated, batch=1, reads=("collision",), uses=divided
        ),
        Operation("send_collision_rows", "urgent", "urgent rows", ("look_up_collision",), batch=1, fills="rows"),
    )
    others = (
        Operation("send_deferred_gradients", "deferred", "row gradients", collision_sent, uses=gradients),
        Operation(
            "update_deferred", "deferred", "optimizer", ("send_deferred_gradients",), writes=("deferred",), uses=ids
        ),
    )
    prepare = Operation("prepare", "deferred", "host", batch=1)
    dense = Operation("update_dense", "compute", "optimizer", (last,))
    operations = (prepare, *agree, *of_next, *read, *compute, *reduce, *shared, *update, dense, *others)
    return Schedule(operations, {"ids": 2, "slots": 2, "split": 2, "rows": 2, "gradients": 2, "sums": 1})


def _assign_slots(lane: Lane, sent_on: Lane, *, samples: bool, batch: int) -> tuple[Operation, ...]:
    """Return the operation that gives rows to new dynamic ids. It replaces the ids of the batch by rows.

    `samples`: a second one sends these rows to the ranks that requested them.
    """
    send = Operation("send_slots", sent_on, "ids", ("assign_slots",), batch=batch, fills="slots", uses=("ids",))
    return (
        Operation(
            "assign_slots",
            lane,
            "host",
            ("send_ids",),
            batch=batch,
            writes=("assigned", "evicted") if samples else ("assigned",),
            fills="ids",
            uses=("ids",),
            changes="identities",
        ),
        *((send,) if samples else ()),
    )


def _replicate(last: str, got: tuple[str, ...]) -> tuple[tuple[Operation, ...], ...]:
    """Return the operations on replicated rows, by their place: before compute, after it, and before the dense update.

    `last`: the last backward pass. `got`: what receives the other rows. The sum is issued before any other transfer
    that follows compute, so that all ranks issue it in the same order.
    """
    rows: tuple[RowSet, ...] = ("replicated",)
    return (
        (Operation("read_replicated", "compute", "forward", got, reads=rows, fills="rows", uses=("ids",)),),
        (Operation("reduce_replicated", "dense", "row gradients", (last,), fills="sums", uses=("ids", "gradients")),),
        (Operation("update_replicated", "compute", "optimizer", ("reduce_replicated",), writes=rows, uses=("sums",)),),
    )


def _compute(micro_batches: int, ready: tuple[Dependency, ...], *, samples: bool) -> list[Operation]:
    """Return both passes of every micro-batch. Rows are in use until the last backward pass, which fills gradients."""
    operations: list[Operation] = []
    used = ("rows", "slots") if samples else ("rows",)
    for part in range(micro_batches):
        forward = Operation("forward", "compute", "forward", ready, part, uses=used)
        backward = Operation("backward", "compute", "backward", (forward.key,), part, fills="gradients", uses=("rows",))
        operations += [forward, backward]
    return operations


_BUCKETS, _SMALLEST, _LARGEST = 16, 1 << 18, 25 << 20
"""Enough buckets for the last to be short; none so small that latency dominates, or larger than DDP's default."""


def bucket_bytes(dense: float) -> float:
    """Return the DDP bucket size for a dense model of so many bytes, so that all but the last overlap with backward."""
    return min(max(dense / _BUCKETS, _SMALLEST), _LARGEST)
