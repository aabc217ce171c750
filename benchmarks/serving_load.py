"""Measures the FastAPI example under load on loopback: its maximum, and latencies at 70% of it while versions change.

    python benchmarks/serving_load.py [--format pt2] [--seconds 300] [--maximum-seconds 20] [--clients 8]
                                      [--every 10] [--out FILE.json]

The server of `examples/serve_http.py` runs in a process of its own with the recipe `tiny`. Clients are threads of this
process with a connection each. First they ask without a pause: the answers per second are the maximum. Then requests
start at fixed times, at 70% of that rate, and a latency counts from the time at which its request should have started.
Every `--every` seconds the server finds a new version, each of which was published after two more steps of training:
latencies within two seconds after a change are reported apart.
"""

import argparse
import http.client
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import record
from freescale.config import RECIPES
from freescale.data.loader import Loader
from freescale.serving.package import Format
from freescale.serving.publish import publish
from freescale.train.build import build
from freescale.train.sharded_model import ShardedModel
from freescale.train.step import LearningRates
from freescale.train.trained_model import TrainedModel
from freescale.transport.world import destroy_world, init_world

ROOT = Path(__file__).parents[1]
SHARE = 0.7
AFTER_CHANGE = 2.0
"""Seconds after a change of version in which latencies are counted apart."""


def publish_versions(place: Path, form: Format, count: int) -> Path:
    """Train the recipe, and publish a version after every two steps; return their folder."""
    words = ["data", "synth", "--users", "2000", "--items", "10000", place / "data"]
    subprocess.run([sys.executable, "-m", "freescale", *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    config = RECIPES["tiny"]
    config = replace(config, data=replace(config.data, path=str(place / "data")))
    world = init_world(timeout=60)
    parts, loader = build(config, world, place / "run", quiet=True).components, Loader.from_run(config)
    batches = iter(loader)
    for version in range(count):
        for batch in itertools.islice(batches, 2):
            parts.step.run(batch, LearningRates(dense=config.train.lr, tables=config.tables.lr))
        parts.step.synchronize()
        sharded = ShardedModel(parts.module, parts.tables, [])
        trained = TrainedModel(config, world, sharded, loader.vocabulary.items, 2 + 2 * version)
        publish(trained, str(place / "published"), form, full_every=24)
    destroy_world()
    return place / "published"


class Changes(threading.Thread):
    """Offers a server one published version after the other."""

    def __init__(self, published: Path, offered: Path, every: float) -> None:
        super().__init__(daemon=True)
        self._published, self._offered, self._every = published, offered, every
        self._names, self._full = sorted(path.name for path in published.glob("v*")), 0
        self.times: list[float] = []
        self._ended = threading.Event()
        self.offer(0)

    def offer(self, version: int) -> None:
        """Copy a version, then name it in LATEST, as `publish` does."""
        shutil.copytree(self._published / self._names[version], self._offered / self._names[version])
        if (self._offered / self._names[version] / "serving.json").exists():
            self._full = version
        latest = self._offered / "LATEST"
        latest.with_suffix(".new").write_text(json.dumps({"version": version, "full": self._full}))
        latest.with_suffix(".new").replace(latest)

    def run(self) -> None:
        """Offer the next version every few seconds."""
        for version in range(1, len(self._names)):
            if self._ended.wait(self._every):
                return
            self.times.append(time.perf_counter())
            self.offer(version)

    @property
    def newest_step(self) -> int:
        """Return the step of the newest version that was offered."""
        newest = self._offered / self._names[len(self.times)] / "version.json"
        return int(json.loads(newest.read_text())["step"])

    def end(self) -> None:
        """Offer no more versions."""
        self._ended.set()
        self.join()


def random_requests(model: Path, seed: int) -> list[str]:
    """Return requests as JSON: of random lengths, or the example of a model that reads features."""
    facts, rng = json.loads((model / "serving.json").read_text()), np.random.default_rng(seed)
    columns = {column["column"]: column for column in facts["programs"]["query"].values()}
    if columns.keys() != {"item_id", "timestamp", "time"}:
        return [json.dumps([facts["example"]["request"]])]
    lengths = rng.integers(1, columns["item_id"]["most"][0] + 1, 64).tolist()
    events = [(rng.integers(0, 10_000, n).tolist(), np.sort(rng.integers(0, 10**7, n)).tolist()) for n in lengths]
    return [json.dumps([{"item_id": items, "timestamp": times}]) for items, times in events]


class Client:
    """A connection that asks requests in turn."""

    def __init__(self, address: str, bodies: list[str]) -> None:
        self._connection, self._bodies = http.client.HTTPConnection(address), bodies
        self._next, self.failed = 0, 0
        self.latencies: list[float] = []
        self.due: list[float] = []

    def ask(self, began: float) -> None:
        """Ask once. `began`: when the request was due."""
        self._next += 1
        try:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", "/recommend", self._bodies[self._next % len(self._bodies)], headers)
            answered = self._connection.getresponse()
            found = json.loads(answered.read())
            self.failed += answered.status != 200 or not found[0]["item_id"]
        except (OSError, http.client.HTTPException):
            self.failed += 1
            self._connection.close()
        self.latencies.append(time.perf_counter() - began)
        self.due.append(began)


def measure(
    address: str, bodies: list[list[str]], seconds: float, rate: float = 0.0, changes: Changes | None = None
) -> dict[str, Any]:
    """Return answers per second and percentiles of latency, with one client for each list of requests.

    `rate`: requests per second of all clients; 0: no pause. `changes`: offers versions meanwhile.
    """
    every, clients = [Client(address, of_client) for of_client in bodies], len(bodies)
    began = time.perf_counter()

    def work(client: Client, number: int) -> None:
        due = began + (number / rate if rate else 0)
        while due < began + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            client.ask(due if rate else time.perf_counter())
            due = due + clients / rate if rate else time.perf_counter()

    threads = [threading.Thread(target=work, args=(client, number)) for number, client in enumerate(every)]
    for thread in [*threads, *([changes] if changes else [])]:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - began
    latencies = 1e3 * np.concatenate([client.latencies for client in every])
    found = {
        "clients": clients,
        "requests": len(latencies),
        "failed": sum(client.failed for client in every),
        "per_second": round(len(latencies) / spent, 1),
        "asked_per_second": round(rate, 1),
        **percentiles(latencies),
    }
    if changes is None:
        return found
    changes.end()
    since = np.concatenate([client.due for client in every])[:, None] - np.array([-np.inf, *changes.times])
    during = np.where(since >= 0, since, np.inf).min(1) < AFTER_CHANGE
    apart = {"between_changes": percentiles(latencies[~during]), "after_changes": percentiles(latencies[during])}
    return found | {"changes": len(changes.times), **apart}


def percentiles(latencies: NDArray[np.float64]) -> dict[str, float]:
    """Return percentiles of latencies in milliseconds."""
    if not len(latencies):
        return {}
    found = {f"p{q}_ms": round(float(np.percentile(latencies, q)), 2) for q in (50, 90, 99, 99.9)}
    return found | {"max_ms": round(float(latencies.max()), 2)}


def wait_for_version(address: str, step: int) -> int:
    """Wait until the version of a step answers, for half a minute at most; return the step of the one that does."""
    deadline = time.perf_counter() + 30
    while version_of(address) != step and time.perf_counter() < deadline:
        time.sleep(0.2)
    return version_of(address)


def version_of(address: str) -> int:
    """Return the step of the version that answers."""
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/version")
    return int(json.loads(connection.getresponse().read())["step"])


def serve(model: Path, versions: Path) -> "tuple[subprocess.Popen[str], str]":
    """Start the example; return its process and its address."""
    command = [sys.executable, str(ROOT / "examples" / "serve_http.py"), str(model), "--follow", str(versions)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    return server, server.stdout.readline().strip().removeprefix("http://")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["pt2", "aoti"], default="pt2")
    parser.add_argument("--published", type=Path, help="a folder of versions; else they are made")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--maximum-seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place, count = Path(temporary), int(options.seconds / options.every) + 1
        published = options.published or publish_versions(place, options.format, count)
        (place / "offered").mkdir()
        changes = Changes(published, place / "offered", options.every)
        model = published / "v000000"
        bodies = [random_requests(model, seed) for seed in range(options.clients)]
        server, address = serve(model, place / "offered")
        try:
            measure(address, bodies, min(2.0, options.maximum_seconds))  # warms up
            maximum = measure(address, bodies, options.maximum_seconds)
            first = version_of(address)
            held = measure(address, bodies, options.seconds, SHARE * maximum["per_second"], changes)
            held["steps_served"] = [first, wait_for_version(address, changes.newest_step)]
        finally:
            server.kill()
            server.wait()
    result = {"format": options.format, "maximum": maximum, "held": held}
    print(json.dumps(result, indent=1))
    record.save(options.out, [result])


if __name__ == "__main__":
    main()
