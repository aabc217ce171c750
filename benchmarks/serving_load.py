"""Measures the FastAPI example under load on loopback: its maximum, and latencies at 70% of it.

    python benchmarks/serving_load.py [--format pt2] [--seconds 300] [--maximum-seconds 20] [--clients 8]
                                      [--model FOLDER] [--out FILE.json]

The server of `examples/serve_http.py` runs in a process of its own with the recipe `tiny`. Clients are threads of this
process with a connection each. First they ask without a pause: the answers per second are the maximum. Then requests
start at fixed times, at 70% of that rate, and a latency counts from the time at which its request should have started.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import record

ROOT = Path(__file__).parents[1]
SHARE = 0.7


def export_model(place: Path, form: str) -> Path:
    """Train the recipe for a moment and export it."""
    for words in (
        "data synth --users 2000 --items 10000 data",
        "train tiny --data data --out run --train.max-steps 2 --quiet",
        f"export run model --format {form} --quiet",
    ):
        command = [sys.executable, "-m", "freescale", *words.split()]
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
    return place / "model"


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


def measure(address: str, bodies: list[list[str]], seconds: float, rate: float = 0.0) -> dict[str, Any]:
    """Return answers per second and percentiles of latency, with one client for each list of requests.

    `rate`: requests per second of all clients; 0: no pause.
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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    latencies = 1e3 * np.concatenate([client.latencies for client in every])
    percentiles = {f"p{q}_ms": round(float(np.percentile(latencies, q)), 2) for q in (50, 90, 99, 99.9)}
    spent = time.perf_counter() - began
    return {
        "clients": clients,
        "requests": len(latencies),
        "failed": sum(client.failed for client in every),
        "per_second": round(len(latencies) / spent, 1),
        "asked_per_second": round(rate, 1),
        **percentiles,
        "max_ms": round(float(latencies.max()), 2),
    }


def serve(model: Path) -> "tuple[subprocess.Popen[str], str]":
    """Start the example; return its process and its address."""
    command = [sys.executable, str(ROOT / "examples" / "serve_http.py"), str(model), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert server.stdout is not None
    return server, server.stdout.readline().strip().removeprefix("http://")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=["pt2", "aoti"], default="pt2")
    parser.add_argument("--model", type=Path, help="an exported folder; else one is made")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--maximum-seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or export_model(Path(folder), options.format)
        bodies = [random_requests(model, seed) for seed in range(options.clients)]
        server, address = serve(model)
        try:
            measure(address, bodies, min(2.0, options.maximum_seconds))  # warms up
            maximum = measure(address, bodies, options.maximum_seconds)
            held = measure(address, bodies, options.seconds, SHARE * maximum["per_second"])
        finally:
            server.kill()
            server.wait()
    result = {"format": options.format, "maximum": maximum, "held": held}
    print(json.dumps(result, indent=1))
    record.save(options.out, [result])


if __name__ == "__main__":
    main()
