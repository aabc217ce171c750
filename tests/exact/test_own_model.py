"""A custom model with several tables of several widths trains as exactly as the built-in models."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.embedding.tables import Table
from freescale.models.protocol import Rows
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, apart, placed, small, whole

STEPS, WHOLE_STEPS = 25, 200


@dataclass(frozen=True)
class Pairs:
    """The first and the last item of each user, and how long the history is."""

    ids: dict[str, Tensor]
    target: Tensor

    @property
    def count(self) -> int:
        return len(self.target)


class Length(nn.Module):
    """Learns the length of a history from its user, its first and its last item: two tables, of widths 4 and 8."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {"user": (137, 4), "item": (56, 8)}
        self.mix = nn.Linear(20, 1)

    def prepare(self, batch: Batch) -> Pairs:
        found = batch.history.lengths > 0
        begin, end = batch.history.offsets[:-1][found], batch.history.offsets[1:][found]
        items = batch.history["item_id"][torch.stack([begin, end - 1])]
        return Pairs(
            {"user": batch.scalars["user_id"][found], "item": items}, batch.history.lengths[found].double().log()
        )

    def forward(self, inputs: Pairs, rows: Mapping[str, Rows]) -> Tensor:
        x = torch.cat([rows["user"].lookup(), *rows["item"].lookup()], dim=1)
        return (self.mix(x)[:, 0] - inputs.target).square().sum()


def own() -> Length:
    torch.manual_seed(0)
    return Length()


def placed_own(world: World, folder: str, path: str, place: str) -> tuple[list[float], Arrays]:
    return placed(world, small(path, train={"micro_batches": 2}), folder, place, 20, model=own())


def test_a_custom_model_trains_the_same_on_any_world_size(groups: dict[int, Ranks], log: Path, tmp_path: Path) -> None:
    ((losses, alone),) = groups[1].run(placed_own, str(tmp_path), str(log), "equal")
    assert losses[-1] < losses[0]
    for count in (2, 4):
        for place in ("unequal", "last rank empty"):
            results = groups[count].run(placed_own, str(tmp_path), str(log), place)
            assert np.allclose(losses, np.sum([part for part, _ in results], axis=0), rtol=1e-9)
            assert apart(whole([alone]), whole([held for _, held in results])) < 1e-9


def trained_ahead(world: World, folder: str, path: str, optimizer: str, steps: int) -> tuple[list[float], Arrays]:
    config = small(path, tables={"optimizer": optimizer, "overlap": "on"}, train={"optimizer": "sgd"})
    return placed(world, config, folder, "unequal", steps, model=own())


def by_hand(path: Path, optimizer: str, steps: int) -> tuple[list[float], Arrays]:
    """The same training in plain torch: whole tables, autograd, and optimizers written out."""
    config, model = small(path), own().double()
    tables = {n: torch.empty(rows, dim, dtype=torch.float64) for n, (rows, dim) in model.tables.items()}
    for name, values in tables.items():
        Table(name, values.shape[0], values.shape[1]).fill(values, 0, seed=config.seed, deviation=config.tables.init)
    sums = {name: torch.zeros(len(values), 1, dtype=torch.float64) for name, values in tables.items()}
    losses, batches = [], list(Loader(config.data, seed=config.seed))
    for step in range(steps):
        inputs = model.prepare(batches[step % len(batches)])
        rows = {name: Rows(values.requires_grad_(), inputs.ids[name]) for name, values in tables.items()}
        loss = model(inputs, rows) / inputs.count
        losses.append(float(loss.detach()))
        parameters, names = list(model.parameters()), list(tables)
        gradients = torch.autograd.grad(loss, [*parameters, *tables.values()])
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=False):
                parameter -= config.train.lr * gradient
            for name, gradient in zip(names, gradients[len(parameters) :], strict=True):
                scale = torch.ones_like(sums[name])
                if optimizer == "rowwise_adagrad":
                    sums[name] += gradient.square().mean(1, keepdim=True)
                    scale = sums[name].sqrt() + config.tables.eps
                tables[name] = tables[name].detach() - config.tables.lr * gradient / scale
    found = {f"dense.model.{n}": p.detach() for n, p in model.named_parameters()} | tables
    found |= {f"{n}.sum": value for n, value in sums.items()} if optimizer == "rowwise_adagrad" else {}
    return losses, {name: value.numpy() for name, value in found.items()}


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_prioritized_training_equals_plain_torch_after_many_steps(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, optimizer: str, whole_form: bool
) -> None:
    steps = WHOLE_STEPS if whole_form else STEPS
    losses, alone = by_hand(log, optimizer, steps)
    for count in (2, 4):
        results = groups[count].run(trained_ahead, str(tmp_path), str(log), optimizer, steps)
        assert np.allclose(losses, np.sum([part for part, _ in results], axis=0), rtol=1e-9)
        assert apart(alone, whole([held for _, held in results])) < 1e-9
