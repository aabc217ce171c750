"""A step as named operations on lanes, with what each must wait for. Torch-free: others than the trainer read it too.

An operation is only a name here; `train.step` says what it does. A lane is something that does one thing at a time.
Today everything runs strictly one after another.
"""

from dataclasses import dataclass
from typing import Literal

from freescale.bubbles.events import CAUSES

Lane = Literal["host", "compute", "network"]


@dataclass(frozen=True)
class Operation:
    """One thing that is done in a step."""

    name: str
    lane: Lane
    cause: str
    """Where its time goes: one of `bubbles.events.CAUSES`; on the network lane, the class of its traffic."""
    after: tuple[str, ...] = ()
    """Keys of operations of the same step that must have ended."""
    part: int = 0
    """Which micro-batch it works on, where it works on one."""

    @property
    def key(self) -> str:
        """What others wait for."""
        return f"{self.name}/{self.part}" if self.part else self.name


@dataclass(frozen=True)
class Schedule:
    """The operations of a step, in the order in which they are issued."""

    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for operation in self.operations:
            missing = [key for key in operation.after if key not in seen]
            if missing:
                raise ValueError(f"'{operation.key}' is issued before what it waits for: {', '.join(missing)}")
            if operation.cause not in CAUSES:
                raise ValueError(f"'{operation.key}' has the cause '{operation.cause}', which no ledger knows")
            if operation.key in seen:
                raise ValueError(f"'{operation.key}' is issued twice")
            seen.add(operation.key)


def serial(*, sharded: bool, micro_batches: int = 1) -> Schedule:
    """One thing after another. Without sharded tables there are no rows to move."""
    rows = (
        Operation("send_ids", "network", "ids", ("prepare",)),
        Operation("look_up", "compute", "forward", ("send_ids",)),
        Operation("send_rows", "network", "urgent rows", ("look_up",)),
    )
    compute: list[Operation] = []
    ready = "send_rows" if sharded else "prepare"
    for part in range(micro_batches):
        forward = Operation("forward", "compute", "forward", ("agree", ready), part)
        compute += [forward, Operation("backward", "compute", "backward", (forward.key,), part)]
    last = compute[-1].key
    gradients = (
        Operation("send_gradients", "network", "row gradients", (last,)),
        Operation("update_rows", "compute", "optimizer", ("send_gradients",)),
    )
    return Schedule(
        (
            Operation("prepare", "host", "host"),
            Operation("agree", "network", "other traffic", ("prepare",)),
            *(rows if sharded else ()),
            *compute,
            *(gradients if sharded else ()),
            Operation("update_dense", "compute", "optimizer", (last,)),
        )
    )
