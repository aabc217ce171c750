"""An exported folder answers as the trained model does, in a process that has neither freescale nor a compiler."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.cli.main import main
from freescale.config import FeatureConfig, RunConfig, save
from freescale.data.loader import Loader
from freescale.serving import serve
from freescale.train.ranking_metrics import Ranker
from freescale.train.trained_model import load_config, load_trained_model
from freescale.transport.world import destroy_world, init_world
from tests.support.datasets import lists, write_dataset
from tests.support.training import small

USERS, ITEMS, LONGEST = 60, 90, 24
ANSWER = """
import json, sys
sys.modules["freescale"] = None  # an import fails
sys.path.insert(0, sys.argv[1])
import serve
model, requests = serve.Recommender(sys.argv[1]), json.load(sys.stdin)
if model.facts["task"] == "retrieval":
    print(json.dumps(model.recommend(requests, k=10)))
else:
    print(json.dumps(model.score(model.encode(requests), requests)))
"""


def columns() -> dict[str, Any]:
    """Histories with features of events, users and candidates; the ids of artists and of some items are large."""
    rng = np.random.default_rng(4)
    lengths = [1, 2, *rng.integers(3, LONGEST, USERS - 2).tolist()]
    total, offered = sum(lengths), rng.integers(1, 6, USERS).tolist()
    artist = rng.integers(0, 40, ITEMS) * 0x9E3779B97F4A7
    item, shown = rng.integers(0, ITEMS, total), rng.integers(0, ITEMS, sum(offered))
    times = np.concatenate([10**9 + np.sort(rng.integers(0, 10**7, length)) for length in lengths])
    return {
        "user_id": pa.array(np.arange(USERS)),
        "item_id": lists(lengths, item),
        "timestamp": lists(lengths, times),
        "artist": lists(lengths, artist[item]),
        "price": lists(lengths, rng.normal(5.0, 2.0, total)),
        "actions": lists(lengths, rng.integers(0, 8, total)),
        "country": pa.array(rng.integers(0, 7, USERS)),
        "candidate_id": lists(offered, shown),
        "candidate_artist": lists(offered, artist[shown]),
        "candidate_price": lists(offered, rng.normal(5.0, 2.0, sum(offered))),
        "label_click": lists(offered, rng.integers(0, 2, sum(offered))),
        "label_dwell": lists(offered, rng.normal(0.0, 1.0, sum(offered))),
    }


FEATURES = {
    "artist": FeatureConfig(ids="dynamic", rows=256),
    "price": FeatureConfig(kind="number", scaling="standardize"),
    "actions": FeatureConfig(scope="event", kind="bits", bits=3),
    "country": FeatureConfig(scope="user", rows=5),
}
RANKING = {"kind": "ranking", "labels": ("label_click", "label_dwell"), "regression": ("label_dwell",)}


def exported(tmp_path: Path, config: RunConfig) -> Path:
    """Train for an epoch and export."""
    save(config, tmp_path / "run.toml")
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model"), "--format", "pt2", "--quiet"]) == 0
    return tmp_path / "model"


def answers(folder: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    command, asked = [sys.executable, "-c", ANSWER, str(folder)], json.dumps(requests)
    path = {"PATH": "/nowhere", "OMP_NUM_THREADS": "1", "HOME": os.environ.get("HOME", "/")}
    said = subprocess.run(command, input=asked, capture_output=True, text=True, check=True, env=path)
    return json.loads(said.stdout)


def requests_of(data: Path, names: list[str]) -> list[dict[str, Any]]:
    return pl.read_parquet(data / "part-*.parquet", columns=names).to_dicts()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "data"
    write_dataset(path, pa.table(columns()), rows_per_group=8, items=70)  # 20 items are unknown
    return path


def config_of(data: Path, kind: str, features: dict[str, FeatureConfig], **changes: Any) -> RunConfig:
    model = {"kind": kind, "dim": 16}
    changes = {"train": {"epochs": 1, "precision": "fp32"}, "transport": {}, **changes}
    return replace(small(data, model=model, **changes), features=features)


@pytest.mark.parametrize(("kind", "items"), [("hstu", "dynamic"), ("sasrec", "vocabulary")])
def test_recommendations_are_those_of_predict(data: Path, tmp_path: Path, kind: str, items: str) -> None:
    features = FEATURES | ({"item": FeatureConfig(ids="dynamic", rows=64)} if items == "dynamic" else {})
    folder = exported(tmp_path, config_of(data, kind, features))
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "top"), "--k", "10", "--quiet"]) == 0
    predicted = {row["user_id"]: row for row in pl.read_parquet(tmp_path / "top" / "*.parquet").to_dicts()}
    requests = requests_of(data, ["user_id", "item_id", "timestamp", "artist", "price", "actions", "country"])
    for request, answer in zip(requests, answers(folder, requests), strict=True):
        expected = predicted[request["user_id"]]
        assert answer["score"] == pytest.approx(expected["score"], abs=1e-6)
        if np.diff(expected["score"]).max(initial=-1.0) < -1e-6:  # no ties
            assert answer["item_id"] == expected["item_id"]
    vectors, ids = np.load(folder / "items.npy"), np.load(folder / "item_ids.npy")
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    assert pq.read_table(folder / "items.parquet")["item_id"].to_pylist() == ids.tolist()


@pytest.mark.parametrize("kind", ["hstu", "sasrec"])
def test_outputs_of_candidates_are_those_of_the_trained_model(data: Path, tmp_path: Path, kind: str) -> None:
    folder = exported(tmp_path, config_of(data, kind, FEATURES, task=RANKING))
    world = init_world(timeout=60)
    config = load_config(tmp_path / "run")
    trained = load_trained_model(tmp_path / "run", config, world)
    expected, ranker = {}, Ranker(trained.sharded.module, world.device)
    for batch in Loader.from_run(config, data=replace(config.data, split="none")):
        assert batch.candidates is not None
        outputs = ranker.predict(batch)[0].split(batch.candidates.lengths.tolist())
        expected |= zip(batch.scalars["user_id"].tolist(), outputs, strict=True)
    destroy_world()
    names = [name for name in columns() if not name.startswith("label_")]
    requests = requests_of(data, names)
    found = answers(folder, requests)
    for request, answer in zip(requests, found, strict=True):
        both = np.array([answer[label] for label in RANKING["labels"]]).T
        assert np.allclose(both, expected[request["user_id"]].numpy(), atol=1e-6)
    # Candidates in several calls after one kept history have the same outputs.
    model = serve.Recommender(folder)
    several = next(request for request in requests if len(request["candidate_id"]) > 3)
    kept = model.encode([several])
    parts = [
        {n: v[part] if n.startswith("candidate_") else v for n, v in several.items()}
        for part in (slice(0, 2), slice(2, None))
    ]
    scored = [model.score(kept, [part])[0]["label_click"] for part in parts]
    assert np.allclose(sum(scored, []), found[requests.index(several)]["label_click"], atol=1e-6)


def test_bad_requests_are_refused_with_a_reason(data: Path, tmp_path: Path) -> None:
    model = serve.Recommender(exported(tmp_path, config_of(data, "hstu", {})))
    good = {"item_id": [1, 2], "timestamp": [10, 20], "time": 30}
    assert len(model.recommend([good], k=5)[0]["item_id"]) == 5
    rng = np.random.default_rng(0)
    wrong: list[Any] = [
        None,
        [],
        -1,
        [-1, 2],
        1.5,
        [1.5, 2],
        "a",
        ["a", "b"],
        [True, False],
        [[1, 2]],
        2**70,
        [2**63, 1],
    ]
    wrong += [list(range(31)), [1], [None, 1], {"a": 1}, [float("nan"), 1]]
    for _ in range(1000):
        name = ["item_id", "timestamp", "time"][rng.integers(3)]
        value = wrong[rng.integers(len(wrong))]
        if name == "time" and isinstance(value, int) and 0 <= value < 2**63:
            continue
        with pytest.raises(serve.RequestError, match="length" if value == [1] and name != "time" else name):
            model.recommend([good, good | {name: value}])
    with pytest.raises(serve.RequestError, match="list of requests"):
        model.recommend([])


def test_a_changed_file_is_refused(data: Path, tmp_path: Path) -> None:
    folder = exported(tmp_path, config_of(data, "hstu", {}))
    weights = bytearray((folder / "weights.safetensors").read_bytes())
    weights[-3] ^= 1
    (folder / "weights.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="was changed or is incomplete"):
        serve.Recommender(folder)
