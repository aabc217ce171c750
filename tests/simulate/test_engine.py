"""The simulator runs the trainer's own schedule, planner and ledger, without torch, for any world size."""

import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from freescale.balance.cost import Cost
from freescale.bubbles.summary import Summary, summarize
from freescale.config import BalanceConfig
from freescale.overlap.schedule import Operation, Schedule, overlapped, serial
from freescale.simulate import cluster, whatif
from freescale.simulate.cluster import Cluster
from freescale.simulate.engine import Engine
from freescale.simulate.lookups import Popularity
from freescale.simulate.network import Topology
from freescale.simulate.operations import DeviceModel, OperationCosts
from freescale.simulate.report import scaling
from freescale.simulate.whatif import ABLATION, Scenario, Techniques, simulate
from freescale.simulate.workload import (
    ModelCost,
    RowRequests,
    SampledStep,
    StepLoad,
    TableCost,
    extend_steps,
    plan_step,
    sample_steps,
)
from freescale.train import build

MODEL = ModelCost(
    cost=Cost(token=1.0),
    products=1.0,
    tables=(TableCost(dim=1, popularity=Popularity.from_counts(np.ones(1000, dtype=np.int64)), looked_up=1),),
    dense_bytes=4e6,
    last_bytes=4e6,
)
DEVICE = DeviceModel(step=0.0, work=1.0, row=0.0, update=0.0, event=0.0, byte=0.0, dense=0.0, between=0.0)


def hosts(**changes: float) -> Cluster:
    """One rank per host, links of 100 MB/s, and nothing that varies."""
    none = ("latency", "message", "contention", "jitter", "host", "oversubscription", "one_way", "in_flight")
    steady = {"ranks_per_host": 1, "far": 1e8, "sm_free": 1.0, "ring": 1.0, **dict.fromkeys(none, 0.0)}
    return cluster.load("h100").with_values({**steady, **changes})


def load(work: list[float], *, rows: float = 1e6, shared: float = 0.0, planning: float = 0.0) -> StepLoad:
    """Rows of 4 bytes: a million of them take 20 ms between two hosts."""
    ranks = len(work)
    one = np.ones(ranks)
    requests = RowRequests(rows * one, shared * one, one, width=1.0)
    return StepLoad(np.array(work), 0 * one, requests, 0 * one, samples=ranks, planning=planning)


def simulated(
    schedule: Schedule,
    loads: list[StepLoad],
    where: Cluster | None = None,
    *,
    balanced: bool = False,
    sm_free: bool = False,
    model: ModelCost = MODEL,
    **changes: float,
) -> dict[str, float]:
    where, rng = where or hosts(), np.random.default_rng(0)
    ranks = len(loads[0].work)
    operations = OperationCosts(where, replace(DEVICE, **changes), model, world_size=ranks, sm_free=sm_free, rng=rng)
    engine = Engine(schedule, operations, loads, balanced=balanced)
    found: Summary = summarize(engine.run())
    return {line.cause: line.ms for line in found.lines if line.ms > 1e-3} | {"step": found.step_ms}


def test_a_serial_step_is_the_sum_of_its_operations_and_the_ledger_names_each() -> None:
    found = simulated(serial(sharded=True), [load([0.09, 0.06])] * 8)
    rows, dense = 1e3 * 4e6 / 2 / 1e8, 1e3 * 4e6 / 1e8
    assert found == pytest.approx(
        {
            "forward": 25.0,
            "backward": 50.0,
            "straggler": 15.0,
            "ids": 2 * rows,
            "urgent rows": rows,
            "row gradients": rows,
            "dense gradients": dense,
            "step": 90.0 + 4 * rows + dense,
        },
        rel=1e-3,
    )


def test_rows_that_steps_do_not_share_overlap_with_compute() -> None:
    found = simulated(overlapped(), [load([0.3, 0.3])] * 12)
    assert found == pytest.approx(
        {"forward": 100.0, "backward": 200.0, "dense gradients": 40.0, "step": 340.0}, rel=1e-3
    )
    collides = simulated(overlapped(), [load([0.3, 0.3], shared=1e5)] * 12)
    assert collides["urgent rows"] == collides["row gradients"] == pytest.approx(2.0, rel=1e-3)


def test_traffic_that_compute_cannot_hide_is_exposed() -> None:
    found = simulated(overlapped(), [load([0.05, 0.05])] * 12)
    # The deferred lane needs 40 ms for ids, 1 for what is shared, 20 for rows and 20 for gradients; that is stopped for
    # 40 by dense gradients, which come after the last of 50 ms of compute.
    expected = {"forward": 16.7, "backward": 33.3, "dense gradients": 40.0, "ids": 11.2, "deferred rows": 20.0}
    assert found == pytest.approx(expected | {"step": 121.2}, rel=0.01)


def test_host_work_delays_the_step_on_a_cpu_but_not_on_a_device() -> None:
    loads = [load([0.1, 0.1])] * 12
    on_device = simulated(overlapped(), loads, hosts(far=1e12), between=0.03)
    on_cpu = simulated(overlapped(), loads, replace(hosts(far=1e12), device="cpu"), between=0.03)
    assert on_device["step"] == pytest.approx(100.0, rel=1e-2)
    assert on_cpu["step"] == pytest.approx(130.0, rel=1e-2)
    assert on_cpu["host"] == pytest.approx(30.0, rel=1e-2)


def test_planning_that_is_longer_than_a_step_delays_it() -> None:
    quick = simulated(serial(sharded=True), [load([0.1, 0.1], planning=0.05)] * 12, balanced=True)
    slow = simulated(serial(sharded=True), [load([0.1, 0.1], planning=0.5)] * 12, balanced=True)
    assert "data" not in quick
    assert slow["step"] == pytest.approx(500.0, rel=1e-2)
    assert slow["data"] == pytest.approx(slow["step"] - quick["step"], rel=0.05)


def test_compute_is_slower_while_sms_move_bytes() -> None:
    loads = [load([0.3, 0.3])] * 20
    alone, beside = (simulated(overlapped(), loads, hosts(contention=slower)) for slower in (0.0, 0.5))
    assert beside["step"] > 1.05 * alone["step"]
    spared = simulated(overlapped(), loads, hosts(contention=0.5), sm_free=True)
    assert spared["step"] == pytest.approx(alone["step"]), "deferred transfers use no SMs then"
    slower = simulated(overlapped(), [load([0.05, 0.05])] * 12, hosts(sm_free=0.5), sm_free=True)
    assert slower["step"] > simulated(overlapped(), [load([0.05, 0.05])] * 12)["step"], "but take a slower transport"


def test_a_change_of_the_schedule_changes_the_simulation() -> None:
    loads = [load([0.3, 0.3])] * 12
    more = ("update_deferred", -1)
    late = [replace(o, after=(*o.after, more)) if o.name == "forward" else o for o in overlapped().operations]
    moved = simulated(Schedule(tuple(late), overlapped().slots), loads)
    assert moved["step"] == pytest.approx(simulated(overlapped(), loads)["step"] + 20.0)
    assert build.overlapped is whatif.overlapped, "the trainer and the simulation use the same schedules"
    assert build.serial is whatif.serial
    new = Operation("compress", "compute", "forward")
    with pytest.raises(NotImplementedError, match="the cost of operation 'compress' is not defined"):
        simulated(Schedule((*serial(sharded=True).operations, new)), loads)


def test_agree_is_an_all_reduce_of_the_three_numbers_that_the_trainer_sends() -> None:
    where, rng = hosts(), np.random.default_rng(0)
    operations = OperationCosts(where, DEVICE, MODEL, world_size=2, sm_free=False, rng=rng)
    agree = next(one for one in serial(sharded=True).operations if one.name == "agree")
    assert operations.cost(agree, load([0.1, 0.1])).transfer == Topology(where, 2, rng).all_reduce(3 * 8)


@pytest.mark.parametrize("parts", [1, 3])
def test_every_operation_of_the_trainers_schedules_can_be_simulated(parts: int) -> None:
    loads, model = [load([0.1, 0.1])] * 8, replace(MODEL, micro_batches=parts)
    for schedule in (overlapped, partial(serial, sharded=True), partial(serial, sharded=False)):
        whole = simulated(schedule(), loads)
        assert simulated(schedule(micro_batches=parts), loads, model=model) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 3, 8, 12])
def test_any_number_of_ranks_can_be_simulated(ranks: int) -> None:
    where = cluster.load("h100").with_values({"jitter": 0.0})
    for one in (where, replace(where, device="cpu"), cluster.load("cpu")):
        found = simulated(overlapped() if ranks > 1 else serial(sharded=True), [load([0.1] * ranks)] * 6, one)
        assert found["step"] >= 99.0
        assert np.isfinite(list(found.values())).all()


def test_jitter_and_data_stalls_of_a_rank_delay_the_others() -> None:
    loads = [load([0.1] * 8)] * 20
    steady = simulated(serial(sharded=True), loads)
    varies = simulated(serial(sharded=True), loads, hosts(jitter=0.1))
    assert 8.0 < varies["straggler"] < 20.0  # the slowest of eight is 1.4 standard deviations above the mean
    assert "straggler" not in steady
    stalls = simulated(serial(sharded=True), loads, hosts(stall_share=1.0, stall=0.5))
    assert stalls["data"] > 50.0
    slow = simulated(serial(sharded=True), loads, hosts(slow_share=1.0, slow_by=0.2))
    assert slow["forward"] == pytest.approx(1.2 * steady["forward"])


def test_distinct_and_shared_rows_match_sampled_events() -> None:
    rng = np.random.default_rng(0)
    counts = np.sort(rng.zipf(1.3, 20_000).clip(max=5000))
    share, found = np.cumsum(counts) / counts.sum(), Popularity.from_counts(counts.astype(np.int64))
    batches = [[np.searchsorted(share, rng.random(3000)) for _ in range(4)] for _ in range(2)]
    before = np.unique(np.concatenate(batches[0]))
    rows = [np.unique(events) for events in batches[1]]
    assert found.rows(np.array([3000.0]))[0] == pytest.approx(np.mean([len(one) for one in rows]), rel=0.02)
    shared = np.mean([np.isin(one, before).sum() for one in rows])
    assert found.shared(np.array([3000.0]), 12_000.0)[0] == pytest.approx(shared, rel=0.03)


def test_samples_are_placed_as_the_trainer_places_them() -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 64)
    drawn = SampledStep(lengths, np.repeat(np.arange(8), 8))
    at_home, dealt = (plan_step(drawn, MODEL, world_size=8, rules=rules) for rules in (None, BalanceConfig()))
    assert dealt.work.sum() == at_home.work.sum() == lengths.sum()
    assert dealt.work.max() < 1.02 * dealt.work.mean() < at_home.work.max()
    assert dealt.moved.sum() > 0 == at_home.moved.sum()
    mixed = extend_steps([dealt], 3, np.random.default_rng(0))
    assert [sorted(one.work) for one in mixed] == [sorted(dealt.work)] * 3


def test_rows_are_shared_with_the_previous_batches_of_all_ranks() -> None:
    """Eight ranks look up 1000 events each, so together nearly all of the 1000 items, and alone two thirds."""
    drawn = SampledStep(np.full(80, 100), np.repeat(np.arange(8), 10))
    found = plan_step(drawn, MODEL, world_size=8, rules=None)
    assert found.requests.rows == pytest.approx(np.full(8, 632.3), rel=1e-3)
    assert found.requests.shared == pytest.approx(found.requests.rows, rel=1e-3)


def test_a_device_computes_three_passes_of_two_flops_per_product() -> None:
    device = DeviceModel.from_cluster(hosts(flops=1e15, efficiency=0.5), replace(MODEL, products=1e9))
    (seconds,) = device.compute_seconds(MODEL, load([50.0]))
    assert seconds * device.forward == pytest.approx(2 * 50 * 1e9 / 0.5e15)
    assert seconds * (1 - device.forward) == pytest.approx(2 * 2 * 50 * 1e9 / 0.5e15), "twice as many in backward"


def test_throughput_is_samples_per_second_and_scaling_is_against_the_fewest_ranks() -> None:
    question = Scenario(
        MODEL, np.array([50]), np.array([1]), 32, hosts(), lambda _: replace(DEVICE, work=1e-5), steps=6
    )
    results = [result for ranks in (4, 2) for result in simulate(question, ranks, [ABLATION[0]])]
    four, two = results
    for result in results:
        assert result.samples_per_second == pytest.approx(32 * result.world_size * 1e3 / result.summary.step_ms)
    assert scaling(two, results) == 1.0
    assert scaling(four, results) == pytest.approx(two.summary.step_ms / four.summary.step_ms)
    assert scaling(four, results) < 0.9


def test_the_band_contains_the_prediction_and_techniques_reduce_bubbles() -> None:
    lengths, counts = np.array([10, 100, 2000]), np.array([5, 3, 1])
    popularity = Popularity.from_counts(np.ones(10**6, dtype=np.int64))
    model = replace(MODEL, products=1e9, tables=(TableCost(dim=128, popularity=popularity, looked_up=1),))
    question = Scenario(
        model, lengths, counts, 32, cluster.load("h100"), lambda c: DeviceModel.from_cluster(c, model), steps=8
    )
    nothing, *_, everything = simulate(question, 16, ABLATION)
    assert nothing.techniques == Techniques(False, False, False)
    assert everything.techniques == Techniques()
    assert everything.summary.bubble_percent < nothing.summary.bubble_percent
    assert nothing.step_ms.low < nothing.summary.step_ms < nothing.step_ms.high


def simulate_16_384_ranks() -> tuple[int, float, int]:
    """Return the simulated steps, and the CPU seconds and peak memory, in KiB, of a process that does nothing else."""
    lengths = np.clip(np.random.default_rng(0).lognormal(8.93, 0.93, 4000), 1, 21_000).astype(np.int64)
    values, counts = np.unique(lengths, return_counts=True)
    rng, began = np.random.default_rng(0), time.process_time()
    drawn = sample_steps(values, counts, world_size=16_384, batch=128, steps=5, rng=rng)
    loads = [plan_step(one, MODEL, world_size=16_384, rules=BalanceConfig()) for one in drawn]
    where = cluster.load("h100")
    operations = OperationCosts(
        where, DeviceModel.from_cluster(where, MODEL), MODEL, world_size=16_384, sm_free=True, rng=rng
    )
    steps = len(Engine(overlapped(), operations, extend_steps(loads, 50, rng), balanced=True).run())
    status = Path("/proc/self/status").read_text()  # `ru_maxrss` begins with the peak of the process that started this
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return steps, time.process_time() - began, int(peak)


@pytest.mark.whole
def test_16_384_ranks_of_50_steps_take_two_minutes_of_one_core_and_two_gigabytes() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        steps, seconds, kib = process.submit(simulate_16_384_ranks).result()
    assert steps >= 45
    assert seconds < 120.0
    assert kib < 2 << 20


def test_the_simulator_does_not_import_torch() -> None:
    code = "import sys, freescale.cli.simulate, freescale.simulate.operations; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
