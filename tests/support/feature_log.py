"""A log with features of every kind and scope, and configs that read it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from freescale.config import FeatureConfig, RunConfig
from tests.support.datasets import lists, write_dataset
from tests.support.training import small

ITEMS, ARTISTS, TAGS, REGIONS, DEVICES = 40, 9, 7, 5, 4
SIZES = {"artist": ARTISTS, "tags": TAGS, "region": REGIONS, "devices": DEVICES}
MISSING_SHARE = 0.2


def write_feature_log(path: Path, lengths: list[int], *, candidates: bool, seed: int = 0) -> None:
    """Write a data set with ids, sets, numbers, bits and times of items, events, users and requests; some missing."""
    rng = np.random.default_rng(seed)
    total, users = sum(lengths), len(lengths)
    item = rng.integers(0, ITEMS, total)
    steps = rng.integers(1, 40_000, total).cumsum()
    columns: dict[str, Any] = {
        "user_id": pa.array(np.arange(users, dtype=np.int64)),
        "item_id": lists(lengths, item),
        "timestamp": lists(lengths, steps, pa.int64()),
        "region": pa.array(_with_nulls(rng, rng.integers(0, REGIONS, users)), pa.int64()),
        "devices": pa.array([rng.integers(0, DEVICES, rng.integers(0, 4)).tolist() for _ in range(users)]),
        "age": pa.array(_with_nulls(rng, rng.normal(40, 10, users)), pa.float32()),
        "action": lists(lengths, rng.integers(0, 8, total), pa.int64()),
        "dwell": lists(lengths, _with_nulls(rng, rng.exponential(30, total)), pa.float32()),
    }
    columns |= _of_items("", lengths, item, rng)
    if candidates:
        offered = [i % 3 + 1 for i in range(users)]
        shown = rng.integers(0, ITEMS, sum(offered))
        columns |= {"candidate_id": lists(offered, shown), "hour": pa.array(rng.integers(0, 10**9, users))}
        columns |= _of_items("candidate_", offered, shown, rng) | _labels(offered, rng)
    else:
        columns |= {"hour": columns["timestamp"]} | _labels(lengths, rng)
    write_dataset(path, pa.table(columns), rows_per_group=4, items=ITEMS, features=SIZES)


def _of_items(prefix: str, lengths: list[int], item: Any, rng: np.random.Generator) -> dict[str, Any]:
    tags = [rng.integers(0, TAGS, rng.integers(0, 4)).tolist() for _ in item]
    return {
        f"{prefix}artist": lists(lengths, _with_nulls(rng, item % ARTISTS), pa.int64()),
        f"{prefix}tags": lists(lengths, tags, pa.list_(pa.int64())),
        f"{prefix}price": lists(lengths, (item * 1.5).astype(np.float32)),
    }


def _labels(lengths: list[int], rng: np.random.Generator) -> dict[str, Any]:
    clicked, seconds = rng.integers(0, 2, sum(lengths)).astype(float), rng.exponential(2, sum(lengths))
    return {
        "label_click": lists(lengths, _with_nulls(rng, clicked), pa.float32()),
        "label_seconds": lists(lengths, _with_nulls(rng, seconds), pa.float32()),
    }


def _with_nulls(rng: np.random.Generator, values: Any) -> list[Any]:
    return [None if rng.random() < MISSING_SHARE else value for value in values.tolist()]


def features(*, dim: int = 8) -> dict[str, FeatureConfig]:
    """Features of every kind and scope over tables of three widths."""
    return {
        "artist": FeatureConfig(missing="default"),
        "tags": FeatureConfig(kind="set", dim=4, combine="concat"),
        "price": FeatureConfig(kind="number", scaling="quantiles", buckets=5, dim=4, combine="concat"),
        "action": FeatureConfig(scope="event", kind="bits", bits=3),
        "dwell": FeatureConfig(scope="event", kind="number", missing="default"),
        "region": FeatureConfig(scope="user", dim=12, combine="concat", missing="default"),
        "devices": FeatureConfig(scope="user", kind="set"),
        "age": FeatureConfig(scope="user", kind="number", missing="default"),
        "hour": FeatureConfig(scope="context", kind="timestamp", dim=dim),
    }


def with_features(path: Path, *, anchors: str = "none", task: str = "ranking", **changes: Any) -> RunConfig:
    """A run of seconds that reads all features of `write_feature_log`."""
    of_task: dict[str, Any] = {"kind": task}
    if task == "ranking":
        labels = {"labels": ("label_click", "label_seconds"), "regression": ("label_seconds",), "weights": (1.0, 0.1)}
        of_task |= {**labels, "anchors": anchors, "experts": 2}
    read = {n: f for n, f in features().items() if task == "ranking" or f.scope != "context"}
    config = small(path, **changes)
    return replace(config, task=replace(config.task, **of_task), features=read)
