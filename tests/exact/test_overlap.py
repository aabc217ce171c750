"""Prioritized embedding communication (PEC) trains bitwise the same as synchronous communication."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from freescale.checkpoint.tensor_files import LocalRows, copy_to_host
from freescale.config import RunConfig
from freescale.overlap.executor import Executor
from freescale.overlap.schedule import overlapped
from freescale.train.build import build
from freescale.train.metrics_logger import read_entries
from freescale.transport import selection
from freescale.transport.base import Transport
from freescale.transport.selection import TRANSPORTS, TransportTiming
from tests.support.datasets import histories, write_dataset
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, held, joined, same, small, whole

STEPS, WHOLE_STEPS = 15, 30


def trained(world: World, config: RunConfig, folder: str, one_thread: bool) -> tuple[list[float], Arrays]:
    """This rank's losses, and what it holds in the end."""
    trainer = build(config, joined(world), Path(folder))
    step = trainer.components.step
    if one_thread:
        runner = step._runner
        runner.executor = Executor(overlapped(), runner._perform, runner._waiting, strictly_serial=True)
    run, losses = step.run, []

    def noting(*words: Any, **more: Any) -> Any:
        flight = run(*words, **more)
        losses.append(flight.loss)
        return flight

    step.run = noting  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    return losses, held(trainer)


def with_late_updates(world: World, config: RunConfig, folder: str) -> tuple[list[Any], list[Arrays]]:
    """Metrics of the evaluations and tensors of the checkpoints of a run whose deferred updates are late."""
    trainer = build(config, joined(world), Path(folder))
    operations: dict[str, Any] = dict(trainer.components.step._runner._operations)
    trainer.components.step._runner._operations = operations
    update, writer, saved = operations["update_deferred"], trainer.checkpoints._writer, []
    save = writer.save

    def late(*arguments: Any) -> None:
        time.sleep(0.3)
        update(*arguments)

    def noting(step: int, tensors: Mapping[str, LocalRows], facts: Mapping[str, Any]) -> None:
        copies = copy_to_host({name: rows for name, rows in tensors.items() if "generator" not in name})
        saved.append({name: rows.local.numpy() for name, rows in copies.items()})
        save(step, tensors, facts)

    operations["update_deferred"], writer.save = late, noting  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    evaluations = [entry for entry in read_entries(Path(folder)) if entry["kind"] == "evaluate"]
    return [{**entry, "time": 0} for entry in evaluations], saved


def probed_in_order(transports: Mapping[str, Transport], *_: Any, sizes: list[int]) -> list[TransportTiming]:
    return [TransportTiming(name, sizes[0], 1e-3 * n, 1e-3 * n) for n, name in enumerate(transports, 1)]


def autotuned(world: World, config: RunConfig, folder: str, stop_at: int) -> tuple[list[str], Arrays]:
    """The setting of each step of a run, which continues from the checkpoint of an earlier one, and what it holds.

    The transports that a run compares follow from the probe, whose times are noise here: they are the same in all runs.
    """
    with patch.object(selection, "probe", probed_in_order):
        trainer = build(config, joined(world), Path(folder))
    if (Path(folder) / "checkpoints").exists():
        trainer.checkpoints.resume()
    step, used = trainer.components.step, []
    run = step.run

    def noting(*words: Any, **options: Any) -> Any:
        used.append(str(trainer.components.autotuner._current))
        assert step.looks_ahead == ("overlap on" in used[-1])
        asked = trainer.progress.done + 1 == stop_at
        return run(*words, **options | {"stop": asked})

    step.run = noting  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    return used, held(trainer)


def test_an_autotuned_run_is_bitwise_that_of_every_fixed_setting_and_resumes_with_its_selection(
    groups: dict[int, Ranks], tmp_path: Path
) -> None:
    write_dataset(tmp_path / "data", histories([5, 9, 3, 7] * 18, items=400), rows_per_group=4, items=400)
    train = {"epochs": 7, "log_every": 40}
    config = small(tmp_path / "data", train=train, tables={"overlap": "auto"}, transport={"deferred": "auto"})
    used, tuned = zip(*groups[2].run(autotuned, config, str(tmp_path / "auto"), 0), strict=True)
    assert used[0] == used[1], "all ranks use the same setting in every step"
    assert {"overlap off", *(f"overlap on over {name}" for name in TRANSPORTS)} >= set(used[0])
    assert len(set(used[0][:30])) == 3 > len(set(used[0][30:])) == 1
    entries = [entry for entry in read_entries(tmp_path / "auto") if entry["kind"] == "autotune"]
    assert [(entry["step"], len(entry["ms"])) for entry in entries] == [(30, 3)]
    for overlap in ("off", "on"):
        fixed = small(tmp_path / "data", train=train, tables={"overlap": overlap})
        _, other = zip(*groups[2].run(autotuned, fixed, str(tmp_path / overlap), 0), strict=True)
        assert same(whole([*tuned]), whole([*other])), overlap
    stopped, _ = zip(*groups[2].run(autotuned, config, str(tmp_path / "again"), 35), strict=True)
    resumed, again = zip(*groups[2].run(autotuned, config, str(tmp_path / "again"), 0), strict=True)
    assert set(resumed[0]) == {stopped[0][-1]}, "the checkpoint holds the selection"
    assert same(whole([*tuned]), whole([*again]))


def test_evaluations_and_checkpoints_hold_the_deferred_updates(groups: dict[int, Ranks], tmp_path: Path) -> None:
    # Many items, so that a batch has rows which the next does not use.
    write_dataset(tmp_path / "data", histories([5, 9, 3, 7] * 12, items=400), rows_per_group=4, items=400)
    serial, ahead = (
        groups[2].run(
            with_late_updates,
            small(tmp_path / "data", tables={"overlap": overlap}, train={"max_steps": 2, "save_every": 1}),
            str(tmp_path / overlap),
        )
        for overlap in ("off", "on")
    )
    for (metrics, saved), (other_metrics, other_saved) in zip(serial, ahead, strict=True):
        assert (len(metrics), len(saved)) == (1, 2)
        assert other_metrics == metrics
        assert all(same(*arrays) for arrays in zip(saved, other_saved, strict=True))


@pytest.mark.parametrize(
    ("ranks", "optimizer", "precision", "way"),
    [
        (2, "sgd", "fp64", "shared_memory"),
        (2, "rowwise_adagrad", "fp32", "c10d"),
        (4, "sgd", "fp32", "host_staged"),
        (4, "rowwise_adagrad", "fp64", "shared_memory"),
    ],
)
def test_overlapped_is_bitwise_serial_for_every_transport(
    groups: dict[int, Ranks],
    log: Path,
    tmp_path: Path,
    ranks: int,
    optimizer: str,
    precision: str,
    way: str,
    whole_form: bool,
) -> None:
    found, steps = [], WHOLE_STEPS if whole_form else STEPS
    for overlap, one_thread in (("off", False), ("on", True), ("on", False)):
        config = small(
            log,
            tables={"overlap": overlap, "optimizer": optimizer},
            transport={"urgent": "c10d" if overlap == "off" else way, "deferred": way},
            train={"max_steps": steps, "epochs": 10, "precision": precision, "save_every": 7, "evaluate_every": 1},
        )
        parts = groups[ranks].run(trained, config, str(tmp_path / f"{overlap}-{one_thread}"), one_thread)
        found.append(([losses for losses, _ in parts], whole([arrays for _, arrays in parts])))
    (losses, arrays), *others = found
    for other_losses, other_arrays in others:
        assert other_losses == losses
        assert same(other_arrays, arrays)
