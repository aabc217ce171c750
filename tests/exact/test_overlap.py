"""Prioritized embedding communication (PEC) trains bitwise the same as synchronous communication."""

from pathlib import Path
from typing import Any

import pytest

from freescale.config import RunConfig
from freescale.overlap.executor import Executor
from freescale.overlap.schedule import overlapped
from freescale.train.build import build
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
