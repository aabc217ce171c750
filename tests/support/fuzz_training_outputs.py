"""Fuzzed files that a training leaves: traces of torch.profiler and folders of runs."""

import gzip
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from freescale import config
from freescale.bubbles import records
from freescale.bubbles.events import CAUSES, TRAFFIC, RankStep, Span, Transfer
from freescale.bubbles.kineto import read_traces
from freescale.bubbles.records import RunRecord
from freescale.bubbles.report import chrome_trace, headline, report_sections, representative_steps
from freescale.bubbles.summary import summarize
from freescale.config import RECIPES
from freescale.simulate import operations
from freescale.train import curves
from freescale.train.metrics_logger import MetricsLogger, count_damaged_lines, read_entries
from tests.support.fuzz_values import (
    NUMBERS,
    ORDINARY,
    SCALARS,
    Files,
    Inputs,
    as_json,
    damaged,
    in_one,
    trees,
    with_values,
)

EVENT_NAMES = (
    "ProfilerStep#3", "ProfilerStep#4", "Optimizer.step#SGD.step", "enumerate(DataLoader)#x.__next__", "aten::mm",
    "autograd::engine::evaluate_function: MmBackward0", "c10d::allreduce_", "gloo:all_reduce", "nccl:all_to_all",
    "ncclDevKernel_AllReduce", "Memcpy HtoD", "Memcpy PtoP", "cudaLaunchKernel", "aten::wait", "sgemm",
)  # fmt: skip
EVENT_KINDS = ("kernel", "gpu_memcpy", "user_annotation", "gpu_user_annotation", "cpu_op", "cuda_runtime", "python")


def event(name: str, kind: str, begin: Any, took: Any, *, thread: Any = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": thread, "ts": begin, "dur": took, "args": args}


def valid_trace(rank: int) -> dict[str, Any]:
    events = []
    for step, begin in ((3, 0.0), (4, 100.0)):
        other = 10 * step + 1
        events += [
            event(f"ProfilerStep#{step}", "user_annotation", begin, 90.0),
            event("aten::mm", "cpu_op", begin + 5, 20 + rank),
            event("cudaLaunchKernel", "cuda_runtime", begin + 6, 2, correlation=10 * step),
            event("sgemm", "kernel", begin + 10, 30, thread=7, correlation=10 * step),
            event("cudaLaunchKernel", "cuda_runtime", begin + 9, 2, correlation=other),
            event("ncclDevKernel_AllReduce", "kernel", begin + 40 + rank, 20 - rank, thread=8, correlation=other),
            event("c10d::allreduce_", "cpu_op", begin + 50, 2),
            event("gloo:all_reduce", "user_annotation", begin + 52, 10, thread=2, **{"Input type": ["float"]}),
            event("Optimizer.step#SGD.step", "user_annotation", begin + 70, 15),
        ]  # fmt: skip
    return {"baseTimeNanoseconds": 7, "distributedInfo": {"rank": rank}, "traceEvents": events}


def trace_inputs() -> Inputs:
    traces = [valid_trace(0), valid_trace(1)]
    first, second = map(as_json, traces)
    values = trees(["traceEvents", "ts", "dur", "args", "correlation", "rank", "cat", "name", "ph"])
    names, kinds, threads = st.sampled_from(EVENT_NAMES), st.sampled_from(EVENT_KINDS), st.integers(1, 3)
    times, lengths = st.integers(-50, 200) | st.floats(0, 200), st.integers(-2, 60)
    likely = st.builds(event, names, kinds, times, lengths, thread=threads, correlation=threads)
    odd = st.builds(event, names | SCALARS, kinds, times | NUMBERS, lengths, thread=values, correlation=values)
    several = st.lists(likely, min_size=1, max_size=12)
    packed = gzip.compress(second, mtime=0)
    return st.one_of(
        with_values(traces[0], values).map(lambda tree: {"rank0.json": as_json(tree), "rank1.json": second}),
        several.map(lambda events: {"rank0.json": as_json({"traceEvents": events})}),
        odd.map(lambda one: {"rank0.json": as_json({"traceEvents": [*traces[0]["traceEvents"], one]})}),
        st.tuples(several, several).map(
            lambda two: {f"rank{i}.json": as_json({**traces[i], "traceEvents": two[i]}) for i in (0, 1)}
        ),
        values.map(lambda tree: {"rank0.json": as_json(tree)}),
        damaged(first).map(lambda raw: {"rank0.json": raw, "rank1.json": second}),
        damaged(packed).map(lambda raw: {"rank0.json": first, "rank1.json.gz": raw}),
        st.integers(1, 200_000).map(lambda depth: {"rank0.json": b"[" * depth}),
        st.binary(max_size=40).map(lambda raw: {"rank0.json": raw}),
    )


def read_trace_folder(folder: Path) -> None:
    traces = read_traces(folder)
    drawn(records.from_steps(traces.steps, traces.clock_bound))


def drawn(found: RunRecord) -> None:
    """What `freescale report` does."""
    headline(summarize(found.intervals))
    assert "<script" not in "".join(report_sections(found, representative_steps(found.samples)))
    json.dumps(chrome_trace(found.samples))


def some_steps() -> list[list[RankStep]]:
    made = []
    for number in range(1, 7):
        begin, of_ranks = 1000 * number, []
        for rank in (0, 1):
            at = begin + 400 + 20 * rank
            edges = (("data", begin, begin + 50), ("forward", begin + 50, begin + 200), ("backward", begin + 200, at))
            spans = tuple(Span(*edge) for edge in edges)
            moved = Transfer("dense gradients", f"{number}/dense", at, begin + 500, ((at, begin + 500),))
            of_ranks.append(RankStep(rank, number, begin, begin + 600, spans, (moved,), 5.0 + number))
        made.append(of_ranks)
    return made


@cache
def valid_run() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        found, kept = records.from_steps(some_steps(), 3), records.RecordWriter(Path(folder))
        kept.write_machine(records.MachineRecord("cpu", 2))
        for interval in found.intervals:
            kept.write_interval(interval)
        for rank in (0, 1):
            kept.write_samples([samples[rank] for samples in found.samples.values()])
        config.save(RECIPES["tiny"], Path(folder) / "config.toml")
        journal = MetricsLogger(Path(folder), is_rank_zero=True, steps=2, quiet=True)
        journal.log_start(0, world_size=2, reason="new run")
        for step in (1, 2):
            journal.write({"kind": "train", "step": step, "loss": 3.0 / step, "grad_norm": 1.0})
        journal.write({"kind": "evaluate", "step": 2, "hr@10": 0.5})
        journal.log_start(1, world_size=1, reason="resumed")
        return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def run_inputs() -> Inputs:
    valid = valid_run()
    names = ["step", "rank", "world_size", "spans", "transfers", "last", "ms", *CAUSES[:3], *TRAFFIC[:2]]
    values = trees(names)

    def other_line(name: str, raw: bytes) -> st.SearchStrategy[bytes]:
        lines = raw.splitlines()
        if name.endswith(".toml"):
            return damaged(raw)
        return st.integers(0, len(lines) - 1).flatmap(
            lambda at: with_values(json.loads(lines[at]), values | ORDINARY | st.integers(900, 7000)).map(
                lambda tree: b"\n".join([*lines[:at], as_json(tree), *lines[at + 1 :], b""])
            )
        )

    return st.one_of(
        in_one(valid, other_line),
        in_one(valid, other_line),
        in_one(valid, lambda _, raw: damaged(raw)),
        in_one(valid, lambda *_: values.map(lambda tree: as_json(tree) + b"\n")),
        in_one(valid, lambda *_: st.binary(max_size=40)),
        st.sampled_from(sorted(valid)).map(lambda name: {other: raw for other, raw in valid.items() if other != name}),
    )


def read_run(folder: Path) -> None:
    """What `freescale report` does, then what `freescale simulate` does."""
    drawn(records.read(folder))
    noted = curves.RunMetrics("a run", list(read_entries(folder)), count_damaged_lines(folder))
    assert "<script" not in "".join(
        [curves.headline(noted), *curves.training_sections([noted]), *curves.training_sections([noted] * 2)]
    )
    config.load(folder / "config.toml")
    assert records.read_machine(folder).world_size > 0
    operations.fit_compute(records.read_samples(folder))
