"""Emulated compute: each rank sleeps for the time that a model was measured to take, with real traffic around it.

Sleeping leaves the CPU free, as a GPU would. On a machine with few cores and no GPU, the effect of schedules,
priorities and balance on a step is therefore real. Rows, gradients and dense parameters have their full size, but every
gradient is zero. `calibrate_compute` measures a model, and `compute_only_ms` the step without communication.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from freescale.balance.cost import Cost, NormalEquations, fit, sizes
from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.errors import UsageError
from freescale.models.jagged import JaggedLayout
from freescale.models.protocol import Inputs, Model, Rows
from freescale.train.sharded_model import SequenceModule, build_model_for, build_optimizer
from freescale.transport.world import World
from freescale.visibility import Visibility

_STAGES = 8
_CALIBRATION_STEPS, _REPEATS = 16, 4


@dataclass
class _PassClock:
    """The clock of one pass. Stage ends count from its start, so that late wake-ups do not add up."""

    seconds: float
    stages: int
    start: float = 0.0
    passed: int = 0

    def sleep(self, since: float) -> None:
        """Sleep until the end of the stage that began at `since`."""
        self.start = self.start or since
        self.passed += 1
        time.sleep(max(0.0, self.start + self.seconds * self.passed / self.stages - time.monotonic()))


class _EmulatedStage(torch.autograd.Function):
    """Sleeps in forward and in backward. Gradients are allocated during the sleep, not after it."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:
        since = time.monotonic()
        ctx, forward_clock, ctx.backward_clock, *ctx.inputs = args
        forward_clock.sleep(since)
        return ctx.inputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        since = time.monotonic()
        zeros = [torch.zeros_like(value) for value in ctx.inputs]
        ctx.backward_clock.sleep(since)
        return None, None, *zeros


def emulate_passes(
    values: Sequence[Tensor], parameters: Iterable[nn.Parameter], *, forward: float, backward: float
) -> Tensor:
    """Return zero after `forward` seconds; its backward pass takes `backward` seconds and gives zero gradients.

    Parameters enter stage by stage, so that their gradients arrive one by one.
    """
    forward_clock, backward_clock = _PassClock(forward, _STAGES), _PassClock(backward, _STAGES)
    weights, inputs = list(parameters), list(values)
    for stage in range(_STAGES):
        inputs += weights[stage * len(weights) // _STAGES : (stage + 1) * len(weights) // _STAGES]
        inputs = [_EmulatedStage.apply(forward_clock, backward_clock, *inputs)]
    return inputs[0]


class EmulatedModel(nn.Module):
    """Replaces the compute of a model by sleeping; batches, tables and parameters stay."""

    def __init__(self, model: Model, seconds: Callable[[Inputs], tuple[float, float]]) -> None:
        super().__init__()
        self.model, self.tables = model, model.tables
        self._seconds = seconds
        """Returns the seconds of forward and backward."""

    def prepare(self, batch: Batch) -> Inputs:
        """Lay out a batch as the model does."""
        return self.model.prepare(batch)

    def forward(self, inputs: Inputs, rows: Mapping[str, Rows]) -> Tensor:
        """Return zero after the emulated time."""
        forward, backward = self._seconds(inputs)
        values = [table_rows.values for table_rows in rows.values()]
        return emulate_passes(values, self.parameters(), forward=forward, backward=backward)


@dataclass(frozen=True)
class EmulatedCompute:
    """Seconds of a step as a cost model, measured on one rank while the others waited."""

    cost: Cost
    step: float
    error: float
    """Mean relative error of the cost model."""

    def emulate(self, model: Model) -> EmulatedModel:
        """Return a model that sleeps as long as the cost model says."""

        def seconds(inputs: Inputs) -> tuple[float, float]:
            layout: JaggedLayout = inputs.layout  # type: ignore[attr-defined]
            total = self.step + float(self.cost.summed(len(layout.lengths), layout.tokens, layout.pairs))
            return total / 3, total * 2 / 3

        return EmulatedModel(model, seconds)


def calibrate_compute(config: RunConfig, world: World) -> EmulatedCompute:
    """Measure the model step by step on rank 0 and share the result with all ranks."""
    loader = Loader.from_run(config, world_size=world.world_size)
    batches = list(itertools.islice(loader, _CALIBRATION_STEPS)) if world.is_rank_zero else []
    model, seconds = build_model_for(config, loader), []
    for _ in range(_REPEATS):
        seconds.append(compute_only_seconds(config, world, model, batches))
        world.transport.sum(0, name="calibration")  # shows the waiting ranks that rank 0 makes progress
    constants = torch.zeros(5, dtype=torch.float64)
    if world.is_rank_zero:
        products = NormalEquations()
        for batch, least in zip(batches, np.min(seconds, axis=0), strict=True):
            tokens, pairs = sizes(batch.history.lengths.numpy(), visibility=Visibility.of_model(config.model))
            products.add([[1.0, len(batch), tokens.sum(), pairs.sum()]], [least])
        fitted = fit(products)
        constants = torch.tensor([*fitted.cost.constants, fitted.step, fitted.error], dtype=torch.float64)
    sample, token, pair, step, error = world.transport.reduce_values(constants, name="calibration").tolist()
    if not sample + token + pair:
        remedy = "measure a larger model or larger batches"
        raise UsageError("the step time of this model does not depend on its samples", remedy=remedy)
    return EmulatedCompute(Cost(sample, token, pair), step, error)


def compute_only_ms(config: RunConfig, world: World, model: Model, batches: Iterable[Batch]) -> float:
    """Return the milliseconds of a step without communication, mean of all ranks. Balance does not change it."""
    seconds = compute_only_seconds(config, world, model, batches)[1:]
    if not seconds:
        what = "an epoch has fewer than 2 batches, so compute cannot be measured without its warm-up step"
        raise UsageError(what, remedy="train for at least 2 steps, on more data or with a smaller data.global_batch")
    mean_ms = torch.tensor(1e3 * statistics.mean(seconds), dtype=torch.float64)
    return float(world.transport.reduce_values(mean_ms, name="limit")) / world.world_size


def compute_only_seconds(config: RunConfig, world: World, model: Model, batches: Iterable[Batch]) -> list[float]:
    """Return the seconds of forward, backward and update of each batch, with local random rows."""
    network = SequenceModule(model).to(world.device)
    optimizer = build_optimizer(config, network.parameters())
    seconds = []
    for batch in batches:
        inputs = model.prepare(batch.to(world.device))
        (unique,) = network.unique_ids([inputs.ids])
        rows = {
            name: torch.randn(len(ids.unique), model.tables[name][1], device=world.device, requires_grad=True)
            for name, ids in unique.items()
        }
        begin = _synchronized_time(world.device)
        loss = network(inputs, unique, rows) / max(1, inputs.count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(_synchronized_time(world.device) - begin)
    return seconds


def _synchronized_time(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
