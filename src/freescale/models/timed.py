"""The timed compute lane: a model that waits as long as another one would compute, with real traffic around it.

A waiting process leaves its core free, as one whose GPU computes does, so on a machine with few cores and no GPU the
effect of schedules, priorities and balance on a step is real. Rows, gradients and dense parameters travel in full size;
their values are of no use: every gradient is zero.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freescale.data.batch import Batch
from freescale.models.protocol import Inputs, Model, Rows

_STAGES = 8


@dataclass
class _Lane:
    """One direction of one pass: ends of stages count from its beginning, so that late wake-ups do not add up."""

    seconds: float
    stages: int
    began: float = 0.0
    passed: int = 0

    def wait(self, since: float) -> None:
        """Until a stage that began at some moment has had its time."""
        self.began = self.began or since
        self.passed += 1
        time.sleep(max(0.0, self.began + self.seconds * self.passed / self.stages - time.monotonic()))


class _Stage(torch.autograd.Function):
    """Waits on the way forward and on the way back. Room for gradients is made while it waits, not after."""

    @staticmethod
    def forward(*given: Any, **_: Any) -> Tensor:
        since = time.monotonic()
        ctx, ahead, ctx.back, *ctx.taken = given
        ahead.wait(since)
        return ctx.taken[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        since = time.monotonic()
        zeros = [torch.zeros_like(value) for value in ctx.taken]
        ctx.back.wait(since)
        return None, None, *zeros


def waits(values: Sequence[Tensor], parameters: Iterable[nn.Parameter], *, forward: float, backward: float) -> Tensor:
    """Zero, after so many seconds; gradients of the values, zero too, take so many on the way back.

    Parameters take part stage by stage, so that their gradients come one by one.
    """
    ahead, back = _Lane(forward, _STAGES), _Lane(backward, _STAGES)
    held, taken = list(parameters), list(values)
    for stage in range(_STAGES):
        taken += held[stage * len(held) // _STAGES : (stage + 1) * len(held) // _STAGES]
        taken = [_Stage.apply(ahead, back, *taken)]
    return taken[0]


class Timed(nn.Module):
    """Stands in for a model: its batches, tables and parameters, with a given time for its two passes."""

    def __init__(self, model: Model, seconds: Callable[[Inputs], tuple[float, float]]) -> None:
        super().__init__()
        self.model, self.tables = model, model.tables
        self._seconds = seconds
        """Of inputs: how long forward and backward take."""

    def prepare(self, batch: Batch) -> Inputs:
        """Lay out a batch as the model does."""
        return self.model.prepare(batch)

    def forward(self, inputs: Inputs, rows: Mapping[str, Rows]) -> Tensor:
        """Nothing, after a while."""
        forward, backward = self._seconds(inputs)
        values = [found.values for found in rows.values()]
        return waits(values, self.parameters(), forward=forward, backward=backward)
