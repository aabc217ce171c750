"""Training on a data set that grows: each partition once, in order, evaluated before it is trained."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.checkpoint.checkpoints import complete_checkpoints
from freescale.cli.main import main
from freescale.config import (
    DataConfig,
    FeatureConfig,
    ModelConfig,
    RunConfig,
    TablesConfig,
    TaskConfig,
    TrainConfig,
    save,
)
from freescale.data.dataset import Dataset
from freescale.data.loader import Loader
from freescale.data.partitions import IS_TARGET
from freescale.errors import NOTHING_NEW, GuardError
from freescale.models.retrieval import Retrieval
from tests.support.in_process import freescale

PARTITIONS = [f"date=2020-01-0{day}" for day in range(1, 5)]
FREESCALE = [sys.executable, "-m", "freescale"]


def append(
    folder: Path, name: str, *, first_item: int = 0, events: int = 600, first_users: tuple[int, ...] = (0,)
) -> None:
    """Append a day in which users go through the items in order. `first_users`: of each group of 60 users."""
    day = int(name[-1])
    rng = np.random.default_rng(day)
    user, at = rng.integers(0, 60, events), np.sort(rng.integers(0, 80_000, events))
    items = first_item + (user * 7 + at // 4_000) % 50
    seconds = (1_600_000_000 + day * 86_400 + at).tolist()
    rows = [row for first in first_users for row in zip((first + user).tolist(), items.tolist(), seconds, strict=True)]
    path = folder.parent / f"{folder.name}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("user_id", "item_id", "timestamp"), *rows])
    words = ["data", "import", "events", str(path), str(folder), "--append", name, "--quiet"]
    assert main([*words, *(["--raw-ids", "item_id", "--max-history", "20"] if day == 1 else [])]) == 0


def config_file(folder: Path, **train: object) -> Path:
    config = RunConfig(
        seed=2,
        data=DataConfig(
            path=str(folder), order="log", split="none", global_batch=24, shards=8, max_history=20, workers=0
        ),
        model=ModelConfig(dim=8, layers=1),
        task=TaskConfig(negatives=8, seen="allow"),
        features={"item": FeatureConfig(ids="dynamic", rows=256, eviction="lru")},
        tables=TablesConfig(lr=0.2),
        train=TrainConfig(lr=0.01, log_every=5, **train),  # type: ignore[arg-type]
    )
    path = folder.with_suffix(".toml")
    save(config, path)
    return path


def weights(run: Path) -> bytes:
    """The bytes of the newest checkpoint: weights, optimizer state and slots."""
    newest = complete_checkpoints(run / "checkpoints")[-1]
    return b"".join(path.read_bytes() for path in sorted(newest.glob("*.bytes")))


def entries(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k != "time"} for entry in found if entry["kind"] == kind]


def train(toml: Path, run: Path, *words: str) -> int:
    return freescale(["train", str(toml), "--out", str(run), "--restarts", "0", "--quiet", *words])


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all partitions in `stream`, and a run that trained them by one command."""
    folder = tmp_path_factory.mktemp("replayed")
    for name in PARTITIONS:
        append(folder / "stream", name)
    assert train(config_file(folder / "stream"), folder / "run", "--until", "now") == 0
    return folder


def test_partitions_trained_as_they_arrive_give_the_weights_of_one_replay(replayed: Path, tmp_path: Path) -> None:
    stream, run = tmp_path / "stream", tmp_path / "run"
    for number, name in enumerate(PARTITIONS):
        append(stream, name)
        toml = config_file(stream)
        if number != 1:  # the second one waits for the third
            assert train(toml, run, "--until", "now") == 0
            assert train(toml, run, "--until", "now") == NOTHING_NEW
            assert train(toml, run, "--until", PARTITIONS[0]) == NOTHING_NEW
    assert weights(run) == weights(replayed / "run")
    assert entries(run, "validate") == entries(replayed / "run", "validate")
    assert [entry["partition"] for entry in entries(run, "validate")] == PARTITIONS
    hits = [entry["hr@10"] for entry in entries(run, "validate")]
    assert hits[-1] > 2 * hits[0], "training helps the next partition"


def test_a_partition_is_evaluated_for_new_users_and_known_items_too(replayed: Path, tmp_path: Path) -> None:
    def validate_after(name: str, **options: Any) -> dict[str, Any]:
        stream, run = (Path(shutil.copytree(replayed / part, tmp_path / name / part)) for part in ("stream", "run"))
        append(stream, "date=2020-01-05", **options)
        assert train(config_file(stream), run, "--until", "now") == 0
        return entries(run, "validate")[-1]

    first, *others = entries(replayed / "run", "validate")
    assert first["hr@10/new_users"] == first["hr@10"]
    assert first["unknown_targets"] == 1.0
    assert "hr@10/known_items" not in first
    assert not any("hr@10/new_users" in entry for entry in others), "all users have events on the first day"
    assert all(entry["hr@10/known_items"] == entry["hr@10"] > 0 for entry in others)
    new = validate_after("new", first_users=(60,))
    both = validate_after("both", first_users=(0, 60))
    assert new["samples"] < both["samples"]
    assert new["hr@10"] == new["hr@10/new_users"] == both["hr@10/new_users"] != both["hr@10"]
    unknown = validate_after("unknown", first_item=25)
    assert 0.2 < unknown["unknown_targets"] < 0.8
    hits = unknown["hr@10/known_items"] * (1 - unknown["unknown_targets"])
    assert hits == pytest.approx(unknown["hr@10"]), "items without a row cannot be hit"


def test_until_a_date_trains_no_later_partition(replayed: Path, tmp_path: Path) -> None:
    toml = replayed / "stream.toml"
    assert train(toml, tmp_path / "run", "--until", "2020-01-02") == 0
    assert [entry["partition"] for entry in entries(tmp_path / "run", "validate")] == PARTITIONS[:2]
    assert train(toml, tmp_path / "run", "--until", "date=2020-01-04") == 0
    assert weights(tmp_path / "run") == weights(replayed / "run")


def test_every_event_that_has_one_before_it_has_a_loss_once(replayed: Path) -> None:
    stream = replayed / "stream"
    config = RunConfig(
        data=DataConfig(path=str(stream), order="log", split="none", global_batch=24, max_history=20),
        model=ModelConfig(dim=8, layers=1),
    )
    model, terms, first = Retrieval(config, items=50), 0, 0
    loader = Loader(config.data, seed=0)
    for batch in loader:
        terms += model.prepare(batch).count
        first += int((batch.history[IS_TARGET][batch.history.offsets[:-1]] == 1).sum())
    partitioned = Dataset(str(stream)).partitioned
    assert partitioned is not None
    assert terms + first == sum(one.targets for one in partitioned.partitions)
    assert first == 60, "the first event of each user"
    names = [one.name for one in partitioned.partitions]
    ends = np.cumsum([one.manifest.rows for one in partitioned.partitions]).tolist()
    for step, name in loader.partitions.items():
        assert loader.cursor.span(step)[0] == [0, *ends][names.index(name)], "no step spans two partitions"


def test_the_guard_stops_before_a_partition_that_the_model_fails_on(tmp_path: Path) -> None:
    stream, run = tmp_path / "stream", tmp_path / "run"
    for name in PARTITIONS[:3]:
        append(stream, name)
    assert train(config_file(stream, guard_metric="hr@10"), run, "--until", "now") == 0
    before = weights(run)
    append(stream, PARTITIONS[3], first_item=1000)
    toml = config_file(stream, guard_metric="hr@10", guard_drop=0.2)
    assert train(toml, run, "--until", "now") == GuardError.exit_code
    assert train(toml, run, "--until", "now") == GuardError.exit_code
    assert weights(run) == before, "nothing was trained"
    assert train(config_file(stream, guard_metric="hr@10", guard_drop=1.0), run, "--until", "now") == 0
    assert train(config_file(stream, guard_metric="hr@11"), tmp_path / "other", "--until", "now") == 2


def test_a_config_that_cannot_continue_is_refused(replayed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml, run = replayed / "stream.toml", replayed / "refused"
    for words, error in [
        (["--data.order", "shuffle"], "data.order must be 'log' with --until"),
        (["--train.decay", "linear"], "train.decay must be 'none' with --until"),
        (["--data.max-history", "10"], "set data.max_history to 20 or more"),
        (["--until", "2019"], "there is no partition up to 2019"),
    ]:
        capsys.readouterr()
        assert train(toml, run, "--until", "now", *words) in (2, 3)
        assert error in capsys.readouterr().err


def test_a_run_that_is_killed_ends_with_the_weights_of_an_undisturbed_one(
    replayed: Path, tmp_path: Path, whole_form: bool
) -> None:
    toml, rng, ranks = replayed / "stream.toml", np.random.default_rng(1), 2 if whole_form else 1
    words = ["--nproc", str(ranks), "--restarts", "0", "--until", "now", "--quiet", "--train.save-every", "3"]

    def command(run: Path) -> list[str]:
        return [*FREESCALE, "train", str(toml), "--out", str(run), *words]

    undisturbed = replayed / "run"
    if whole_form:
        undisturbed = tmp_path / "undisturbed"
        assert subprocess.run(command(undisturbed), check=False).returncode == 0
    for _ in range(20 if whole_form else 1):
        process = subprocess.Popen(command(tmp_path / "run"), start_new_session=True)
        wait_for_file(tmp_path / "run" / "metrics.jsonl", process)
        time.sleep(rng.random() * 1.5)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert subprocess.run(command(tmp_path / "run"), check=False).returncode in (0, NOTHING_NEW)
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert entries(tmp_path / "run", "validate") == entries(undisturbed, "validate")


def wait_for_file(path: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
