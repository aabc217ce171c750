"""metrics.jsonl holds the means over all steps of a training and each of its starts, however often it went back."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freescale.config import RunConfig
from freescale.errors import DataError
from freescale.train.build import build
from freescale.train.curves import find_starts, repeated_steps
from freescale.train.metrics_logger import MetricsLogger, count_damaged_lines, read_entries
from tests.faults.test_nonfinite import one_epoch
from tests.faults.test_nonfinite import trained as poisoned
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small

STEPS = 10


def train(world: World, config: RunConfig, folder: str, resume: bool = False) -> None:
    trainer = build(config, joined(world), Path(folder), quiet=True)
    if resume:
        trainer.checkpoints.resume()
    trainer.close(finished=trainer.fit())


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read_entries(run) if entry["kind"] == kind]


def test_a_train_entry_is_the_mean_over_the_steps_since_the_entry_before(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    config = small(log, train={"max_steps": STEPS, "log_every": 1})
    groups[2].run(train, config, str(tmp_path / "each"))
    groups[2].run(train, replace(config, train=replace(config.train, log_every=5)), str(tmp_path / "five"))
    each, five = of_kind(tmp_path / "each", "train"), of_kind(tmp_path / "five", "train")
    assert len(each) == STEPS
    for place, entry in enumerate(five):
        part = each[5 * place : 5 * place + 5]
        assert entry["loss"] == pytest.approx(sum(one["loss"] for one in part) / 5)
        assert entry["grad_norm"] == pytest.approx(sum(one["grad_norm"] for one in part) / 5)
        assert entry["grad_norm_max"] == max(one["grad_norm_max"] for one in part)
    for entry in (*each, *five):
        assert entry["samples/s"] * entry["seconds"] == pytest.approx(config.data.global_batch)
    for entry in each:
        assert 0 < entry["unique_ids"] <= 1
        assert 0 <= entry["colliding_ids"] <= 1
        assert (entry["lr"], entry["tables_lr"]) == (0.01, 0.1)
    assert each[0]["colliding_ids"] == 0, "there is no batch before the first"
    assert max(entry["colliding_ids"] for entry in each) > 0
    balanced = [entry for entry in five if "imbalance_after" in entry]
    assert balanced
    assert all(1 <= entry["imbalance_after"] <= entry["imbalance_before"] + 1e-9 for entry in balanced)
    assert all(0 <= entry["moved_tokens"] <= 1 for entry in balanced)


def test_an_evaluation_between_two_train_entries_drops_no_step(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    config = small(log, train={"max_steps": 15, "log_every": 5, "evaluate_every": 0})
    groups[1].run(train, config, str(tmp_path / "without"))
    groups[1].run(train, replace(config, train=replace(config.train, evaluate_every=1)), str(tmp_path / "with"))
    (between, _), expected = of_kind(tmp_path / "with", "evaluate"), of_kind(tmp_path / "without", "train")
    assert between["step"] % 5, "the evaluation falls between two entries"
    names = ("step", "loss", "grad_norm", "grad_norm_max", "unique_ids")
    logged = of_kind(tmp_path / "with", "train")
    assert [[entry[name] for name in names] for entry in logged] == [
        [entry[name] for name in names] for entry in expected
    ]


def test_a_skipped_step_has_no_loss_rather_than_a_loss_of_zero(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    groups[1].run(poisoned, one_epoch(log, on_fault="skip", log_every=1), str(tmp_path), "loss")
    (fault,) = of_kind(tmp_path, "fault")
    losses = {entry["step"]: entry["loss"] for entry in of_kind(tmp_path, "train")}
    assert [step for step, loss in losses.items() if math.isnan(loss)] == [fault["step"]]


def test_a_resumed_run_logs_every_start(groups: dict[int, Ranks], log: Path, tmp_path: Path) -> None:
    config = small(log, train={"max_steps": 4, "log_every": 1, "save_every": 2})
    groups[2].run(train, config, str(tmp_path))
    groups[1].run(train, replace(config, train=replace(config.train, max_steps=6)), str(tmp_path), True)
    starts = find_starts(read_entries(tmp_path))
    assert [(start.step, start.world_size, start.reached, start.reason) for start in starts] == [
        (0, 2, 4, "new run"),
        (4, 1, 6, "resumed"),
    ]
    assert all(start.seconds > 0 for start in starts)
    assert starts[0].until <= starts[1].began


def test_a_rewind_keeps_starts_and_recoveries_and_records_the_last_dropped_step(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, is_rank_zero=True, steps=100, quiet=True)
    for resumed in (0, 40, 40):  # lost twice, each time before the next checkpoint
        logger.rewind(resumed)
        logger.log_start(resumed, world_size=2, reason="a rank was lost" if resumed else "new run")
        logger.write({"kind": "recovery", "step": resumed + 1, "seconds": 1.0})
        for step in range(resumed + 5, 60, 5):
            logger.write({"kind": "train", "step": step, "loss": 1.0})
    stored = list(read_entries(tmp_path))
    assert [entry["step"] for entry in stored if entry["kind"] == "train"] == list(range(5, 60, 5))
    assert [(start.step, start.reached) for start in find_starts(stored)] == [(0, 55), (40, 55), (40, 55)]
    assert sum(entry["kind"] == "recovery" for entry in stored) == 3
    assert repeated_steps(stored) == 30


def test_a_new_run_in_the_folder_of_a_lost_one_drops_its_entries(tmp_path: Path) -> None:
    for _ in range(2):
        logger = MetricsLogger(tmp_path, is_rank_zero=True, steps=100, quiet=True)
        logger.log_start(0, world_size=1, reason="new run")
        logger.write({"kind": "train", "step": 5, "loss": 1.0})
    assert [entry["step"] for entry in of_kind(tmp_path, "train")] == [5]
    assert len(find_starts(read_entries(tmp_path))) == 2


@pytest.mark.parametrize(
    "line", ['{"step": 3}', "[" * 100_000, '{"kind": "train", "step": 1e9}', "[1]", '{"kind": "tr']
)
def test_damaged_lines_are_counted_and_skipped(tmp_path: Path, line: str) -> None:
    whole = json.dumps({"kind": "train", "step": 1, "loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text(f"{whole}\n{line}")
    assert len(list(read_entries(tmp_path))) == 1
    assert count_damaged_lines(tmp_path) == 1


def test_metrics_that_cannot_be_read_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    assert list(read_entries(tmp_path)) == []
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        list(read_entries(tmp_path))
