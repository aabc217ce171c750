"""A data set in an object store, with errors, delays and truncated answers, trains as one on the local disk."""

import csv
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from freescale.checkpoint.checkpoints import complete_checkpoints
from freescale.config import DataConfig, ModelConfig, RunConfig, TaskConfig, TrainConfig, save
from freescale.data.partitions import PARTITIONS_FILE
from tests.support.faulty_http import FAULTS, FaultyProxy

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.whole  # it installs the packages of requirements/s3.txt first


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    packages = tmp_path_factory.mktemp("s3")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages]
    subprocess.run([*command, "-r", ROOT / "requirements" / "s3.txt"], check=True)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    return {**os.environ, **keys, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(packages)])}


@pytest.fixture(scope="module")
def store(environment: dict[str, str]) -> Iterator[int]:
    """The port of an S3 server with a bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        words = f"import s3fs; s3fs.S3FileSystem(endpoint_url='http://127.0.0.1:{port}').mkdir('logs')"
        subprocess.run([sys.executable, "-c", words], env=environment, check=True)
        yield port
    finally:
        server.kill()
        server.wait()


def freescale(environment: dict[str, str], *words: object) -> None:
    subprocess.run([sys.executable, "-m", "freescale", *map(str, words), "--quiet"], env=environment, check=True)


def append_and_train(folder: Path, address: str, environment: dict[str, str]) -> None:
    """Append three partitions and train after each of them."""
    data = DataConfig(path=address, order="log", split="none", global_batch=32, max_history=20)
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
            environment, "data", "import", "events", folder / "log.csv", address, "--append", f"date={day}", *words
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
        through = environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        append_and_train(tmp_path / "remote", "s3://logs/stream", through)
        for name in ("local", "remote"):
            freescale(through, "predict", tmp_path / name / "run", tmp_path / name / "top", "--k", 5)
    finally:
        proxy.close()
    assert sum(proxy.counts.values()) == 10
    assert set(proxy.counts) == set(FAULTS)
    words = f"import s3fs, sys; s3fs.S3FileSystem().get('logs/stream/{PARTITIONS_FILE}', sys.argv[1])"
    direct = environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{store}"}
    subprocess.run([sys.executable, "-c", words, tmp_path / "got.json"], env=direct, check=True)
    assert (tmp_path / "got.json").read_bytes() == (tmp_path / "local" / "stream" / PARTITIONS_FILE).read_bytes()
    tables = [pq.read_table(tmp_path / name / "top") for name in ("local", "remote")]
    assert tables[0].equals(tables[1])
    assert tables[0]["item"].combine_chunks().flatten()[0].as_py().startswith("item "), "keys, not numbers"
    local, remote = (complete_checkpoints(tmp_path / name / "run" / "checkpoints")[-1] for name in ("local", "remote"))
    assert (local / "rank-00000.bytes").read_bytes() == (remote / "rank-00000.bytes").read_bytes()
