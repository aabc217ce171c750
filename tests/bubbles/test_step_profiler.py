"""The profile of a run is bounded, adds up, survives a kill, and marks what is unknown."""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from freescale.bubbles import records
from freescale.bubbles.events import CAUSES, TRAFFIC
from freescale.bubbles.ledger import account
from freescale.bubbles.recorder import Recorder, record_comm_hook
from freescale.bubbles.step_profiler import StepProfiler
from freescale.bubbles.summary import summarize
from freescale.errors import DataError
from tests.support.ranks import Ranks, World

STEPS = 100


def foreign(world: World, folder: str, steps: int, done: int = 0) -> float:
    """A trainer that is not ours: a DDP model in a plain loop; gives the seconds of all steps but the first."""
    torch.manual_seed(0)
    bubbles = StepProfiler(Path(folder), steps=steps)
    bubbles.step = done
    model = DistributedDataParallel(nn.Linear(64, 64))
    model.register_comm_hook(None, record_comm_hook(allreduce_hook, bubbles.recorder))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ends = []
    for batch in bubbles.iterate("data", torch.randn(steps, 8, 64)):
        with bubbles.record("forward"):
            loss = model(batch).square().mean()
        with bubbles.record("backward"):
            loss.backward()
        with bubbles.record("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        bubbles.end_step(work=float(world.rank))
        ends.append(time.monotonic())
    bubbles.close()
    return ends[-1] - ends[0]


@pytest.fixture(scope="module")
def run(groups: dict[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    folder = tmp_path_factory.mktemp("foreign")
    return folder, max(groups[2].run(foreign, str(folder), STEPS))


def test_intervals_add_up_to_the_time_of_the_loop(run: tuple[Path, float]) -> None:
    folder, took = run
    intervals = records.read_intervals(folder)
    assert [interval.step for interval in intervals] == list(range(10, STEPS + 1, 10))
    assert [interval.steps for interval in intervals] == [9, *[10] * 9]  # the first step warms up
    total = sum(i.steps * i.ms[:, : len(CAUSES)].sum(axis=1) for i in intervals) / 1e3
    assert np.allclose(total, took, rtol=0.05, atol=0.01)
    for cause in ("forward", "backward", "optimizer", "dense gradients"):
        assert all((interval.column(cause) > 0).all() for interval in intervals), cause


def test_whole_steps_are_bounded_and_agree_with_the_sums(run: tuple[Path, float]) -> None:
    samples = records.read_samples(run[0])
    assert 0 < len(samples) <= records.SAMPLED_STEPS
    for of_ranks in samples.values():
        assert [sample.step.rank for sample in of_ranks] == [0, 1]
        assert [sample.step.work for sample in of_ranks] == [0.0, 1.0]
        for sample in of_ranks:
            assert account(sample.step, sample.last).wall == sample.step.end - sample.step.begin


def different(world: World, folder: str) -> None:
    """Ranks that do not come to the same collectives."""
    bubbles = StepProfiler(Path(folder), steps=4, every=1)
    for _ in range(4):
        flight = bubbles.recorder.begin_collective(f"only on {world.rank}")
        flight.on_complete()
        bubbles.end_step()
    bubbles.close()


def test_ranks_that_run_different_collectives_are_accounted_without_stragglers(
    groups: dict[int, Ranks], tmp_path: Path
) -> None:
    groups[2].run(different, str(tmp_path))
    intervals = records.read_intervals(tmp_path)
    assert [interval.step for interval in intervals] == [2, 3, 4]  # the first warms up
    assert all((interval.column("straggler") == 0).all() for interval in intervals)


def one_late(world: World, folder: str) -> None:
    """Rank 1 comes to every collective 20 ms after rank 0 has begun it."""
    profiler = StepProfiler(Path(folder), steps=4, every=1)
    for step in range(4):
        if world.rank == 1:
            world.store.wait([f"{folder}/{step}"])
            time.sleep(0.02)
        flight = profiler.recorder.begin_collective("sum", "dense gradients")
        flight.on_wait()
        world.store.set(f"{folder}/{step}", "begun")
        dist.all_reduce(torch.zeros(8))
        flight.on_complete()
        profiler.end_step()
    profiler.close()


def test_a_wait_for_the_last_rank_is_a_straggler_on_every_other_rank(groups: dict[int, Ranks], tmp_path: Path) -> None:
    groups[2].run(one_late, str(tmp_path))
    for interval in records.read_intervals(tmp_path):
        early, late = interval.column("straggler")
        assert early >= 20.0
        assert late == 0.0


def test_an_incomplete_last_line_of_a_killed_run_is_ignored(run: tuple[Path, float], tmp_path: Path) -> None:
    whole = (run[0] / "bubbles" / "intervals.jsonl").read_bytes()
    (tmp_path / "bubbles").mkdir()
    (tmp_path / "bubbles" / "intervals.jsonl").write_bytes(whole[: len(whole) - 40])
    assert len(records.read_intervals(tmp_path)) == len(records.read_intervals(run[0])) - 1


def test_a_run_in_the_same_folder_begins_where_it_is_resumed(
    groups: dict[int, Ranks], run: tuple[Path, float], tmp_path: Path
) -> None:
    shutil.copytree(run[0], tmp_path, dirs_exist_ok=True)
    with (tmp_path / "bubbles" / "intervals.jsonl").open("a") as file:
        file.write('{"step": 110, "st')  # killed here
    groups[2].run(foreign, str(tmp_path), 40, 30)
    assert [interval.step for interval in records.read_intervals(tmp_path)] == [10, 20, 30, 40, 50, 60, 70]
    assert max(records.read_samples(tmp_path)) <= 70
    groups[1].run(foreign, str(tmp_path), 20, 45)  # on another number of ranks, from amid an interval
    intervals = records.read_intervals(tmp_path)
    assert [interval.step for interval in intervals] == [10, 20, 30, 40, 45, 50, 60, 65]
    assert [interval.steps for interval in intervals] == [9, 10, 10, 9, 5, 4, 10, 5]  # each start warms up once
    assert [interval.world_size for interval in intervals] == [2, 2, 2, 2, 2, 1, 1, 1]
    summary = summarize(intervals)
    assert (summary.steps, summary.world_size, summary.world_sizes) == (62, 1, (2, 1))
    first, last = summarize(intervals[:5]), summarize(intervals[5:])
    assert summary.step_ms == pytest.approx((first.step_ms * 43 + last.step_ms * 19) / 62)


class Slow(torch.autograd.Function):
    """The part of a model below its dense layers: its backward pass comes last and takes a while."""

    @staticmethod
    def forward(*given: Any, **_: Any) -> torch.Tensor:
        return given[1].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  torch's own signature
        time.sleep(0.05)
        return grad_outputs[0]


def hides(world: World) -> tuple[int, int]:
    """Milliseconds of backward and of exposed gradients, when rows are still worked on after the last bucket left."""
    recorder = Recorder(world.rank)
    model = DistributedDataParallel(nn.Linear(8, 1))
    model.register_comm_hook(None, record_comm_hook(allreduce_hook, recorder))
    loss = model(Slow.apply(torch.randn(4, 8, requires_grad=True))).sum()
    recorder.restart_step()
    with recorder.record("backward"):
        loss.backward()
    step = recorder.read(recorder.end_step(1))
    ledger = account(step, {t.name: t.arrived for t in step.transfers})
    return ledger.cause_ns("backward") // 10**6, ledger.cause_ns("dense gradients") // 10**6


def test_compute_after_the_last_bucket_hides_it(groups: dict[int, Ranks]) -> None:
    for backward, exposed in groups[2].run(hides):
        assert backward >= 50
        assert exposed < 20


def test_background_transfers_are_hidden_and_do_not_reduce_compute() -> None:
    recorder = Recorder(0)
    with recorder.record("forward"):
        flight = recorder.begin_collective("samples", "samples", independent=True)
        flight.on_wait()  # a thread waits, not the step
        time.sleep(0.02)
        flight.on_complete()
        time.sleep(0.01)
    with recorder.record("host"):
        recorder.begin_collective("samples", "samples", independent=True)
        time.sleep(0.01)
    with recorder.record("data"):  # the next batch has not come yet
        time.sleep(0.01)
    step = recorder.read(recorder.end_step(1))
    ledger = account(step, {t.name: t.arrived for t in step.transfers})
    assert ledger.cause_ns("samples") == pytest.approx(0.01e9, rel=0.5)
    assert ledger.cause_ns("host") == pytest.approx(0.01e9, rel=0.5)
    assert ledger.cause_ns("data") == 0
    assert ledger.cause_ns("forward") > 0.029 * 1e9
    assert ledger.hidden[TRAFFIC.index("samples")] > 0.019 * 1e9


def test_an_unknown_cause_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown cause 'foward'"), Recorder(0).record("foward"):
        pass


def test_a_folder_without_records_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="runs/latest"):
        records.read_intervals(tmp_path)


def test_a_profiler_whose_steps_were_not_ended_is_an_error_that_names_end_step(tmp_path: Path) -> None:
    records.RecordWriter(tmp_path).write_machine(records.MachineRecord("cpu", 2))
    with pytest.raises(DataError, match="no interval of steps was written") as caught:
        records.read_intervals(tmp_path)
    assert "profiler.end_step()" in caught.value.remedy


@pytest.mark.parametrize("ranks", [1, 2, 255, 256, 257, 1000, 16_384])
def test_every_rank_is_in_the_group_named_after_it(ranks: int) -> None:
    groups = min(ranks, records.GROUPS)
    for rank in range(ranks):
        name = records.group_name(records.group_of(rank, ranks), ranks)
        first, last = (int(name), int(name)) if "-" not in name else map(int, name.split("-"))
        assert first <= rank <= last
    assert len({records.group_name(group, ranks) for group in range(groups)}) == groups


def test_a_transfer_that_outlives_its_step_is_in_both_and_compared_once() -> None:
    recorder = Recorder(0)
    flight = recorder.begin_collective("rows", "deferred rows")
    first = recorder.end_step(1)
    flight.on_wait()
    flight.on_complete()
    second = recorder.end_step(2)
    one, two = recorder.read(first), recorder.read(second)
    assert [t.name for t in one.transfers] == [t.name for t in two.transfers]
    assert one.transfers[0].done > one.end
    assert account(two, {t.name: t.arrived for t in two.transfers}).cause_ns("deferred rows") > 0


def test_names_are_unique_in_a_step() -> None:
    recorder = Recorder(0)
    flights = [recorder.begin_collective("ids") for _ in range(3)]
    assert len({flight.name for flight in flights}) == 3


def test_background_transfers_do_not_change_the_names_of_shared_collectives() -> None:
    """A thread runs ahead on one rank and lags on another, so its transfers come in between at any place."""
    one, other = Recorder(0), Recorder(1)
    one.begin_collective("rows", "deferred rows", independent=True)
    names = [recorder.begin_collective("rows").name for recorder in (one, other)]
    assert names[0] == names[1]


def profile_in_context(world: World, folder: str, fails: bool) -> int:
    """Profile a plain loop of unknown length; return how many flight records are left."""
    with contextlib.suppress(KeyError), StepProfiler(folder) as profiler:
        for _ in profiler.iterate("data", range(25)):
            with profiler.record("forward"):
                pass
            profiler.end_step()
        if fails:
            raise KeyError
    return len(list(Path(folder).glob(f"flight/rank-{world.rank:05d}.ring")))


def test_the_context_manager_closes_the_profile_but_keeps_the_flight_record_of_a_failure(
    groups: dict[int, Ranks], tmp_path: Path
) -> None:
    assert groups[2].run(profile_in_context, str(tmp_path / "fine"), False) == [0, 0]
    assert groups[2].run(profile_in_context, str(tmp_path / "failed"), True) == [1, 1]
    assert sum(interval.steps for interval in records.read_intervals(tmp_path / "fine")) == 24  # the first is warm-up
    assert list(records.read_samples(tmp_path / "fine")) == [1, 2, 4, 8, 16]
