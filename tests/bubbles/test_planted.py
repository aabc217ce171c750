"""Promise: a bubble that was put there is found, as long as it is, under its own name, and no other cause grows.

Real processes train over real links on the timed compute lane. What is planted is planted in every second step, so
that each step with it has a neighbour without. A machine that others share may slow down in the middle of a run: what
is put there must be found in one of a dozen runs, and a ledger that is wrong is wrong in all of them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freescale.balance.prefetch import Batches
from freescale.bubbles.events import CAUSES
from freescale.bubbles.ledger import account
from freescale.bubbles.records import read_samples
from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.models.protocol import Inputs
from freescale.models.retrieval import Retrieval
from freescale.models.timed import Timed
from freescale.train.build import build
from freescale.train.trainer import Trainer
from tests.support import histories, write_dataset
from tests.support.lab import Lab, lab
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small

pytestmark = pytest.mark.quiet
FORWARD, BACKWARD = 0.015, 0.030
SLEEP, STALL, MBIT = 0.030, 0.025, 500
STEPS = 31


class Sleepy(Timed):
    """Rests before it comes to the first collective of every second step."""

    def prepare(self, batch: Batch) -> Inputs:
        inputs = super().prepare(batch)
        time.sleep(SLEEP if batch.step_key % 2 else 0.0)
        return inputs


class Ready:
    """Batches of a loader, there before the run begins; every second one may be given late."""

    def __init__(self, loader: Batches, stall: float) -> None:
        self.state_dict, self.report = loader.state_dict, loader.report
        self._batches, self._stall = list(loader), stall

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            time.sleep(self._stall if batch.step_key % 2 else 0.0)
            yield batch


def timed_run(world: World, config: RunConfig, folder: str, plant: str) -> int:
    """Train; gives the bytes of gradients that the ranks add up."""
    items = Loader(config.data, seed=0).vocabulary.rows
    kind = Sleepy if plant == "sleep" and world.rank == 1 else Timed
    model = kind(Retrieval(config, items=items), lambda _: (FORWARD, BACKWARD))
    trainer = build(config, joined(world), Path(folder), model=model)
    ready = Ready(trainer.parts.loader, STALL if plant == "stall" else 0.0)
    parts = replace(trainer.parts, loader=ready)  # type: ignore[arg-type]
    Trainer(parts, Path(folder), trainer._journal).fit()
    return sum(4 * parameter.numel() for parameter in parts.network.parameters())


def causes_of(folder: Path, *, odd: bool) -> dict[str, list[float]]:
    """Median milliseconds of every cause on every rank, over steps of which every second has something planted."""
    samples = {step: of_ranks for step, of_ranks in read_samples(folder).items() if step > 3}
    steps = [
        [np.array(account(sample.step, sample.last).causes) / 1e6 for sample in of_ranks]
        for step, of_ranks in samples.items()
        if (step - 1) % 2 == odd  # the batch of step 1 is batch 0
    ]
    return dict(zip(CAUSES, np.median(steps, axis=0).T.tolist(), strict=True))


def grown(folder: Path, *, than: Path | None = None) -> dict[str, list[float]]:
    """By how much each cause is longer where something was planted, on every rank: than in the steps between."""
    with_it = causes_of(folder, odd=True)
    without = causes_of(than or folder, odd=False)
    return {cause: [a - b for a, b in zip(with_it[cause], without[cause], strict=True)] for cause in CAUSES}


@contextlib.contextmanager
def started(ranks: int, hosts: Lab) -> Iterator[Ranks]:
    group = Ranks(ranks, hosts)
    try:
        yield group
    finally:
        group.close()


def short(path: Path, **changes: dict[str, object]) -> RunConfig:
    train = {
        "precision": "fp32",
        "max_steps": STEPS,
        "epochs": 10,
        "save_every": 10**6,
        "log_every": 10**6,
        "optimizer": "sgd",
    }
    return small(path, train=train, tables={"placement": "replicated"}, balance={"mode": "off"}, **changes)


def found(planted: float, measured: float) -> bool:
    return abs(measured - planted) <= max(0.1 * planted, 3.0)


def missed(more: dict[str, list[float]], planted: dict[str, list[float]]) -> list[str]:
    """Causes that did not grow by what was planted, and others that grew."""
    return [
        f"{cause} on rank {rank} grew by {ms:.1f} ms"
        for cause, of_ranks in more.items()
        for rank, ms in enumerate(of_ranks)
        if not (found(planted[cause][rank], ms) if cause in planted else ms <= 3.0)
    ]


def missed_every_time(measure: Callable[[int], list[str]], times: int = 12) -> list[str]:
    """What a run missed, when none of several runs found it all."""
    misses: list[str] = []
    for attempt in range(times):
        misses = measure(attempt)
        if not misses:
            break
    return misses


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sleep_before_a_collective_makes_the_others_wait_and_nothing_else(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, ranks: int
) -> None:
    slept = [1e3 * SLEEP if rank == 1 else 0.0 for rank in range(ranks)]
    waited = [0.0 if rank == 1 else 1e3 * SLEEP for rank in range(ranks)]

    def measure(attempt: int) -> list[str]:
        run = tmp_path / str(attempt)
        groups[ranks].run(timed_run, short(log), str(run), "sleep")
        return missed(grown(run), {"host": slept, "straggler": waited})

    assert missed_every_time(measure) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stall_of_the_data_is_found_on_every_rank_and_nothing_else(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, ranks: int
) -> None:
    def measure(attempt: int) -> list[str]:
        run = tmp_path / str(attempt)
        groups[ranks].run(timed_run, short(log), str(run), "stall")
        return missed(grown(run), {"data": [1e3 * STALL] * ranks})

    assert missed_every_time(measure) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_link_is_found_as_the_traffic_that_goes_over_it(tmp_path: Path, ranks: int) -> None:
    write_dataset(tmp_path / "data", histories([10] * 400, items=5_000), rows_per_group=4, items=5_000)
    config = short(tmp_path / "data", model={"dim": 128, "layers": 1})

    def measure(attempt: int) -> list[str]:
        fast, slow = tmp_path / f"fast{attempt}", tmp_path / f"slow{attempt}"
        with lab(2) as hosts, started(ranks, hosts) as group:
            group.run(timed_run, config, str(fast), "")
            hosts.shape(MBIT)
            summed = group.run(timed_run, config, str(slow), "")[0]
        # A ring of ranks sends 2 (ranks - 1) / ranks of the gradients over each of its links; 1,448 bytes are 1,514 on
        # the wire. While the wire is busy, everything else that a transfer costs goes on behind it.
        expected = 1e3 * summed * 2 * (ranks - 1) / ranks * 1514 / 1448 * 8 / (MBIT * 1e6)
        assert expected > 40.0
        more = grown(slow, than=fast)
        dense = more["dense gradients"] = causes_of(slow, odd=True)["dense gradients"]
        # DDP's word on used parameters comes when the last rank has its gradients: who has them earlier waits for it.
        more["other traffic"] = [ms - (max(dense) - own) for ms, own in zip(more["other traffic"], dense, strict=True)]
        return missed(more, {"dense gradients": [expected] * ranks})

    assert missed_every_time(measure) == []
