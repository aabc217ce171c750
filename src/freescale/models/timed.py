"""The timed compute lane: a model that waits as long as another one would compute, with real traffic around it.

A waiting process leaves its core free, as one whose GPU computes does, so on a machine with few cores and no GPU the
effect of schedules, priorities and balance on a step is real. Rows, gradients and dense parameters travel in full size;
their values are of no use: every gradient is zero.
"""

import time
from collections.abc import Callable, Iterable, Mapping
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

    def wait(self) -> None:
        self.began = self.began or time.monotonic()
        self.passed += 1
        time.sleep(max(0.0, self.began + self.seconds * self.passed / self.stages - time.monotonic()))


class _Stage(torch.autograd.Function):
    """Waits on the way forward and on the way back."""

    @staticmethod
    def forward(*given: Any, **_: Any) -> Tensor:
        ctx, value, ahead, ctx.back = given
        ahead.wait()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.back.wait()
        return gradients[0], None, None


def waits(value: Tensor, parameters: Iterable[nn.Parameter], *, forward: float, backward: float) -> Tensor:
    """A value, after so many seconds; its gradient takes so many on the way back.

    Parameters take part stage by stage, so that their gradients, which are zero, come one by one.
    """
    ahead, back = _Lane(forward, _STAGES), _Lane(backward, _STAGES)
    held = list(parameters)
    for stage in range(_STAGES):
        taken = held[stage * len(held) // _STAGES : (stage + 1) * len(held) // _STAGES]
        # Taken here, not before: what was computed last is what autograd goes back through first.
        firsts = [parameter.flatten()[0] for parameter in taken]
        value = _Stage.apply(value + 0.0 * sum(firsts), ahead, back)
    return value


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
        total = 0.0 * torch.stack([found.values.sum() for found in rows.values()]).sum()
        return waits(total, self.parameters(), forward=forward, backward=backward)
