"""Imported torch.profiler traces of any trainer give the same ledger as the recorder."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, TensorDataset

from freescale import log
from freescale.bubbles.events import CAUSES, RankStep, Transfer
from freescale.bubbles.kineto import read_traces
from freescale.bubbles.ledger import Ledger, ledgers
from freescale.bubbles.records import from_steps
from freescale.bubbles.summary import summarize
from freescale.errors import DataError
from tests.bubbles.traces import (
    ALL_REDUCE,
    AUTOGRAD,
    COMPUTE_STREAM,
    COPY_STREAM,
    DEVICE_AHEAD,
    MAIN,
    NCCL_STREAM,
    Trace,
    cuda_traces,
)
from tests.support.ranks import Ranks, World

US = 1000
# What HolisticTraceAnalysis 0.5.0 finds in the traces of `cuda_traces`, per rank, in percent: of both steps
# (include_last_profiler_step=True), and of the first (it leaves the last one out unless told).
HTA_BOTH_STEPS = (58.16, 59.78)
HTA_FIRST_STEP = (52.04, 54.88)


@pytest.fixture(autouse=True)
def _log_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_logged", set())


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """The traces of both ranks, one of them packed."""
    for trace in cuda_traces():
        trace.write(tmp_path, packed=trace.rank == 1)
    return tmp_path


def us(ledger: Ledger) -> dict[str, float]:
    return {cause: ledger.cause_ns(cause) / US for cause in CAUSES if ledger.cause_ns(cause)}


def of_rank(steps: list[list[RankStep]], rank: int) -> list[Ledger]:
    return [ledgers(step)[rank] for step in steps]


def alone(folder: Path, trace: Trace) -> RankStep:
    """The only step of the only rank."""
    trace.write(folder)
    ((step,),) = read_traces(folder).steps
    return step


def test_overlap_is_what_holistic_trace_analysis_finds(cuda: Path) -> None:
    steps = read_traces(cuda).steps
    for rank in (0, 1):
        mine = from_steps([[step[rank]] for step in steps], 0).intervals
        assert summarize(mine).overlap_percent == pytest.approx(HTA_BOTH_STEPS[rank], abs=0.005)
        assert summarize(mine[:1]).overlap_percent == pytest.approx(HTA_FIRST_STEP[rank], abs=0.005)


def test_every_instant_of_a_cuda_trace_has_its_cause_and_early_ranks_wait_for_late_ones(cuda: Path) -> None:
    early, late = ledgers(read_traces(cuda).steps[0])
    same = {"optimizer": 65, "data": 30, "host": 10, "idle": 10}
    assert us(early) == {
        **same, "forward": 200, "backward": 400, "straggler": 10, "urgent rows": 40, "dense gradients": 185
    }  # fmt: skip
    assert us(late) == {**same, "forward": 230, "backward": 420, "urgent rows": 20, "dense gradients": 165}


def test_a_step_lasts_until_the_device_has_computed_it_and_the_causes_add_up_to_it(cuda: Path) -> None:
    traces = read_traces(cuda)
    assert [[step.step for step in ranks] for ranks in traces.steps] == [[5, 5], [6, 6]]
    for ranks, begin in zip(traces.steps, (0, DEVICE_AHEAD), strict=True):
        for rank, (step, ledger) in enumerate(zip(ranks, ledgers(ranks), strict=True)):
            assert step.rank == rank
            assert (step.begin, step.end) == (begin * US, (begin + DEVICE_AHEAD) * US)
            assert ledger.wall == step.end - step.begin
    assert traces.clock_bound == 0


def test_the_clock_of_another_host_is_aligned(tmp_path: Path) -> None:
    aligned, apart = tmp_path / "aligned", tmp_path / "apart"
    for folder, base, later in ((aligned, 0, 0.0), (apart, 10**18 + 7, 31234.5)):
        folder.mkdir()
        first, second = cuda_traces()
        first.write(folder)
        second.write(folder, base=base, later=later)
    expected, found = read_traces(aligned), read_traces(apart)
    assert found.steps == expected.steps
    assert found.clock_bound == expected.clock_bound == 0


def test_small_differences_between_ends_shift_no_clock_and_are_the_bound(tmp_path: Path) -> None:
    first, second = cuda_traces()
    first.write(tmp_path)
    second.write(tmp_path, later=4)
    traces = read_traces(tmp_path)
    assert traces.clock_bound == 4 * US
    assert [step.begin for step in traces.steps[0]] == [0, 4 * US]


def test_incomparable_clocks_are_logged_and_not_shifted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        trace = Trace(rank)
        trace.mark("ProfilerStep#1", 0, 100)
        trace.device("gemm", 10, 50, COMPUTE_STREAM, 5)
        trace.write(tmp_path, base=500 * US * rank)
    assert [step.begin for step in read_traces(tmp_path).steps[0]] == [0, 500 * US]
    assert "rank 1 shares no collective" in caplog.text


@pytest.mark.parametrize(
    ("kernel", "args", "thread", "kind"),
    [
        ("ncclDevKernel_SendRecv(...)", {"Collective name": "all_to_allv", "dtype": "Long"}, MAIN, "ids"),
        ("ncclDevKernel_SendRecv(...)", {"Collective name": "all_to_all", "dtype": "Half"}, MAIN, "urgent rows"),
        ("ncclDevKernel_SendRecv(...)", {"Collective name": "all_to_all", "dtype": "Half"}, AUTOGRAD, "row gradients"),
        ("ncclDevKernel_SendRecv(...)", {"Collective name": "send", "dtype": "Half"}, AUTOGRAD, "other traffic"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", {}, MAIN, "urgent rows"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", {}, MAIN, "dense gradients"),
        ("ncclDevKernel_AllGather_RING_LL", {"Collective name": "_allgather_base"}, AUTOGRAD, "other traffic"),
        ("(anonymous namespace)::two_shot_all_reduce_kernel", {}, AUTOGRAD, "dense gradients"),
    ],
)
def test_the_kind_of_traffic_is_inferred_from_the_trace(
    tmp_path: Path, kernel: str, args: dict[str, str], thread: int, kind: str
) -> None:
    trace = Trace(0)
    trace.mark("ProfilerStep#1", 0, 100)
    trace.host("autograd::engine::evaluate_function: X", 0, 90, AUTOGRAD)
    trace.device(kernel, 50, 70, NCCL_STREAM, 10, thread, **args)
    assert [transfer.kind for transfer in alone(tmp_path, trace).transfers] == [kind]


def test_copies_between_devices_and_on_streams_of_traffic_are_communication(tmp_path: Path) -> None:
    trace = Trace(0)
    trace.mark("ProfilerStep#1", 0, 100)
    trace.device("Memcpy PtoP (Device -> Device)", 10, 20, COPY_STREAM, 1)
    trace.device("Memcpy DtoD (Device -> Device)", 20, 25, COPY_STREAM, 2)
    trace.device("gemm", 15, 30, COMPUTE_STREAM, 3)
    trace.device("Memcpy PtoP (Device -> Device)", 30, 40, COMPUTE_STREAM, 4)
    trace.device("Memcpy DtoD (Device -> Device)", 40, 50, COMPUTE_STREAM, 5)
    trace.device("Memcpy DtoH (Device -> Pageable)", 50, 53, COMPUTE_STREAM, 6)
    trace.stream_mark("nccl:all_gather", 58, 72, 31)
    trace.device("Memcpy DtoD (Device -> Device)", 60, 70, 31, 7)
    trace.device("Memcpy DtoD (Device -> Device)", 80, 90, 31, 8)
    (ledger,) = ledgers([alone(tmp_path, trace)])
    # Hidden: 15 to 25. Computed: the gemm, and a copy on each stream that is not one of traffic at that time.
    assert us(ledger) == {"forward": 15 + 10 + 10, "other traffic": 5 + 10 + 10, "host": 3, "idle": 37}
    assert (ledger.in_flight, sum(ledger.hidden)) == (35 * US, 10 * US)


def test_a_copy_is_not_a_wait_for_a_slower_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for rank, begin in ((0, 10), (1, 60)):
        trace = Trace(rank)
        trace.mark("ProfilerStep#1", 0, 100)
        trace.device("Memcpy PtoP (Device -> Device)", begin, 80, COPY_STREAM, 5)
        trace.write(tmp_path)
    assert [us(ledger) for ledger in ledgers(read_traces(tmp_path).steps[0])] == [
        {"other traffic": 70, "idle": 30},
        {"other traffic": 20, "idle": 80},
    ]
    assert "collectives of others" not in caplog.text


def test_a_late_rank_is_known_even_if_its_collective_ran_in_the_next_step(tmp_path: Path) -> None:
    """Rank 0 begins a sum in step 1 and stands; rank 1 comes to it only when its step 2 has begun."""
    for rank, begin in ((0, 20), (1, 130)):
        trace = Trace(rank)
        trace.mark("ProfilerStep#1", 0, 100)
        trace.mark("ProfilerStep#2", 100, 200)
        trace.device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin, 150, NCCL_STREAM, 10, **ALL_REDUCE)
        trace.write(tmp_path)
    first, second = (ledgers(step) for step in read_traces(tmp_path).steps)
    assert us(first[0]) == {"straggler": 80, "idle": 20}
    assert us(second[0]) == {"straggler": 30, "dense gradients": 20, "idle": 50}
    assert us(second[1]) == {"dense gradients": 20, "idle": 80}


def test_without_a_device_operators_are_compute_but_a_silent_wait_inside_one_is_not(tmp_path: Path) -> None:
    trace, worker = Trace(0), 300
    trace.mark("ProfilerStep#1", 0, 1000)
    trace.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 50)
    trace.host("aten::stack", 10, 40)
    trace.host("c10d::barrier", 55, 57)
    trace.host("aten::mm", 60, 100)
    trace.host("autograd::engine::evaluate_function: ExchangeBackward", 100, 500)
    trace.host("c10d::alltoall_base_", 200, 210)
    trace.mark("gloo:all_to_all", 215, 400, worker)
    trace.host("aten::mul", 420, 500)
    trace.host("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 500, 600)
    trace.host("c10d::allreduce_", 580, 590)
    trace.mark("gloo:all_reduce", 585, 800, worker)
    trace.mark("Optimizer.step#Adam.step", 700, 900)
    trace.host("aten::add_", 750, 760)
    trace.host("_c10d_functional::wait_tensor", 770, 810)
    trace.host("c10d::broadcast_", 910, 950)
    step = alone(tmp_path, trace)
    assert step.transfers == (
        Transfer("row gradients", "alltoall 1 of group in step 1", 215 * US, 400 * US, ((215 * US, 400 * US),)),
        Transfer("dense gradients", "allreduce 1 of group in step 1", 585 * US, 800 * US, ((770 * US, 800 * US),)),
    )
    (ledger,) = ledgers([step])
    assert us(ledger) == {
        "data": 50, "forward": 40, "backward": 315, "row gradients": 185, "dense gradients": 130,
        "optimizer": 170, "host": 42, "idle": 68,
    }  # fmt: skip


def train(world: World, folder: str) -> None:
    """A plain trainer that knows nothing of FreeScale, profiled as the documentation of torch says; rank 1 is slow."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    plan = schedule(wait=0, warmup=2, active=3)
    handler = tensorboard_trace_handler(folder, use_gzip=True)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=handler) as profiler:
        for (batch,) in DataLoader(TensorDataset(torch.randn(160, 64)), batch_size=32):
            time.sleep(0.1 * world.rank)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profiler.step()


def test_a_real_profile_of_two_ranks_adds_up_and_shows_the_slow_rank(groups: dict[int, Ranks], tmp_path: Path) -> None:
    groups[2].run(train, str(tmp_path))
    steps = read_traces(tmp_path).steps
    assert [[step.step for step in ranks] for ranks in steps] == [[2, 2], [3, 3], [4, 4]]
    for ranks in steps:
        for step, ledger in zip(ranks, ledgers(ranks), strict=True):
            assert ledger.wall == step.end - step.begin
            assert all(ledger.cause_ns(cause) > 0 for cause in ("forward", "backward", "optimizer"))
            assert {transfer.kind for transfer in step.transfers} == {"dense gradients"}
    fast, slow = (
        {cause: sum(ledger.cause_ns(cause) for ledger in of_rank(steps, rank)) for cause in CAUSES} for rank in (0, 1)
    )
    assert fast["straggler"] > 0.1 * 10**9 > slow["straggler"]
    assert slow["idle"] > 0.2 * 10**9
    # The last rank need not wait for a sum. Gloo's thread may mark the end of one too late, over the next batch.
    assert min(fast["data"], slow["data"], fast["dense gradients"]) > 0


def test_a_trace_without_steps_is_one_step_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(0)
    trace.device("gemm", 10, 50, COMPUTE_STREAM, 5)
    step = alone(tmp_path, trace)
    assert (step.step, step.begin, step.end) == (0, 5 * US, 50 * US)
    assert "counts as one step" in caplog.text


def test_steps_and_collectives_missing_on_some_ranks_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 1):
        trace = Trace(rank)
        for number in (1, 2, 3 + rank):
            trace.mark(f"ProfilerStep#{number}", 100 * number, 100 * number + 90)
        for number in range(2 - rank):
            trace.device("ncclDevKernel_AllReduce", 110 + 10 * number, 115 + 10 * number, NCCL_STREAM, 105)
        trace.device("ncclDevKernel_AllReduce", 220 + 30 * rank, 270, NCCL_STREAM, 205)
        trace.write(tmp_path)
    steps = read_traces(tmp_path).steps
    assert [[step.step for step in ranks] for ranks in steps] == [[1, 1], [2, 2]]
    assert [ledger.cause_ns("straggler") for ledger in ledgers(steps[1])] == [30 * US, 0]
    said = caplog.text
    assert "left out: step 3, 4" in said
    assert "'allreduce 2 of group in step 1'" in said


def test_the_rank_may_be_in_the_name_of_the_file(tmp_path: Path) -> None:
    for rank, name in ((0, "Rank_0.json"), (1, "run-rank1.pt.trace.json")):
        cuda_traces()[rank].write(tmp_path, rank=False).rename(tmp_path / name)
    assert [step.rank for step in read_traces(tmp_path).steps[0]] == [0, 1]


def cut(folder: Path, *, packed: bool) -> None:
    path = cuda_traces()[0].write(folder, packed=packed)
    path.write_bytes(path.read_bytes()[:-200])


def twice(folder: Path) -> None:
    path = cuda_traces()[0].write(folder)
    (folder / "again.json").write_bytes(path.read_bytes())


def steps_apart(folder: Path) -> None:
    for rank in (0, 1):
        trace = Trace(rank)
        trace.mark(f"ProfilerStep#{rank}", 0, 100)
        trace.write(folder)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda folder: (folder / "notes.txt").write_text("nothing"), "no trace here"),
        (lambda folder: cut(folder, packed=False), "not a whole trace"),
        (lambda folder: cut(folder, packed=True), "not a whole trace"),
        (lambda folder: (folder / "rank0.json").write_text(json.dumps([1])), "not a whole trace"),
        (lambda folder: (folder / "rank0.json").write_text(json.dumps({"traceEvents": []})), "without any event"),
        (lambda folder: cuda_traces()[0].write(folder, rank=False), "without a rank"),
        (twice, "two traces of rank 0: again.json and host_4000"),
        (steps_apart, "no step is in the traces of all ranks"),
    ],
)
def test_an_unreadable_trace_is_an_error_with_path_and_remedy(
    tmp_path: Path, make: Callable[[Path], object], what: str
) -> None:
    make(tmp_path)
    with pytest.raises(DataError, match=what) as caught:
        read_traces(tmp_path)
    assert str(tmp_path) in caught.value.where
    assert caught.value.remedy
