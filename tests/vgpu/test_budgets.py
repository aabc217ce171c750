"""How often a step makes the host wait for a GPU, and how many kernels it launches: limits that are kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.ranks import Ranks, World
from tests.support.vgpu.budget import CountedRun, count_step, write_logs

MOST_MAIN_SYNCS, MOST_DEFERRED_SYNCS = 1, 4
"""Per step, whatever the number of tables and features. On the deferred thread: numbers of unique ids, of loss terms,
of ids by rank, and of shared ids."""
MOST_LAUNCHES = {"retrieval": 60 * 2 + 250, "ranking-features": 440}
"""60 per layer and 250; with features of every kind, seven tables of three widths and experts: what is reached."""
WARM_UP_STEPS = 3


def is_within_limits(counted: dict[str, Any]) -> bool:
    return counted["main_syncs"] <= MOST_MAIN_SYNCS and counted["deferred_syncs"] <= MOST_DEFERRED_SYNCS


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    write_logs(folder)
    return folder


@pytest.mark.parametrize("task", ["retrieval", "ranking-features"])
def test_a_step_waits_for_the_gpu_as_often_as_the_limit_says_with_any_number_of_tokens(
    gpus: Ranks, logs: Path, task: str
) -> None:
    once, twice = (
        gpus.run(count_step, str(logs), name, "fp32", WARM_UP_STEPS, timeout=400)[0] for name in (task, f"{task}-2x")
    )
    for counted in (once, twice):
        assert is_within_limits(counted), counted["syncs_by_line"]
        assert counted["reports"] == 0
        assert counted["launches"] <= MOST_LAUNCHES[task], counted["launches_by_line"]
    assert twice["events"] > 1.5 * once["events"]
    assert twice["launches"] - twice["loss_launches"] == once["launches"] - once["loss_launches"]


def test_dynamic_ids_keep_the_limits(gpus: Ranks, logs: Path) -> None:
    counted = gpus.run(count_step, str(logs), "retrieval-dynamic", "fp32", WARM_UP_STEPS, timeout=400)[0]
    assert is_within_limits(counted), counted["syncs_by_line"]
    assert counted["reports"] == 0


def _synchronize(_: Tensor) -> None:
    torch.accelerator.synchronize()


def _synchronize_event(_: Tensor) -> None:
    torch.accelerator.current_stream().record_event().synchronize()


WAITS: list[tuple[str, str, Callable[[Tensor], object]]] = [
    ("freescale.train.sharded_model.SequenceModule", "rows", lambda x: x.item()),
    ("freescale.train.sharded_model.SequenceModule", "unique_ids", lambda x: x.tolist()),
    ("freescale.embedding.sharded.ShardedTables", "update", lambda x: x.nonzero()),
    ("freescale.embedding.sharded.ShardedTables", "look_up", lambda x: bool(x)),
    ("freescale.embedding.sharded.ShardedTables", "allocate_rows", lambda x: x[x > 0]),
    ("freescale.embedding.exchange.EmbeddingExchange", "send_rows", lambda x: x.cpu()),
    ("freescale.embedding.exchange.EmbeddingExchange", "send_ids", _synchronize),
    ("freescale.embedding.exchange.AllToAllPlan", "by_owner", _synchronize_event),
    ("freescale.embedding.row_update", "update_rows", lambda x: x.unique()),
    ("freescale.train.step", "withhold_nonfinite", lambda x: torch.tensor([1.0], device=x.device)),
    ("freescale.train.step.Step", "_gradient_sync", lambda x: x.long().view(1).repeat_interleave(x.long().view(1))),
    ("torch.nn.utils", "get_total_norm", lambda x: torch.equal(x, x)),
]
"""What makes the host wait, planted into operations of a step."""


@contextmanager
def planted(target: str, name: str, wait: Callable[[Tensor], object]) -> Iterator[None]:
    """Let a function of the step wait for the device, too."""
    from freescale.transport.c10d import device_of

    owner = _resolve(target)
    function = getattr(owner, name)

    def waiting(*args: Any, **options: Any) -> Any:
        assert torch.distributed.group.WORLD is not None
        wait(torch.ones((), device=device_of(torch.distributed.group.WORLD)))
        return function(*args, **options)

    with patch.object(owner, name, waiting):
        yield


def _resolve(target: str) -> Any:
    import importlib

    try:
        return importlib.import_module(target)
    except ModuleNotFoundError:
        module, _, owner = target.rpartition(".")
        return getattr(importlib.import_module(module), owner)


def count_planted_steps(world: World, folder: str) -> list[tuple[int, int]]:
    """Run a step without and then one with each planted wait; return how often each waits in both threads."""
    run = CountedRun(world, folder, "retrieval", "fp32")
    counts = [run.step() for _ in range(WARM_UP_STEPS)][-1:]
    for entry in WAITS:
        with planted(*entry):
            counts.append(run.step())
    run.close()
    return [(counted["main_syncs"], counted["deferred_syncs"]) for counted in counts]


def test_every_planted_wait_exceeds_the_limits(gpus: Ranks, logs: Path) -> None:
    assert len({name for _, name, _ in WAITS}) >= 10
    for counts in gpus.run(count_planted_steps, str(logs), timeout=400):
        names, limits = ("main_syncs", "deferred_syncs"), is_within_limits
        within = [limits(dict(zip(names, counted, strict=True))) for counted in counts]
        assert within == [True] + [False] * len(WAITS), counts
