"""An exported folder answers as the trained model does, in a process that has neither freescale nor a compiler.

Gate: 60 requests of two models as programs of torch.export, and of a small one that is compiled. With --whole: 1,000
requests of five models, both formats.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from freescale.config import FeatureConfig, RunConfig
from freescale.data.loader import Loader
from freescale.models.retrieval import Retrieval
from freescale.serving import serve
from freescale.serving.package import write_package
from freescale.train.build import build
from freescale.train.ranking_metrics import Ranker
from freescale.train.sharded_model import ShardedModel
from freescale.train.step import LearningRates
from freescale.train.trained_model import TrainedModel
from freescale.transport.world import World, destroy_world, init_world
from tests.support.datasets import lists, write_dataset
from tests.support.training import small

ITEMS, KNOWN, LONGEST = 90, 70, 24
ANSWER = """
import importlib, json, sys
sys.modules["freescale"] = None  # an import fails
answers = []
for folder, requests in json.load(sys.stdin):
    sys.path.insert(0, folder)
    model = importlib.import_module("serve").Recommender(folder)
    model.check()
    if model.facts["task"] == "retrieval":
        found = model.recommend(requests, k=10)
        answers.append([{**one, "vector": v} for one, v in zip(found, model.query(requests).tolist())])
    else:
        answers.append(model.score(model.encode(requests), requests))
print(json.dumps(answers))
"""


def columns(users: int) -> dict[str, Any]:
    """Histories with features of events, users, requests and candidates: ids, sets, numbers, bits; some are missing."""
    rng = np.random.default_rng(4)
    lengths = [1, 2, *rng.integers(3, LONGEST, users - 2).tolist()]
    total, offered = sum(lengths), rng.integers(1, 6, users).tolist()
    artist = rng.integers(0, 40, ITEMS) * 0x9E3779B97F4A7
    item, shown = rng.integers(0, ITEMS, total), rng.integers(0, ITEMS, sum(offered))
    times = np.concatenate([10**9 + np.sort(rng.integers(0, 10**7, length)) for length in lengths])

    def some(values: Any) -> list[Any]:
        return [None if rng.random() < 0.1 else value for value in values.tolist()]

    def sets(count: int, ids: int) -> list[list[int]]:
        return [rng.integers(0, ids, rng.integers(0, 4)).tolist() for _ in range(count)]

    return {
        "user_id": pa.array(np.arange(users)),
        "item_id": lists(lengths, item),
        "timestamp": lists(lengths, times),
        "artist": lists(lengths, some(artist[item]), pa.int64()),
        "tags": lists(lengths, sets(total, 12), pa.list_(pa.int64())),
        "price": lists(lengths, some(rng.normal(5.0, 2.0, total)), pa.float64()),
        "actions": lists(lengths, rng.integers(0, 8, total)),
        "country": pa.array(some(rng.integers(0, 7, users)), pa.int64()),
        "devices": pa.array(sets(users, 4), pa.list_(pa.int64())),
        "hour": pa.array(rng.integers(0, 10**9, users)),
        "candidate_id": lists(offered, shown),
        "candidate_artist": lists(offered, some(artist[shown]), pa.int64()),
        "candidate_tags": lists(offered, sets(sum(offered), 12), pa.list_(pa.int64())),
        "candidate_price": lists(offered, some(rng.normal(5.0, 2.0, sum(offered))), pa.float64()),
        "label_click": lists(offered, rng.integers(0, 2, sum(offered))),
        "label_dwell": lists(offered, rng.normal(0.0, 1.0, sum(offered))),
    }


FEATURES = {
    "artist": FeatureConfig(ids="dynamic", rows=256, missing="default"),
    "tags": FeatureConfig(kind="set", rows=10),
    "price": FeatureConfig(kind="number", scaling="quantiles", buckets=5, missing="default"),
    "actions": FeatureConfig(scope="event", kind="bits", bits=3),
    "country": FeatureConfig(scope="user", rows=5, missing="default"),
    "devices": FeatureConfig(scope="user", kind="set", rows=4, ids="dynamic"),
}
CROSSED = {
    "price": FeatureConfig(kind="number", scaling="standardize", missing="default"),
    "hour": FeatureConfig(scope="context", kind="timestamp"),
    "user_x_artist": FeatureConfig(scope="context", kind="cross", cross=("user", "artist"), rows=97),
    "country_x_hour_x_item": FeatureConfig(scope="candidate", kind="cross", cross=("country", "hour", "item"), rows=89),
}
DYNAMIC_ITEMS = {"item": FeatureConfig(ids="dynamic", rows=64)}
RANKING = {"kind": "ranking", "labels": ("label_click", "label_dwell"), "regression": ("label_dwell",)}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, FeatureConfig]]] = {
    "retrieval": ("sasrec", {"interleave": True}, FEATURES | DYNAMIC_ITEMS),
    "ranking": ("hstu", RANKING | {"experts": 2}, FEATURES | CROSSED | DYNAMIC_ITEMS),
}
COMPILED = {"without features": ("hstu", {"seen": "allow"}, {})}
"""Compiled in the gate, too."""
MORE_MODELS = {
    "retrieval of a vocabulary": ("hstu", {"seen": "allow"}, FEATURES),
    "ranking of a vocabulary": ("sasrec", RANKING, FEATURES | CROSSED),
}


def config_of(name: str, data: Path) -> RunConfig:
    kind, task, features = (MODELS | COMPILED | MORE_MODELS)[name]
    config = small(data, model={"kind": kind}, task=task, train={"precision": "fp32"}, data={"split": "none"})
    return replace(config, features=features)


def trained(config: RunConfig, world: World, folder: Path) -> TrainedModel:
    """Train for two steps."""
    loader, parts = Loader.from_run(config), build(config, world, folder, quiet=True).components
    for batch in itertools.islice(loader, 2):
        parts.step.run(batch, LearningRates(dense=config.train.lr, tables=config.tables.lr))
    parts.step.synchronize()
    return TrainedModel(config, world, ShardedModel(parts.module, parts.tables, []), loader.vocabulary.items, 2)


@torch.no_grad()
def expected(of: TrainedModel) -> dict[int, dict[str, Any]]:
    """The answers of a trained model, by user."""
    module, model, found = of.sharded.module, of.sharded.module.model, {}
    for batch in Loader.from_run(of.config):
        if isinstance(model, Retrieval):
            best, scores = of.corpus().top(batch, 10)
            inputs = model.prepare_query(batch)
            vectors = model.encode_query(inputs, module.read_rows(inputs.ids))
            rows = [{"item_id": i, "score": s, "vector": v} for i, s, v in zip(best, scores, vectors, strict=True)]
        else:
            assert batch.candidates is not None
            parts = Ranker(module, of.world.device).predict(batch)[0].split(batch.candidates.lengths.tolist())
            rows = [dict(zip(of.config.task.labels, part.T, strict=True)) for part in parts]
        found |= zip(batch.scalars["user_id"].tolist(), rows, strict=True)
    return {user: {name: value.numpy() for name, value in row.items()} for user, row in found.items()}


class Exports(NamedTuple):
    """Requests, the folders that answer them by model and format, and the answers of the trained models."""

    requests: list[dict[str, Any]]
    folders: dict[tuple[str, str], Path]
    expected: dict[str, dict[int, dict[str, Any]]]
    loaded: dict[str, serve.Recommender]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, whole_form: bool) -> Exports:
    place, table = tmp_path_factory.mktemp("served"), pa.table(columns(1000 if whole_form else 60))
    write_dataset(place / "data", table, rows_per_group=8, items=KNOWN)  # the other items are unknown
    requests = pl.DataFrame(table).drop("label_click", "label_dwell").to_dicts()
    made, world = Exports(requests, {}, {}, {}), init_world(timeout=60)
    for number, name in enumerate([*MODELS, *COMPILED, *(MORE_MODELS if whole_form else ())]):
        model = trained(config_of(name, place / "data"), world, place / f"run-{number}")
        made.expected[name] = expected(model)
        for kind in ("pt2", "aoti") if whole_form else ("aoti",) if name in COMPILED else ("pt2",):
            made.folders[name, kind] = place / f"{kind}-{number}"
            write_package(model, made.folders[name, kind], kind)
    destroy_world()
    made.loaded.update({name: serve.Recommender(made.folders[name, "pt2"]) for name in MODELS})
    return made


def answers(exports: Exports) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What all exports answer, in one process that has neither freescale nor a compiler."""
    asked = json.dumps([[str(folder), exports.requests] for folder in exports.folders.values()])
    environment = {"PATH": "/nowhere", "OMP_NUM_THREADS": "1", "HOME": os.environ.get("HOME", "/")}
    said = subprocess.run([sys.executable, "-c", ANSWER], input=asked, capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr
    return dict(zip(exports.folders, json.loads(said.stdout.splitlines()[-1]), strict=True))


def test_answers_are_those_of_the_trained_model(exports: Exports) -> None:
    for (name, kind), found in answers(exports).items():
        assert len(found) == len(exports.expected[name])
        for request, answer in zip(exports.requests, found, strict=True):
            right = dict(exports.expected[name][request["user_id"]])
            ids = right.pop("item_id", None)
            for column, values in right.items():
                off = np.abs(np.array(answer[column]) - values[values > -np.inf])  # of items that can be recommended
                assert off.max() <= 1e-6, (name, kind, column)
            if ids is not None and np.diff(right["score"]).max() < -2e-6:  # no ties
                assert answer["item_id"] == ids.tolist(), (name, kind)


def test_an_index_over_the_items_finds_what_serving_finds(exports: Exports) -> None:
    folder, model = exports.folders["retrieval", "pt2"], exports.loaded["retrieval"]
    vectors, ids = np.load(folder / "items.npy"), np.load(folder / "item_ids.npy")
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    assert pq.read_table(folder / "items.parquet")["item_id"].to_pylist() == ids.tolist() == sorted(ids.tolist())
    index = faiss.IndexIDMap(faiss.IndexFlatIP(vectors.shape[1]))
    index.add_with_ids(vectors, ids)
    every = zip(*index.search(model.query(exports.requests).numpy(), len(ids)), strict=True)
    answers = model.recommend(exports.requests, k=10)
    for request, answer, (score, items) in zip(exports.requests, answers, every, strict=True):
        unseen = ~np.isin(items, request["item_id"])
        score, items = score[unseen][:10], items[unseen][:10]
        assert np.abs(score - answer["score"]).max() <= 1e-6
        if np.diff(score).max() < -2e-6:  # no ties
            assert items.tolist() == answer["item_id"]


def test_candidates_in_several_calls_after_a_kept_history_have_the_same_outputs(exports: Exports) -> None:
    model = exports.loaded["ranking"]
    request = next(request for request in exports.requests if len(request["candidate_id"]) > 3)
    kept = model.encode([request])
    together = model.score(kept, [request])[0]
    for label in RANKING["labels"]:
        apart = []
        for part in (slice(0, 2), slice(2, 3), slice(3, None)):
            some = {n: v[part] if n.startswith("candidate_") else v for n, v in request.items()}
            apart += model.score(kept, [some])[0][label]
        assert np.abs(np.array(apart) - together[label]).max() <= 1e-6


WRONG: list[Any] = [
    [],
    -1,
    [-1, 2],
    1.5,
    [1.5, "x"],
    "a",
    ["a", "b"],
    [True, False],
    [[1, 2], [3]],
    [[-1], [1]],
    [[1.5], []],
    2**70,
    [2**63, 1],
    list(range(31)),
    [[1]] * 31,
    [[1] * 300, []],
    [1],
    {"a": 1},
    [{"a": 1}, 2],
    [float("nan"), float("inf")],
    float("nan"),
    [[[1]], [[2]]],
]


RIGHT = {"price": [[-1, 2], [2**63, 1]], "tags": [[[1, 2], [3]]], "devices": [[], [1], list(range(31))]}
"""Columns that may hold values which are wrong in others."""


@pytest.mark.parametrize("name", ["retrieval", "ranking"])
def test_bad_requests_are_refused_with_a_reason(exports: Exports, name: str) -> None:
    model, rng = exports.loaded[name], np.random.default_rng(0)
    good = next(request for request in exports.requests if len(request["item_id"]) == 2)
    first = next(iter(model.facts["programs"]))
    facts = {column["column"]: column for column in model.facts["programs"][first].values()}

    def answer(requests: Any) -> Any:
        return model.recommend(requests) if name == "retrieval" else model.encode(requests)

    answer([good, good])
    for _ in range(500):
        column, value = list(facts)[rng.integers(len(facts))], WRONG[rng.integers(len(WRONG))]
        if value not in RIGHT.get(column, []):
            with pytest.raises(serve.RequestError, match=f"'{column}'|another length"):
                answer([good, good | {column: value}])
    for column, values in RIGHT.items():
        answer([good | {column: value} for value in values])
    for wrong in ([], None, good, [good, None], [[good]], "a"):
        with pytest.raises(serve.RequestError, match="list of requests"):
            answer(wrong)
    for column in ("item_id", "timestamp", "tags", "price", "devices"):
        with pytest.raises(serve.RequestError, match=f"'{column}'"):
            answer([{n: v for n, v in good.items() if n != column}])


def test_a_changed_file_is_refused(exports: Exports, tmp_path: Path) -> None:
    folder = shutil.copytree(exports.folders["retrieval", "pt2"], tmp_path / "copy")
    weights = bytearray((folder / "weights.safetensors").read_bytes())
    weights[-3] ^= 1
    (folder / "weights.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="was changed or is incomplete"):
        serve.Recommender(folder)


def test_another_answer_to_the_example_is_an_error(exports: Exports) -> None:
    model = exports.loaded["retrieval"]
    model.check()
    rows = model.weights["tables.item"]
    model.weights["tables.item"] = rows + 0.1
    with pytest.raises(ValueError, match="the answer to the example"):
        model.check()
    model.weights["tables.item"] = rows


def test_serving_stays_short() -> None:
    assert len(Path(serve.__file__).read_text().splitlines()) < 150
