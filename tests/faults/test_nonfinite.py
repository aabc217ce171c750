"""All ranks detect NaN and Inf in the same step, name the samples, and apply no such update."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.nonfinite import GradNormMonitor
from tests.support.ranks import RankError, Ranks, World
from tests.support.training import Arrays, held, joined, same, small, whole

BAD = 77
"""The sample that is poisoned."""


@dataclass(frozen=True)
class Inputs:
    ids: dict[str, Tensor]
    target: Tensor
    bad: Tensor

    @property
    def count(self) -> int:
        return len(self.target)


class Poisoned(nn.Module):
    """Learns how long a history is from its last item; one sample gives what is not a number."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.tables = {"item": (56, 8)}
        torch.manual_seed(1)
        self.head, self.where = nn.Linear(8, 1), where

    def prepare(self, batch: Batch) -> Inputs:
        known = batch.history.lengths > 0
        last = batch.history.offsets[1:][known] - 1
        lengths, bad = batch.history.lengths[known].double().log(), batch.sample_id[known] == BAD
        return Inputs({"item": batch.history["item_id"][last]}, lengths, bad)

    def forward(self, inputs: Inputs, rows: Any) -> Tensor:
        each = rows["item"].lookup()
        said = self.head(each)[:, 0]
        losses = (said - inputs.target).square()
        if self.where == "loss":
            losses = losses * torch.where(inputs.bad, torch.nan, 1.0)
        elif self.where == "gradient":  # the root of nothing is nothing, and has no slope
            losses = losses + torch.where(inputs.bad, said * 0, 1.0).sqrt()
        elif self.where == "rows":  # the same, where only the gradients of rows can see it
            losses = losses + torch.where(inputs.bad, each.sum(1) * 0, 1.0).sqrt()
        return losses.sum()


def trained(world: World, config: RunConfig, folder: str, where: str, left_out: tuple[int, ...] = ()) -> Arrays:
    trainer = build(config, joined(world), Path(folder), model=Poisoned(where))
    trainer.progress.excluded |= set(left_out)
    trainer.fit()
    trainer.close()
    return held(trainer)


def one_epoch(log: Path, **train: Any) -> RunConfig:
    return small(log, train={"epochs": 1, "save_every": 3, **train}, balance={"cost": (0.0, 1.0, 0.0)})


@pytest.fixture(scope="module")
def bad_step(log: Path) -> int:
    """The step, counted from 1, that has the sample."""
    config = one_epoch(log)
    return 1 + next(i for i, batch in enumerate(Loader(config.data, seed=config.seed)) if BAD in batch.sample_id)


@pytest.mark.parametrize("where", ["loss", "gradient", "rows"])
def test_stop_ends_all_ranks_in_the_same_step_and_names_the_sample(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, bad_step: int, where: str
) -> None:
    with pytest.raises(RankError) as raised:
        groups[2].run(trained, one_epoch(log, on_fault="stop"), str(tmp_path), where)
    said = str(raised.value)
    assert said.count(f"samples {BAD}") == 2, "both ranks name it"
    if where != "rows":  # what only rows show is told to the others with a later batch
        assert said.count(f"step {bad_step}: the gradient is not finite") == 2


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_skipped_step_changes_nothing(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, bad_step: int, ranks: int, where: str
) -> None:
    before, after = (
        whole(groups[ranks].run(trained, one_epoch(log, on_fault="skip", max_steps=n), str(tmp_path / str(n)), where))
        for n in (bad_step - 1, bad_step)
    )
    assert same(before, after)


@pytest.mark.parametrize("where", ["loss", "gradient", "rows"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rollback_gives_the_result_of_training_without_the_sample(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, ranks: int, where: str
) -> None:
    config = one_epoch(log, on_fault="rollback")
    without = groups[ranks].run(trained, config, str(tmp_path / "without"), "nowhere", (BAD,))
    rolled_back = groups[ranks].run(trained, config, str(tmp_path / "rolled back"), where)
    assert same(whole(without), whole(rolled_back))
    metrics = (tmp_path / "rolled back" / "metrics.jsonl").read_text()
    assert f'"samples": [{BAD}]' in metrics


def excluded_after_a_resume(world: World, config: RunConfig, folder: str) -> set[int]:
    trainer = build(config, joined(world), Path(folder), model=Poisoned("loss"))
    trainer.checkpoints.resume()
    return trainer.progress.excluded


def test_a_resumed_run_still_excludes_the_sample(groups: dict[int, Ranks], log: Path, tmp_path: Path) -> None:
    config = one_epoch(log, on_fault="rollback")
    groups[2].run(trained, config, str(tmp_path), "loss")
    assert groups[2].run(excluded_after_a_resume, config, str(tmp_path)) == [{BAD}, {BAD}]


def test_a_spike_of_the_gradient_norm_is_a_fault_and_skips_the_update() -> None:
    judge = GradNormMonitor(spike=10.0)
    assert not any(judge.fault(norm) for norm in [1.0, 2.0, 3.0] * 4)
    assert judge.fault(21.0) == "the gradient norm is 10 times its recent median"
    resumed = GradNormMonitor(spike=10.0)
    resumed.load_state_dict(judge.state_dict())
    assert [one.fault(19.0) for one in (judge, resumed)] == ["", ""]
    assert judge.fault(float("inf")) == judge.fault(float("nan")) == "the gradient is not finite"
    assert not any(GradNormMonitor(spike=0.0).fault(norm) for norm in [1.0] * 20 + [1e9])
