"""A data set in an object store, with errors, delays and truncated answers, trains as one on the local disk."""

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from freescale.checkpoint.checkpoints import complete_checkpoints
from freescale.config import DataConfig, ModelConfig, RunConfig, TaskConfig, TrainConfig, save
from freescale.data.partitions import PARTITIONS_FILE
from tests.support.faulty_http import FAULTS, FaultyProxy
from tests.support.object_store import address, install_packages, object_store

pytestmark = pytest.mark.whole  # it installs the packages of requirements/s3.txt first


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install_packages(tmp_path_factory.mktemp("s3"))


@pytest.fixture(scope="module")
def store(environment: dict[str, str]) -> Iterator[int]:
    """The port of an S3 server with a bucket."""
    with object_store(environment) as port:
        yield port


def freescale(environment: dict[str, str], *words: object) -> None:
    subprocess.run([sys.executable, "-m", "freescale", *map(str, words), "--quiet"], env=environment, check=True)


def append_and_train(folder: Path, stream: str, environment: dict[str, str]) -> None:
    """Append three partitions and train after each of them."""
    data = DataConfig(path=stream, order="log", split="none", global_batch=32, max_history=20)
    small = {"model": ModelConfig(dim=8, layers=1), "task": TaskConfig(negatives=8, seen="allow")}
    save(RunConfig(data=data, train=TrainConfig(log_every=5), **small), folder / "run.toml")  # type: ignore[arg-type]
    for day in range(3):
        rng = np.random.default_rng(day)
        times = 1_600_000_000 + day * 86_400 + np.sort(rng.integers(0, 86_400, 500))
        items = [f"item {number}" for number in rng.integers(0, 60, 500)]
        rows = zip(rng.integers(0, 80, 500).tolist(), items, times.tolist(), strict=True)
        with (folder / "log.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("user_id", "item_id", "timestamp"), *rows])
        words = ["--max-history", "20"] if not day else []
        freescale(
            environment, "data", "import", "events", folder / "log.csv", stream, "--append", f"date={day}", *words
        )
        freescale(
            environment, "train", folder / "run.toml", "--out", folder / "run", "--until", "now", "--restarts", "0"
        )


def test_faults_of_the_store_change_nothing(environment: dict[str, str], store: int, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "remote").mkdir()
    append_and_train(tmp_path / "local", str(tmp_path / "local" / "stream"), environment)
    proxy = FaultyProxy(store, rate=0.03, most=10, seed=1)
    try:
        through = environment | {"AWS_ENDPOINT_URL": address(proxy.port)}
        append_and_train(tmp_path / "remote", "s3://logs/stream", through)
        for name in ("local", "remote"):
            freescale(through, "predict", tmp_path / name / "run", tmp_path / name / "top", "--k", 5)
    finally:
        proxy.close()
    assert sum(proxy.counts.values()) == 10
    assert set(proxy.counts) == set(FAULTS)
    words = f"import s3fs, sys; s3fs.S3FileSystem().get('logs/stream/{PARTITIONS_FILE}', sys.argv[1])"
    direct = environment | {"AWS_ENDPOINT_URL": address(store)}
    subprocess.run([sys.executable, "-c", words, tmp_path / "got.json"], env=direct, check=True)
    assert (tmp_path / "got.json").read_bytes() == (tmp_path / "local" / "stream" / PARTITIONS_FILE).read_bytes()
    tables = [pq.read_table(tmp_path / name / "top") for name in ("local", "remote")]
    assert tables[0].equals(tables[1])
    assert tables[0]["item"].combine_chunks().flatten()[0].as_py().startswith("item "), "keys, not numbers"
    local, remote = (complete_checkpoints(tmp_path / name / "run" / "checkpoints")[-1] for name in ("local", "remote"))
    assert (local / "rank-00000.bytes").read_bytes() == (remote / "rank-00000.bytes").read_bytes()
