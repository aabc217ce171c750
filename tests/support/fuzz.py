"""Damaged, mistyped and generated files for every reader: only our own errors may come out.

An input is a folder of files: valid ones with some bytes or values changed, or files generated from their parts. A
reader must accept it and be usable, or refuse it with an error of ours. Any other exception is a fault, and so is an
input that takes longer than SECONDS or more memory than MEMORY beyond the start.
"""

import contextlib
import gzip
import io
import json
import math
import resource
import signal
import tempfile
import time
import tomllib
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freescale import config
from freescale.balance.cost import Cost
from freescale.bubbles import records
from freescale.bubbles.events import CAUSES, TRAFFIC, RankStep, Span, Transfer
from freescale.bubbles.kineto import read_traces
from freescale.bubbles.records import RunRecord
from freescale.bubbles.report import chrome_trace, headline, report_sections, representative_steps
from freescale.bubbles.summary import summarize
from freescale.checkpoint import checkpoints, tensor_files
from freescale.config import RECIPES, DataConfig
from freescale.data import writer
from freescale.data.dataset import Dataset, compute_stats
from freescale.data.loader import Loader
from freescale.errors import FreeScaleError
from freescale.simulate import cluster, operations
from freescale.simulate.operations import DeviceModel
from freescale.simulate.whatif import Scenario, Techniques, simulate_steps
from freescale.simulate.workload import ModelCost, Popularity
from freescale.train import curves
from freescale.train.metrics_logger import MetricsLogger, count_damaged_lines, read_entries

SECONDS, MEMORY = 20.0, 3 << 30
Files = Mapping[str, bytes]
"""What a folder holds."""
Inputs = st.SearchStrategy[Files]


class Target(NamedTuple):
    """A kind of file, and what is done with one."""

    inputs: Callable[[], Inputs]
    read: Callable[[Path], None]


# --- Values and bytes ---------------------------------------------------------------------------------------------

NUMBERS = (
    st.integers(-3, 10)
    | st.sampled_from([2**31, 2**32, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30, 10**400, 10**401])
    | st.floats()
    | st.sampled_from([1e-300, 1e300, 0.5])
)
ORDINARY = st.integers(0, 100) | st.floats(0, 1)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)


def trees(keys: Sequence[str]) -> st.SearchStrategy[Any]:
    """Anything that JSON can say, with these keys among others."""
    names = st.sampled_from(keys) | st.text(max_size=4)
    return st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=12
    )


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """Some bytes flipped, zeroed, inserted, left out, or all of it cut short."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "write", "insert", "remove", "cut"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "write":
            new = draw(st.binary(min_size=1, max_size=8))
            data[at : at + len(new)] = new
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif kind == "remove":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "cut":
            del data[at:]
    return bytes(data)


@st.composite
def with_values(draw: st.DrawFn, tree: Any, values: st.SearchStrategy[Any]) -> Any:
    """A tree of lists and dicts in which something, at some depth, is another thing, twice or is not there."""
    if type(tree) not in (dict, list) or not tree or draw(st.integers(0, 7)) == 0:
        return draw(values)
    key: Any = draw(st.sampled_from(sorted(tree) if isinstance(tree, dict) else range(len(tree))))
    new: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    kind = draw(st.sampled_from(["deeper", "deeper", "deeper", "remove", "twice"]))
    if kind == "remove":
        del new[key]
    elif kind == "twice" and isinstance(new, list):
        new.insert(key, new[key])
    else:
        new[key] = draw(with_values(new[key], values))
    return new


def in_one(files: Files, others: Callable[[str, bytes], st.SearchStrategy[bytes]]) -> Inputs:
    """The same files, but for one."""
    return st.sampled_from(sorted(files)).flatmap(
        lambda name: others(name, files[name]).map(lambda raw: {**files, name: raw})
    )


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


# --- Configs and clusters -----------------------------------------------------------------------------------------


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {as_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float):
        return str(value) if not math.isfinite(value) or "." in str(value) else f"{value:.1e}"
    if isinstance(value, int) and abs(value) > 10**300:
        return "1" + "0" * 5000 if value == 10**400 else "0x" + "f" * 5000  # more digits than Python reads, or writes
    return json.dumps(value) if value is not None else "1979-05-27T07:32:00Z"


def as_tables(tree: Any) -> bytes:
    """A tree as the file that a person would write."""
    if not isinstance(tree, dict):
        return as_toml(tree).encode("utf-8", "surrogatepass")
    plain = [f"{json.dumps(key)} = {as_toml(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for name, table in tree.items():
        if isinstance(table, dict):
            plain += [f"[{json.dumps(name)}]", *(f"{json.dumps(k)} = {as_toml(v)}" for k, v in table.items())]
    return "\n".join([*plain, ""]).encode("utf-8", "surrogatepass")


TOML_TEXT = st.text(alphabet="[]{}=\"'.#\n\\ abdeginostu0123456789-_:TZ", max_size=60).map(str.encode)
LONG_LINES = st.builds(
    lambda word, times: f'seed = -1\n[data]\npath = """\n{word * times}!\n"""\n'.encode(),
    st.sampled_from(["a", "a.", "' ", "[", " ", "a = "]),
    st.integers(1, 4000),
)


def toml_inputs(name: str, valid: bytes, keys: Sequence[str], more: Sequence[st.SearchStrategy[bytes]] = ()) -> Inputs:
    tree = tomllib.loads(valid.decode())
    values = trees(keys)
    texts = st.one_of(
        with_values(tree, values).map(as_tables),
        with_values(tree, ORDINARY).flatmap(lambda one: with_values(one, ORDINARY)).map(as_tables),
        with_values(tree, SCALARS).flatmap(lambda one: with_values(one, SCALARS)).map(as_tables),
        damaged(valid),
        values.map(as_tables),
        TOML_TEXT,
        LONG_LINES,
        st.binary(max_size=40),
        *more,
    )
    return texts.map(lambda raw: {name: raw})


def config_inputs() -> Inputs:
    valid = config.to_toml(RECIPES["hstu-ranking-synth"])
    return toml_inputs("run.toml", valid.encode(), ["data", "model", "train", "path", "dim", "lr", "labels"])


def read_config(folder: Path) -> None:
    found = config.load(folder / "run.toml")
    assert config.parse(config.to_toml(found)) == found, "what was taken is not read back the same"


def cluster_inputs() -> Inputs:
    valid = (Path(cluster.__file__).parent / "clusters" / "h100.toml").read_bytes()
    tree = tomllib.loads(valid.decode())

    def figured(values: Mapping[str, float]) -> bytes:
        given = {name: {"value": value, "source": "me"} for name, value in values.items()}
        return as_tables({**tree, "figures": {**tree["figures"], **given}})

    names = st.sampled_from(sorted(cluster.FIGURES))
    few = st.dictionaries(names, NUMBERS | st.floats(0, 1e18), min_size=1, max_size=3).map(figured)
    many = st.dictionaries(names.filter("jitter".__ne__), st.integers(1, 100), min_size=1).map(figured)
    return toml_inputs("mine.toml", valid, ["name", "figures", "value", "low", "high", "flops"], [few, few, many, many])


@cache
def small_question() -> tuple[Scenario, Any]:
    model = ModelCost(
        cost=Cost(token=1.0),
        products=1.0,
        dim=8,
        dense_bytes=4e6,
        last_bytes=4e6,
        popularity=Popularity.from_counts(np.ones(1000, dtype=np.int64)),
        looked_up=1,
    )
    lengths = np.arange(1, 20)
    asked = Scenario(
        model, lengths, np.ones_like(lengths), 4, cluster.load("h100"), lambda c: DeviceModel.from_cluster(c, model)
    )
    return asked, asked.plan_steps(asked.sample_steps(4), 4, balanced=True)


def read_cluster(folder: Path) -> None:
    found, rng = cluster.load(str(folder / "mine.toml")), np.random.default_rng(0)
    asked, loads = small_question()
    for techniques in (Techniques(), Techniques(False, False, False)):
        headline(simulate_steps(asked, found.draw(rng), 4, techniques, loads, rng))


# --- Data sets ----------------------------------------------------------------------------------------------------


def some_histories(rows: int) -> pa.Table:
    lengths = [1 + i % 4 for i in range(rows)]
    times, items = [list(range(n)) for n in lengths], [[i * 7 % 30 for i in range(n)] for n in lengths]
    columns = {"user_id": list(range(rows)), "item_id": items, "timestamp": times}
    labels = {"candidate_id": [[1, 2]] * rows, "label_click": [[0, 1]] * rows}
    return pa.table({**columns, "rating": [[0.5] * n for n in lengths], **labels})


@cache
def valid_data() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        with writer.atomic_folder(Path(folder) / "data") as made:
            writer.write_dataset(made, [some_histories(11)], rows_per_group=3, items=30)
        return {file.name: file.read_bytes() for file in (Path(folder) / "data").iterdir()}


NUMBER_TYPES = st.sampled_from([pa.int64(), pa.int32(), pa.uint64(), pa.int8(), pa.float32(), pa.float16(), pa.bool_()])
ODD_TYPES = st.sampled_from(
    [pa.string(), pa.binary(), pa.timestamp("us"), pa.decimal128(5, 2), pa.null(), pa.struct([("a", pa.int64())])]
)
COLUMN_NAMES = ("user_id", "item_id", "timestamp", "rating", "candidate_id", "label_click", "other")


@st.composite
def columns(draw: st.DrawFn, rows: int, lengths: Sequence[int]) -> pa.Array:
    """Lists or single values, of some type, some of them null, too many or too few."""
    kind = draw(NUMBER_TYPES) if draw(st.integers(0, 5)) else draw(ODD_TYPES)
    ordinary = st.integers(0, 9)
    inner = st.none() | ordinary if draw(st.integers(0, 3)) == 0 else ordinary
    if kind == pa.int64() and draw(st.integers(0, 3)) == 0:
        inner = inner | st.integers(-(2**63), 2**63 - 1)
    if draw(st.booleans()):
        wide = draw(st.sampled_from([pa.list_, pa.large_list, lambda inner: pa.list_(inner, 2)]))
        kind, ragged = wide(kind), draw(st.integers(0, 3)) == 0
        each = [
            draw(st.lists(inner, max_size=3)) if ragged else sorted(draw(inner) or 0 for _ in range(n)) for n in lengths
        ]
        values: list[Any] = [one if draw(st.integers(0, 9)) else None for one in each]
    else:
        values = [draw(inner) for _ in range(rows)]
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return pa.nulls(rows, kind)


@st.composite
def foreign_tables(draw: st.DrawFn) -> bytes:
    """A Parquet file of somebody else, with columns like ours."""
    rows = draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    plain = some_histories(rows)
    table = {name: plain[name].combine_chunks() for name in plain.column_names}
    for name in draw(st.lists(st.sampled_from(COLUMN_NAMES), max_size=3)):
        table[name] = draw(columns(rows, lengths))
    for name in draw(st.lists(st.sampled_from(sorted(table)), max_size=1)):
        del table[name]
    out = io.BytesIO()
    pq.write_table(
        pa.table(table) if table else pa.table({"x": pa.nulls(rows, pa.int8())}),
        out,
        row_group_size=draw(st.integers(1, 3)),
        compression=draw(st.sampled_from(["none", "snappy", "zstd"])),
        store_schema=draw(st.booleans()),
        write_page_checksum=draw(st.booleans()),
        use_dictionary=draw(st.booleans()),
    )
    return out.getvalue()


def sealed(body: Any) -> bytes:
    """A manifest whose checksum is right, whatever it says."""
    return as_json({"freescale": 1, "crc": zlib.crc32(json.dumps(body, sort_keys=True).encode()), "data": body})


def data_inputs() -> Inputs:
    valid = valid_data()
    bare = {name: raw for name, raw in valid.items() if name.endswith(".parquet")}
    manifest = json.loads(valid["manifest.json"])
    values = trees(["stripes", "events", "items", "note", "../x", "part-00000-00.parquet"])
    names = st.sampled_from([*sorted(valid), "z.parquet", "☃ [a].parquet", "_.parquet"])
    return st.one_of(
        in_one(valid, lambda _, raw: damaged(raw)),
        in_one(bare, lambda _, raw: damaged(raw)),
        with_values(manifest["data"], values).map(lambda body: {**valid, "manifest.json": sealed(body)}),
        with_values(manifest, values).map(lambda tree: {**valid, "manifest.json": as_json(tree)}),
        st.dictionaries(names, foreign_tables(), min_size=1, max_size=2),
        foreign_tables().flatmap(damaged).map(lambda raw: {"a.parquet": raw}),
        st.tuples(names, names).map(lambda two: {**valid, two[0]: valid.get(two[1], b"")}),
        names.map(lambda name: {other: raw for other, raw in valid.items() if other != name}),
        st.binary(max_size=40).map(lambda raw: {"a.parquet": b"PAR1" + raw + b"PAR1", "manifest.json.bak": raw}),
    )


def read_data(folder: Path) -> None:
    """An epoch as it is, then one that leaves out what cannot be used, then what `data stats` does."""
    refused: FreeScaleError | None = None
    for split, on_bad in (("last", "stop"), ("none", "skip"), ("time", "skip")):
        options: Any = {"global_batch": 4, "shards": 4, "workers": 0, "split": split, "split_time": 2, "on_bad": on_bad}
        try:
            loader = Loader(DataConfig(path=str(folder), **options), seed=0)
            samples = [number for batch in loader for number in batch.sample_id.tolist()]
            found, aside = loader.dataset.rows, loader.dataset.quarantine.counts
            assert len(set(samples)) == len(samples) == found - aside.total() + aside["unreadable file"]
        except FreeScaleError as error:
            refused = error
    try:
        dataset = Dataset(str(folder), features=("rating",))
        found = compute_stats(dataset, workers=1)
        assert found.rows <= dataset.rows
        dataset.unchecked_files()
    except FreeScaleError as error:
        refused = error
    if refused:
        raise refused


# --- Traces of torch.profiler -------------------------------------------------------------------------------------

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


# --- Folders of runs ----------------------------------------------------------------------------------------------


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


# --- Checkpoints --------------------------------------------------------------------------------------------------


def whole_tensors() -> dict[str, torch.Tensor]:
    return {"table": torch.arange(36.0).view(9, 4), "sum": torch.arange(9.0)}


@cache
def valid_checkpoint() -> Files:
    """What two ranks wrote."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for rank, rows in enumerate((slice(0, 5), slice(5, 9))):
            tensor_files.write(
                folder, rank, {n: tensor_files.LocalRows(t[rows], rows.start, 9) for n, t in whole_tensors().items()}
            )
        tensor_files.write_json(folder / "facts.json", {"format": 1, "step": 7, "ranks": 2})
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def checkpoint_inputs() -> Inputs:
    """Also such as have the right checksum, since who plants a file can compute it."""
    valid = valid_checkpoint()
    values = trees(["name", "dtype", "shape", "rows", "first", "count", "at", "crc", "format", "step", "ranks"])

    def resealed(name: str, raw: bytes) -> st.SearchStrategy[bytes]:
        if not name.endswith(".json"):
            return damaged(raw)
        content = json.loads(raw)["content"]
        return with_values(content, values | ORDINARY).map(
            lambda new: as_json({"crc": zlib.crc32(json.dumps(new, sort_keys=True).encode()), "content": new})
        )

    return in_one(valid, resealed) | in_one(valid, resealed) | in_one(valid, lambda _, raw: damaged(raw))


def read_checkpoint(folder: Path) -> None:
    """As one rank does; what is taken must be what was written, or planted with its checksum."""
    parts = {n: tensor_files.LocalRows.whole(torch.zeros_like(t), replicated=True) for n, t in whole_tensors().items()}
    checkpoints.load(folder, parts)


# --- All of them --------------------------------------------------------------------------------------------------

TARGETS = {
    "checkpoint": Target(checkpoint_inputs, read_checkpoint),
    "config": Target(config_inputs, read_config),
    "data": Target(data_inputs, read_data),
    "kineto": Target(trace_inputs, read_trace_folder),
    "cluster": Target(cluster_inputs, read_cluster),
    "run": Target(run_inputs, read_run),
}


def accepts(target: Target, files: Files) -> bool:
    """Whether a reader takes a folder of these files, rather than refuses it. Raises what a reader should not have."""
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(raw)
        try:
            with confined():
                target.read(Path(folder))
        except FreeScaleError:
            return False
        return True


def fuzz(target: Target, examples: int) -> dict[str, Any]:
    """Let a target read so many inputs, the same ones every time."""
    seen, slowest = Counter[bool](), 0.0

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(target.inputs())
    def every(files: Files) -> None:
        nonlocal slowest
        begin = time.perf_counter()
        seen[accepts(target, files)] += 1
        slowest = max(slowest, time.perf_counter() - begin)

    begin = time.perf_counter()
    with bounded_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # overflow in figures that nobody could have measured
        every()
    return {
        "inputs": seen.total(),
        "accepted": seen[True],
        "refused": seen[False],
        "seconds": round(time.perf_counter() - begin, 1),
        "slowest_s": round(slowest, 3),
    }


@contextlib.contextmanager
def confined() -> Iterator[None]:
    """No longer than SECONDS, and nothing said."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """A reader that believes an absurd size fails here, instead of taking the machine with it."""
    small_question()  # what is made once is not counted
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
