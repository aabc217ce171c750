"""On a GPU the updates themselves depend on the check of the gradient: a faulty step changes nothing there either."""

from pathlib import Path

import pytest

from freescale.data.loader import Loader
from tests.faults.test_nonfinite import BAD, one_epoch, trained
from tests.support.ranks import RankError, Ranks
from tests.support.training import apart, same, whole


@pytest.fixture(scope="module")
def bad_step(log: Path) -> int:
    """The step, counted from 1, that has the sample."""
    config = one_epoch(log)
    return 1 + next(i for i, batch in enumerate(Loader(config.data, seed=config.seed)) if BAD in batch.sample_id)


@pytest.mark.parametrize(("where", "optimizer"), [("loss", "adamw"), ("gradient", "sgd")])
def test_a_skipped_step_changes_nothing(
    gpus: Ranks, groups: dict[int, Ranks], log: Path, tmp_path: Path, bad_step: int, where: str, optimizer: str
) -> None:
    train = {"on_fault": "skip", "optimizer": optimizer, "weight_decay": 0.1}
    before, after, later, on_cpu = (
        whole(ranks.run(trained, one_epoch(log, max_steps=n, **train), str(tmp_path / f"{number}"), where))
        for number, (ranks, n) in enumerate(
            [(gpus, bad_step - 1), (gpus, bad_step), (gpus, bad_step + 2), (groups[2], bad_step + 2)]
        )
    )
    assert same(before, after)
    assert apart(on_cpu, later) < 1e-9 < apart(after, later)  # with a next batch some rows are updated before the end


@pytest.mark.parametrize("where", ["loss", "rows"])
def test_rollback_gives_the_result_of_training_without_the_sample(
    gpus: Ranks, log: Path, tmp_path: Path, where: str
) -> None:
    config = one_epoch(log, on_fault="rollback")
    without = gpus.run(trained, config, str(tmp_path / "without"), "nowhere", (BAD,))
    rolled_back = gpus.run(trained, config, str(tmp_path / "rolled back"), where)
    assert same(whole(without), whole(rolled_back))


def test_stop_ends_all_ranks_in_the_same_step_and_names_the_sample(
    gpus: Ranks, log: Path, tmp_path: Path, bad_step: int
) -> None:
    with pytest.raises(RankError) as raised:
        gpus.run(trained, one_epoch(log, on_fault="stop"), str(tmp_path), "gradient")
    said = str(raised.value)
    assert said.count(f"samples {BAD}") == 2, "both ranks name it"
    assert said.count(f"step {bad_step}: the gradient is not finite") == 2
