"""One seed gives one result, and a resumed run equals the uninterrupted one."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from freescale.checkpoint import checkpoints
from freescale.checkpoint.tensor_files import CheckpointError
from freescale.config import RunConfig, save
from freescale.train.build import build
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, apart, held, joined, same, small, whole

FP32 = {"precision": "fp32", "save_every": 10, "warmup_steps": 3, "decay": "cosine"}


def train(world: World, config: RunConfig, folder: str, resume: bool, stop_at: int) -> Arrays:
    """Train from the beginning or from the newest checkpoint; `stop_at` asks this rank to end, as a signal would."""
    trainer = build(config, joined(world), Path(folder))
    if resume:
        trainer.checkpoints.resume()
    run = trainer.components.step.run

    def counted(*arguments: object, **options: object) -> object:
        asked = world.rank == world.ranks - 1 and trainer.progress.done + 1 == stop_at
        return run(*arguments, **options | {"stop": asked})  # type: ignore[arg-type]

    trainer.components.step.run = counted  # type: ignore[method-assign]
    finished = trainer.fit()
    trainer.close()
    assert finished == (stop_at == 0)
    return held(trainer)


def refused(world: World, config: RunConfig, folder: str) -> int:
    """Try to resume; gives the exit code of the error."""
    trainer = build(config, joined(world), Path(folder))
    try:
        trainer.checkpoints.resume()
    except CheckpointError as error:
        return error.exit_code
    finally:
        trainer.components.profiler.close()
        trainer.close()
    return 0


def pieces(ranks: Sequence[Ranks], config: RunConfig, folder: Path, stops: Sequence[int]) -> Arrays:
    """One run in pieces, each on its own ranks, resumed where the one before it stopped."""
    results: list[Arrays] = []
    for number, (group, end) in enumerate(zip(ranks, [*stops, 0], strict=True)):
        results = group.run(train, config, str(folder), number > 0, end)
    return whole(results)


def finished_run(group: Ranks, config: RunConfig, folder: Path) -> Arrays:
    """A run from its beginning to its end, in a folder that other code can load it from."""
    arrays = pieces([group], config, folder, [])
    save(config, folder / "config.toml")
    return arrays


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.whole)])
@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_a_run_is_bitwise_repeatable_and_resumes_bitwise_also_twice(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, count: int, placement: str, whole_form: bool
) -> None:
    config = small(log, train=FP32, tables={"placement": placement})
    once = pieces([groups[count]], config, tmp_path / "a", [])
    assert same(once, pieces([groups[count]], config, tmp_path / "b", [])), "the same command twice"
    for stops in ([1], [7], [12], [5, 17]) if whole_form else ([1], [5, 17]):
        resumed = pieces([groups[count]] * (len(stops) + 1), config, tmp_path / f"stopped at {stops}", stops)
        assert same(once, resumed), stops


def test_a_run_resumes_on_any_other_world_size(groups: dict[int, Ranks], log: Path, tmp_path: Path) -> None:
    config = small(log, train={"save_every": 10})
    once = pieces([groups[2]], config, tmp_path / "a", [])
    for i, (counts, stops) in enumerate([((2, 4), [6]), ((4, 1), [13]), ((1, 4, 2), [3, 11])]):
        resumed = pieces([groups[count] for count in counts], config, tmp_path / str(i), stops)
        assert apart(once, resumed) < 1e-9, (counts, stops)


@pytest.mark.parametrize(
    ("before", "count", "task"),
    [
        ("block", 2, "retrieval"),
        ("zigzag", 4, "ranking"),
        pytest.param("zigzag", 2, "ranking", marks=pytest.mark.whole),
        pytest.param("block", 4, "retrieval", marks=pytest.mark.whole),
    ],
)
def test_owners_of_rows_change_nothing_and_checkpoints_of_both_rules_read_each_other(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, before: str, count: int, task: str
) -> None:
    after, labels = "zigzag" if before == "block" else "block", ("label_click",) if task == "ranking" else ()
    first, then = (
        small(log, train=FP32, tables={"owners": owners}, task={"kind": task, "labels": labels})
        for owners in (before, after)
    )
    once = pieces([groups[count]], then, tmp_path / "a", [])
    groups[count].run(train, first, str(tmp_path / "b"), False, 7)
    resumed = whole(groups[count].run(train, then, str(tmp_path / "b"), True, 0))
    assert same(once, resumed)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_gives_the_same_run(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    config = small(log, train={**FP32, "save_every": 4})
    once = pieces([groups[2]], config, tmp_path / "a", [])
    groups[2].run(train, config, str(tmp_path / "b"), False, 9)
    older, newest = checkpoints.complete_checkpoints(tmp_path / "b" / "checkpoints")[-2:]
    file = newest / "rank-00001.bytes"
    file.write_bytes(file.read_bytes()[:-1])
    resumed = whole(groups[2].run(train, config, str(tmp_path / "b"), True, 0))
    assert same(once, resumed)
    assert newest.with_name(newest.name + ".damaged").exists()
    assert checkpoints.step_of(older) == 8
    for checkpoint in checkpoints.complete_checkpoints(tmp_path / "b" / "checkpoints"):
        (checkpoint / "rank-00000.bytes").unlink()
    codes = groups[2].run(refused, config, str(tmp_path / "b"))
    assert codes == [2, 2], "no restart would help, and it would begin again from nothing"
