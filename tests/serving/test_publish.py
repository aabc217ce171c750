"""Servers follow published versions: deltas give the weights of a full export, and a damaged version is refused."""

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.config import FeatureConfig
from freescale.data.loader import Loader
from freescale.serving import serve
from freescale.serving.follow import LATEST, Follower, version_name
from freescale.serving.package import served_weights
from freescale.serving.publish import Published, publish
from freescale.train.build import build
from freescale.train.sharded_model import ShardedModel
from freescale.train.step import LearningRates
from freescale.train.trained_model import TrainedModel
from freescale.transport.world import destroy_world, init_world
from tests.support.datasets import histories, write_dataset
from tests.support.training import small

VERSIONS, FULL_EVERY = 5, 3
REQUEST = {"item_id": [3, 17, 5], "timestamp": [100, 160, 220], "time": 230}


class History:
    """What was published, and what the model was at each version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[Published] = []
        self.weights: list[dict[str, torch.Tensor]] = []


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Five versions of a model with dynamic items: full, delta, delta, full, delta."""
    place = tmp_path_factory.mktemp("published")
    write_dataset(place / "data", histories([6] * 200, items=150), rows_per_group=8, items=150)
    config = small(
        place / "data", data={"split": "none", "order": "log"}, train={"precision": "fp32"}, model={"dim": 64}
    )
    config = replace(config, features={"item": FeatureConfig(ids="dynamic", rows=96, eviction="lru")})
    world, made = init_world(timeout=60), History(place / "versions")
    parts, batches = build(config, world, place / "run", quiet=True).components, iter(Loader.from_run(config))
    for version in range(VERSIONS):
        for batch in itertools.islice(batches, 2):
            parts.step.run(batch, LearningRates(dense=0.01, tables=0.1))
        parts.step.synchronize()
        model = TrainedModel(config, world, ShardedModel(parts.module, parts.tables, []), 150, 2 + 2 * version)
        done = publish(model, str(made.folder), "pt2", full_every=FULL_EVERY)
        assert done is not None
        assert publish(model, str(made.folder), "pt2", full_every=FULL_EVERY) is None, "this step is published"
        made.done.append(done)
        made.weights.append({name: value.clone() for name, value in served_weights(model).items()})
    destroy_world()
    return made


@pytest.fixture
def copy(published: History, tmp_path: Path) -> Path:
    """A copy of the versions, to damage."""
    return Path(shutil.copytree(published.folder, tmp_path / "versions"))


def name_latest(folder: Path, version: int) -> None:
    full = max(one for one in (0, 3) if one <= version)
    (folder / LATEST).write_text(json.dumps({"version": version, "full": full}))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].view(-1), b[name].view(-1)) for name in a)


def test_deltas_give_the_weights_of_a_full_export_bit_for_bit(published: History, copy: Path) -> None:
    assert [one.is_full for one in published.done] == [True, False, False, True, False]
    follower = Follower(str(copy), serve)
    answers = []
    for version in range(VERSIONS):
        name_latest(copy, version)
        assert follower.poll()
        assert not follower.poll(), "nothing is new"
        assert (follower.version, follower.error) == (version, "")
        assert same(follower._weights, published.weights[version])
        assert follower.model.facts["step"] == 2 + 2 * version
        answers.append(follower.model.recommend([REQUEST], k=5))
    assert len({json.dumps(answer) for answer in answers}) == VERSIONS
    name_latest(copy, 4)
    late = Follower(str(copy), serve)
    assert late.poll()
    assert same(late._weights, published.weights[4])
    assert late.model.recommend([REQUEST], k=5) == answers[4]
    for version in (2, 0, 1, 4):
        late.go_back(version)
        assert late.model.recommend([REQUEST], k=5) == answers[version]


def test_programs_hold_no_weights_and_are_loaded_once(copy: Path) -> None:
    programs = [(copy / version_name(version) / "query.pt2").read_bytes() for version in (0, 3)]
    assert programs[0] == programs[1], "weights have changed, the program has not"
    follower = Follower(str(copy), serve)
    name_latest(copy, 0)
    assert follower.poll()
    loaded = follower.model.programs
    name_latest(copy, 4)
    assert follower.poll()
    assert follower.model.programs is loaded


def test_a_delta_is_little_more_than_the_rows_that_changed(published: History) -> None:
    for before, now, done in zip(published.weights, published.weights[1:], published.done[1:], strict=False):
        if done.is_full:
            continue
        dense = sum(value.nbytes for name, value in now.items() if name not in ("tables.item", "item.ids"))
        changed = (now["tables.item"] != before["tables.item"]).any(1) | (now["item.ids"] != before["item.ids"]).view(
            -1
        )
        rows = int(changed.sum())
        assert done.rows == rows < len(changed)
        file = (published.folder / version_name(done.version) / "delta.safetensors").stat().st_size
        header = 16_384  # names and offsets
        assert file - dense - header <= 1.1 * rows * (now["tables.item"][0].nbytes + 8)


def test_a_damaged_version_is_refused_and_the_old_one_keeps_answering(copy: Path) -> None:
    follower = Follower(str(copy), serve)
    name_latest(copy, 0)
    assert follower.poll()
    before = follower.model.recommend([REQUEST], k=5)
    delta, kept = copy / version_name(1) / "delta.safetensors", copy / "kept"
    damages: dict[str, Any] = {
        "changed or is incomplete": lambda: delta.write_bytes(delta.read_bytes()[: delta.stat().st_size // 2]),
        "No such file": lambda: shutil.rmtree(copy / version_name(1)),
        "describes itself as version 2": lambda: swap(copy / version_name(1), copy / version_name(2)),
        "does not follow the version before it": lambda: swap_contents(copy, 1, 4),
    }
    name_latest(copy, 2)
    shutil.copytree(copy, kept)
    for error, damage in damages.items():
        damage()
        assert not follower.poll()
        assert error in follower.error
        assert follower.version == 0
        assert follower.model.recommend([REQUEST], k=5) == before
        for version in range(VERSIONS):
            shutil.rmtree(copy / version_name(version), ignore_errors=True)
            shutil.copytree(kept / version_name(version), copy / version_name(version))
    (copy / LATEST).write_text("{")
    assert not follower.poll()
    name_latest(copy, 2)
    assert follower.poll()
    assert follower.version == 2


def swap(a: Path, b: Path) -> None:
    a.rename(a.with_name("other"))
    b.rename(a)
    a.with_name("other").rename(b)


def swap_contents(folder: Path, a: int, b: int) -> None:
    """Let version a have the content of version b, described as version a."""
    shutil.rmtree(folder / version_name(a))
    shutil.copytree(folder / version_name(b), folder / version_name(a))
    path = folder / version_name(a) / "version.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"version": a, "base": a - 1}))


def test_a_version_that_was_not_finished_is_not_read(published: History, copy: Path) -> None:
    assert published.done[-1].version == 4
    (copy / version_name(5)).mkdir()
    (copy / version_name(5) / "delta.safetensors").write_bytes(b"half")
    follower = Follower(str(copy), serve)
    assert follower.poll()
    assert follower.version == 4, "nothing but what LATEST names is read"
    assert np.isfinite(follower.model.recommend([REQUEST], k=5)[0]["score"]).all()


@pytest.mark.quiet
def test_the_http_example_answers_at_a_share_of_its_maximum_while_versions_change(
    published: History, tmp_path: Path
) -> None:
    out, script = tmp_path / "load.json", Path(__file__).parents[2] / "benchmarks" / "serving_load.py"
    options = ["--maximum-seconds", "1", "--seconds", "6", "--every", "1.2", "--clients", "2", "--out", out]
    subprocess.run([sys.executable, script, "--published", published.folder, *options], check=True, capture_output=True)
    (result,) = json.loads(out.read_text())["results"]
    maximum, held = result["maximum"], result["held"]
    assert maximum["failed"] == held["failed"] == 0
    assert held["asked_per_second"] == pytest.approx(0.7 * maximum["per_second"], abs=0.1)
    assert held["requests"] == pytest.approx(6 * held["asked_per_second"], abs=3)
    assert held["changes"] == VERSIONS - 1
    assert held["steps_served"] == [2, 2 * VERSIONS]
    assert 0 < held["after_changes"]["p50_ms"] <= held["after_changes"]["p99_ms"] <= held["max_ms"]
