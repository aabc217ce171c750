"""Fuzzed files that a training reads: configs, cluster descriptions, data sets and checkpoints."""

import io
import json
import tempfile
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st

from freescale import config
from freescale.balance.cost import Cost
from freescale.bubbles.report import headline
from freescale.checkpoint import checkpoints, tensor_files
from freescale.config import RECIPES, DataConfig
from freescale.data import writer
from freescale.data.dataset import Dataset, compute_stats
from freescale.data.loader import Loader
from freescale.embedding.row_order import RowOrder
from freescale.errors import FreeScaleError
from freescale.simulate import cluster
from freescale.simulate.lookups import Popularity
from freescale.simulate.operations import DeviceModel
from freescale.simulate.whatif import Scenario, Techniques, simulate_steps
from freescale.simulate.workload import ModelCost, TableCost
from tests.support.fuzz_values import (
    NUMBERS,
    ORDINARY,
    Files,
    Inputs,
    as_json,
    as_tables,
    damaged,
    in_one,
    toml_inputs,
    trees,
    with_values,
)


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
        tables=(TableCost(dim=8, popularity=Popularity.from_counts(np.ones(1000, dtype=np.int64)), looked_up=1),),
        dense_bytes=4e6,
        last_bytes=4e6,
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


def whole_tensors() -> dict[str, torch.Tensor]:
    return {"table": torch.arange(36.0).view(9, 4), "sum": torch.arange(9.0)}


@cache
def valid_checkpoint() -> Files:
    """What two ranks wrote."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for rank, rows in enumerate((slice(0, 5), slice(5, 9))):
            tensor_files.write(
                folder,
                rank,
                {n: tensor_files.LocalRows(t[rows], rows.start, RowOrder(9, 1)) for n, t in whole_tensors().items()},
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
