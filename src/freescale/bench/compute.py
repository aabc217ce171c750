"""What compute alone takes on a rank: nobody to wait for, every row at hand. The limit of every way to train."""

import itertools
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from freescale.balance.cost import Cost, Products, fit, sizes
from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.errors import UsageError
from freescale.models.protocol import Inputs, Model
from freescale.models.timed import Timed
from freescale.train.build import model_of, optimizer_of
from freescale.train.network import Network
from freescale.transport.world import World

_CALIBRATION_STEPS, _REPEATS = 16, 4


@dataclass(frozen=True)
class Compute:
    """Seconds of a step, as measured on one rank while the others waited."""

    cost: Cost
    step: float
    error: float
    """By what share a measured step is off this law."""

    def lane(self, model: Model) -> Timed:
        """Something in the place of a model that waits so long."""

        def seconds(inputs: Inputs) -> tuple[float, float]:
            lengths = inputs.layout.lengths.cpu().numpy()  # type: ignore[attr-defined]
            whole = self.step + float(self.cost.of(lengths).sum())
            return whole / 3, whole * 2 / 3

        return Timed(model, seconds)


def calibrated(config: RunConfig, world: World) -> Compute:
    """Measure the model on the first rank, one step after another; all ranks are told."""
    loader = Loader(config.data, seed=config.seed, rank=0, world_size=world.world_size)
    batches = list(itertools.islice(loader, _CALIBRATION_STEPS)) if world.is_rank_zero else []
    model, took = model_of(config, items=loader.vocabulary.rows), []
    for _ in range(_REPEATS):
        took.append(alone(config, world, model, batches))
        world.transport.sum(0, name="calibration")  # so that others, who wait, know that it goes on
    constants = torch.zeros(5, dtype=torch.float64)
    if world.is_rank_zero:
        products = Products()
        for batch, seconds in zip(batches, np.min(took, axis=0), strict=True):
            tokens, pairs = sizes(batch.history.lengths.numpy())
            products.add([[1.0, len(batch), tokens.sum(), pairs.sum()]], [seconds])
        found = fit(products)
        constants = torch.tensor([*found.cost.constants, found.step, found.error], dtype=torch.float64)
    sample, token, pair, step, error = world.transport.all_reduce(constants, name="calibration").wait().tolist()
    if not sample + token + pair:
        remedy = "measure a larger model or larger batches"
        raise UsageError("steps of this model take equally long, whatever their samples", remedy=remedy)
    return Compute(Cost(sample, token, pair), step, error)


def limit(config: RunConfig, world: World, model: Model, batches: Iterable[Batch]) -> float:
    """Milliseconds of a step that only computes, mean of all ranks: the same however samples are dealt over them."""
    took = alone(config, world, model, batches)[1:]
    if not took:
        what = "an epoch has fewer than 2 batches, so compute cannot be measured without its warm-up step"
        raise UsageError(what, remedy="train for at least 2 steps, on more data or with a smaller data.global_batch")
    own = torch.tensor(1e3 * statistics.mean(took), dtype=torch.float64)
    return float(world.transport.all_reduce(own, name="limit").wait()) / world.world_size


def alone(config: RunConfig, world: World, model: Model, batches: Iterable[Batch]) -> list[float]:
    """Seconds of forward, backward and update of each batch, with rows that are at hand."""
    network = Network(model, None).to(world.device)
    optimizer = optimizer_of(config, network.parameters())
    took = []
    for batch in batches:
        inputs = model.prepare(batch.to(world.device))
        (wanted,) = network.wanted([inputs.ids])
        rows = {
            name: torch.randn(len(ids.unique), model.tables[name][1], device=world.device, requires_grad=True)
            for name, ids in wanted.items()
        }
        begin = _now(world.device)
        loss = network(inputs, wanted, rows) / max(1, inputs.count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(_now(world.device) - begin)
    return took


def _now(device: torch.device) -> float:
    """When everything that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
