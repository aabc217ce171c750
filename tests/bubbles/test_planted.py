"""An injected bubble is measured with its length, under its cause and no other.

Real processes train over real links with emulated compute. Sleeps are planted in every second step, and each notes
when it began and ended: whatever else a busy machine does to a step, those moments must stand under their cause. A slow
link is planted under a whole run, and takes several times as long as a step does without it.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freescale.balance.sample_exchange import Batches
from freescale.bench.emulated import EmulatedModel
from freescale.bubbles.events import CAUSES, TRAFFIC
from freescale.bubbles.ledger import account, segments
from freescale.bubbles.records import read_samples
from freescale.config import RunConfig
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.models.protocol import Inputs
from freescale.models.retrieval import Retrieval
from freescale.train.build import build
from freescale.train.trainer import Trainer
from tests.support.datasets import histories, write_dataset
from tests.support.lab import Lab, lab
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small

pytestmark = pytest.mark.quiet
FORWARD, BACKWARD = 0.015, 0.030
SLEEP, STALL, MBIT = 0.4, 0.2, 80
STEPS = 11
OFF = 0.25
"""How far from what was planted the cause of a slow link may be, as a share of it, and by how much others may grow."""
Moments = list[tuple[int, int]]
"""Begin and end of what was planted, in nanoseconds of the clock that all ranks of a machine share."""


def rest(seconds: float) -> tuple[int, int]:
    began = time.monotonic_ns()
    time.sleep(seconds)
    return began, time.monotonic_ns()


class Sleepy(EmulatedModel):
    """Rests before it comes to the first collective of every second step."""

    def __init__(self, model: Retrieval, seconds: Callable[[Inputs], tuple[float, float]], rested: Moments) -> None:
        super().__init__(model, seconds)
        self._rested = rested

    def prepare(self, batch: Batch) -> Inputs:
        inputs = super().prepare(batch)
        if batch.step_key % 2:
            self._rested.append(rest(SLEEP))
        return inputs


class Ready:
    """Batches of a loader, there before the run begins; every second one may be given late."""

    def __init__(self, loader: Batches, stalled: Moments | None) -> None:
        self.state_dict, self.report = loader.state_dict, loader.report
        self._batches, self._stalled = list(loader), stalled

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            if self._stalled is not None and batch.step_key % 2:
                self._stalled.append(rest(STALL))
            yield batch


def timed_run(world: World, config: RunConfig, folder: str, plant: str) -> tuple[int, Moments]:
    """Train; gives the bytes of gradients that the ranks add up, and when this rank was held up."""
    items = Loader(config.data, seed=0).vocabulary.rows
    real, seconds, held_up = Retrieval(config, items=items), lambda _: (FORWARD, BACKWARD), Moments()
    model = Sleepy(real, seconds, held_up) if plant == "sleep" and world.rank == 1 else EmulatedModel(real, seconds)
    trainer = build(config, joined(world), Path(folder), model=model)
    ready = Ready(trainer.components.loader, held_up if plant == "stall" else None)
    parts = replace(trainer.components, loader=ready)  # type: ignore[arg-type]
    Trainer(parts, Path(folder), trainer._metrics).fit()
    return sum(4 * parameter.numel() for parameter in parts.module.parameters()), held_up


def shares(folder: Path, rank: int, moments: Moments) -> dict[str, float]:
    """Under which causes those moments stand on a rank, as shares of them."""
    found = dict.fromkeys(CAUSES, 0)
    for of_ranks in read_samples(folder).values():
        for begin, end, cause, *_ in segments(of_ranks[rank].step, of_ranks[rank].last):
            found[cause] += sum(max(0, min(end, high) - max(begin, low)) for low, high in moments)
    return {cause: time / sum(high - low for low, high in moments) for cause, time in found.items()}


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


def missed(more: dict[str, list[float]], planted: dict[str, list[float]]) -> list[str]:
    """Causes that did not grow by what was planted, and others that grew."""
    nothing = [0.0] * len(more["idle"])
    within = OFF * max(itertools.chain(*planted.values()))
    return [
        f"{cause} on rank {rank} grew by {ms:.1f} ms"
        for cause, of_ranks in more.items()
        for rank, ms in enumerate(of_ranks)
        if abs(ms - planted.get(cause, nothing)[rank]) > within
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sleep_before_a_collective_is_host_work_for_the_rank_and_a_straggler_for_all_others(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, ranks: int
) -> None:
    slept = groups[ranks].run(timed_run, short(log), str(tmp_path), "sleep")[1][1]
    assert len(slept) == STEPS // 2
    assert shares(tmp_path, 1, slept)["host"] > 0.95
    for rank in {*range(ranks)} - {1}:
        found = shares(tmp_path, rank, slept)
        assert found["straggler"] > 0.5, found  # but for the while until it comes to that collective itself
        assert sum(found[kind] for kind in (*TRAFFIC, "data")) < 0.25, found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_data_stall_is_measured_on_every_rank(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, ranks: int
) -> None:
    for rank, (_, stalled) in enumerate(groups[ranks].run(timed_run, short(log), str(tmp_path), "stall")):
        assert len(stalled) == STEPS // 2
        assert shares(tmp_path, rank, stalled)["data"] > 0.95


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_link_is_measured_as_the_traffic_that_it_carries(tmp_path: Path, ranks: int) -> None:
    write_dataset(tmp_path / "data", histories([10] * 400, items=5_000), rows_per_group=4, items=5_000)
    config = short(tmp_path / "data", model={"dim": 128, "layers": 1})
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    with lab(2) as hosts, started(ranks, hosts) as group:
        group.run(timed_run, config, str(fast), "")
        hosts.shape(MBIT)
        summed = group.run(timed_run, config, str(slow), "")[0][0]
    # A ring of ranks sends 2 (ranks - 1) / ranks of the gradients over each of its links; 1,448 bytes are 1,514 on the
    # wire. While the wire is busy, everything else that a transfer costs goes on behind it.
    expected = 1e3 * summed * 2 * (ranks - 1) / ranks * 1514 / 1448 * 8 / (MBIT * 1e6)
    assert expected > 200.0
    more = grown(slow, than=fast)
    dense = more["dense gradients"] = causes_of(slow, odd=True)["dense gradients"]
    # DDP's word on used parameters comes when the last rank has its gradients: who has them earlier waits for it.
    more["other traffic"] = [ms - (max(dense) - own) for ms, own in zip(more["other traffic"], dense, strict=True)]
    assert missed(more, {"dense gradients": [expected] * ranks}) == []
