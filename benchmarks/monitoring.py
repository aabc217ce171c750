"""Debian's Prometheus scrapes a training: are all metrics there, and do they agree with the files of the run?

    python benchmarks/monitoring.py prometheus [--minutes 5] [--prometheus /usr/bin/prometheus] [--out FILE.json]
    python benchmarks/monitoring.py overhead [--blocks 12] [--steps 40] [--out FILE.json]

`prometheus`: two ranks train a model with dynamic items for some minutes, and rank 0 is killed halfway. Prometheus
scrapes every second on the loopback interface. Then every documented metric must have samples, all samples must equal
the entries of `metrics.jsonl` and the intervals of the profile at their time, and every query of the dashboard must
answer. The minutes begin with the first entry.

`overhead`: blocks of the same steps of one training, in turn without metrics, without again, and with the server, a
scrape per second and the file. The first two give the range of the measurement: least, quartiles and most of the ratios
to the first. Also: microseconds per entry and per scrape.
"""

import argparse
import itertools
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import record
from freescale.bubbles.records import read_intervals
from freescale.bubbles.summary import mean_over_ranks
from freescale.config import FeatureConfig, resolve, save
from freescale.data import synthetic
from freescale.data.batch import Batch
from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.metric_sinks import MonitoringOptions
from freescale.train.metrics_logger import read_entries
from freescale.train.prometheus import METRICS, PrometheusSink
from freescale.train.trainer import Trainer
from freescale.transport.world import World
from processes import on_ranks

DASHBOARD = Path(__file__).parents[1] / "docs" / "how-to" / "grafana-dashboard.json"
ROUNDED = 6e-8
"""Seconds: intervals are stored with 4 digits of a millisecond."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


class Prometheus:
    """Debian's Prometheus on the loopback interface."""

    def __init__(self, binary: str, folder: Path, target: str) -> None:
        scrape = {"job_name": "freescale", "static_configs": [{"targets": [target]}]}
        settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        self.address = f"127.0.0.1:{free_port()}"
        words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
        self._log = (folder / "prometheus.log").open("w")
        command = [binary, *words, f"--web.listen-address={self.address}"]
        self.process = subprocess.Popen(command, stderr=self._log, stdout=self._log)

    def ask(self, path: str, **words: Any) -> list[dict[str, Any]]:
        answer = json.loads(fetch(f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(words)}"))
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def samples(self, metric: str, seconds: float) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return every series of a metric: its labels, and its samples as scraped."""
        series = self.ask("query", query=f"freescale_{metric}[{int(seconds)}s]")
        return [(one["metric"], [(at, float(value)) for at, value in one["values"]]) for one in series]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


def train(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start the training of the config in a folder."""
    command = [sys.executable, "-m", "freescale", "train", str(folder / "run.toml"), "--out", str(folder / "run")]
    with (folder / "train.log").open("ab") as log:
        return subprocess.Popen([*command, "--nproc", "2", "--quiet", *words], stdout=log, stderr=log)


def write_config(folder: Path) -> None:
    """Write the data and the config of a training that is longer than the measurement."""
    synthetic.write_log(folder / "data", "ml1m", users=600, catalogue=4000)
    # Intervals of the profile are 16 steps, or a thousandth of the run if that is more.
    config = resolve("tiny", ["--data.path", str(folder / "data"), "--train.max-steps", "16000"])
    longer = replace(config.train, epochs=10**5, evaluate_every=4, save_every=50)
    features = {"item": FeatureConfig(ids="dynamic", rows=16_384, eviction="lru")}
    save(replace(config, train=longer, features=features), folder / "run.toml")


def scraped_run(binary: str, minutes: float, folder: Path) -> dict[str, Any]:
    """Train under Prometheus; return what was found."""
    write_config(folder)
    port, file = free_port(), folder / "run.prom"
    prometheus = Prometheus(binary, folder, f"127.0.0.1:{port}")
    began = time.time()
    training = train(folder, "--metrics-address", str(port), "--metrics-file", str(file))
    entries: dict[float, dict[str, Any]] = {}
    listening, killed, torn, first = set(), False, 0, 0.0
    try:
        while not first or time.time() < first + 60 * minutes:
            time.sleep(0.5)
            assert training.poll() is None, (folder / "train.log").read_text()[-2000:]
            first = first or (time.time() if any(entry["kind"] == "train" for entry in entries.values()) else 0.0)
            entries |= {entry["time"]: entry for entry in read_entries(folder / "run") if entry["kind"] != "rewind"}
            text = file.read_text() if file.exists() else "freescale_steps\n"
            torn += not text.endswith("\n") or "freescale_steps" not in text
            serving = [process for process in ranks(training.pid) if listeners(process, port)]
            listening |= {one.laddr.ip for process in serving for one in listeners(process, port)}
            if serving and first and not killed and time.time() > first + 30 * minutes:
                serving[0].kill()
                killed = True
        found = check(prometheus, entries, folder / "run", time.time() - began + 5)
        return found | {"listened_on": sorted(listening), "torn_files": torn, "minutes": minutes}
    finally:
        training.send_signal(signal.SIGTERM)
        training.wait(120)
        prometheus.close()


def ranks(launcher: int) -> list[psutil.Process]:
    return psutil.Process(launcher).children(recursive=True)


def listeners(process: psutil.Process, port: int) -> list[Any]:
    """Return the sockets of a process that listen on a port."""
    try:
        sockets = process.net_connections("tcp")
    except psutil.Error:
        return []
    return [one for one in sockets if one.status == "LISTEN" and one.laddr.port == port]


def check(prometheus: Prometheus, entries: dict[float, dict[str, Any]], run: Path, seconds: float) -> dict[str, Any]:
    """Compare what Prometheus has with the files of the run."""
    found = {metric.name: prometheus.samples(metric.name, seconds) for metric in METRICS}
    missing = [name for name, series in found.items() if not series]
    ((_, times),) = found["entry_time_seconds"]
    entry_at = dict(times)
    compared, different = 0, []
    for name, labels, at, value in (
        (name, labels, at, value) for name, series in found.items() for labels, values in series for at, value in values
    ):
        expected = expected_value(name, labels, entry_at.get(at, 0.0), entries)
        if expected is not None:
            compared += 1
            if value not in expected and not (value != value and any(one != one for one in expected)):
                different.append([name, labels, at, value, expected])
    intervals = [mean_over_ranks([interval]) for interval in read_intervals(run)]
    of_causes = [(labels["cause"], value) for labels, values in found["cause_seconds"] for _, value in values]
    known = {cause: {one[cause] / 1e3 for one in intervals} for cause, _ in of_causes}
    apart = [min(abs(value - one) for one in known[cause]) for cause, value in of_causes]
    queries = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    now, silent = time.time(), []
    for query in queries:
        asked = query.replace("$run", ".*")
        if not prometheus.ask("query_range", query=asked, start=now - seconds, end=now, step=5):
            silent.append(query)
    return {
        "metrics": len(METRICS),
        "missing": missing,
        "samples": sum(len(values) for series in found.values() for _, values in series),
        "samples_compared_with_entries": compared,
        "samples_that_differ": len(different),
        "examples": different[:3],
        "samples_compared_with_intervals": len(apart),
        "farthest_from_an_interval_seconds": max(apart),
        "within_rounding": sum(one <= ROUNDED for one in apart),
        "queries": len(queries),
        "queries_without_answer": silent,
        "restarts": max(value for _, values in found["restarts"] for _, value in values),
        "steps": max(value for _, values in found["step"] for _, value in values),
    }


def expected_value(
    name: str, labels: dict[str, str], at: float, entries: dict[float, dict[str, Any]]
) -> list[float] | None:
    """Return what a metric has to be after the entry of a time, by the files; None where no entry states it."""
    before = [entry for when, entry in sorted(entries.items()) if when <= at]
    of_train = [entry for entry in before if entry["kind"] == "train"][-1:]
    metric = next(metric for metric in METRICS if metric.name == name)
    if metric.entry:
        place = {"max": 1, "tables": 1, "after": 1}.get(labels.get(metric.labels[0], ""), 0) if metric.labels else 0
        return [float(entry[metric.entry[place]]) for entry in of_train]
    if name in ("table_load_ratio", "table_ids"):
        key = f"ids/{labels['table']}/{labels.get('change', 'load')}"
        return [float(entry[key]) for entry in of_train]
    if name == "quality":
        return [entry[labels["metric"]] for entry in before if entry["kind"] == "evaluate"][-1:]
    counted = {"starts": "start", "restarts": "recovery"}.get(name)
    if counted is not None:
        return [float(sum(entry["kind"] == counted for entry in before))]
    if name == "step":
        return [float(entry["step"]) for entry in before[-1:]]
    return None


class Turns:
    """Batches for the trainer: the same ones in every block, in turn without sinks, without again, and with them."""

    def __init__(self, loader: Loader, count: int, blocks: int) -> None:
        self._loader, self._blocks = loader, blocks
        self._batches: list[Batch] = [batch for batch, _ in zip(loader, range(count), strict=False)]
        self.begin: Callable[[str], None] = lambda _: None
        """Called with the kind of a block before it begins."""
        self.seconds: dict[str, list[tuple[float, float]]] = {"without": [], "without again": [], "with": []}
        """CPU and wall seconds of each block."""

    def __len__(self) -> int:
        return len(self._batches) * self._blocks * len(self.seconds)

    def __iter__(self) -> Iterator[Batch]:
        for _, (kind, found) in itertools.product(range(self._blocks), self.seconds.items()):
            self.begin(kind)
            cpu, wall = time.process_time(), time.perf_counter()
            yield from self._batches
            found.append((time.process_time() - cpu, time.perf_counter() - wall))

    def state_dict(self) -> dict[str, int | str]:
        """As the loader's."""
        return self._loader.state_dict()

    def report(self) -> list[str]:
        """Return no lines."""
        return []


def on_rank(world: World, folder: str, blocks: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Train in turns; rank 0 has the sinks, and is scraped once per second while it has them."""
    words = ["--data.path", f"{folder}/data", "--train.save-every", str(10**9), "--train.max-steps", "0"]
    config = resolve("tiny", [*words, "--data.split", "none", "--tables.overlap", "on"])
    source = Turns(Loader.from_run(config, rank=world.rank, world_size=world.world_size), steps, blocks)
    trainer = build(config, world, Path(folder) / "run", quiet=True)
    parts, metrics = replace(trainer.components, loader=source, steps=len(source)), trainer._metrics  # type: ignore[arg-type]
    scraper: subprocess.Popen[bytes] | None = None
    if world.is_rank_zero:
        port = free_port()
        options = MonitoringOptions(metrics_address=str(port), metrics_file=Path(folder) / "run.prom")
        sinks = options.open(Path(folder) / "run", config, steps=len(source))
        scrape = f"u.urlopen('http://127.0.0.1:{port}/metrics').read()"
        loop = f"import time, urllib.request as u\nwhile 1: {scrape}; time.sleep(1)"
        process = scraper = subprocess.Popen([sys.executable, "-c", loop])

        def begin(kind: str) -> None:
            metrics._sinks = sinks if kind == "with" else []
            process.send_signal(signal.SIGCONT if kind == "with" else signal.SIGSTOP)

        source.begin = begin
    Trainer(parts, Path(folder) / "run", metrics).fit()
    if scraper is not None:
        scraper.kill()
        scraper.wait()
    return source.seconds


def overhead(blocks: int, steps: int, folder: Path) -> dict[str, Any]:
    """Return the ratios of blocks with metrics, and of equal blocks without, to those without."""
    synthetic.write_log(folder / "data", "ml1m", users=64 * steps, catalogue=20_000)
    seconds = on_ranks(on_rank, 2, str(folder), blocks, steps)
    found: dict[str, Any] = {"ranks": 2, "blocks": blocks, "steps_per_block": steps, "log_every": 10}
    for place, clock in enumerate(("cpu", "wall")):
        base, again, scraped = ([block[place] for block in of[1:]] for of in seconds.values())
        for name, of in (("again", again), ("with", scraped)):
            ratios = [one / other for one, other in zip(of, base, strict=True)]
            quartiles = statistics.quantiles(ratios, n=4)
            found[f"{clock}_{name}_over_without"] = [round(one, 4) for one in (min(ratios), *quartiles, max(ratios))]
        found[f"{clock}_milliseconds_per_step"] = round(1e3 * statistics.median(base) / steps, 3)
    return found | {"microseconds": microseconds(folder / "run", folder)}


def microseconds(run: Path, folder: Path) -> dict[str, float]:
    """Return what an entry takes on the thread of the training, and a scrape of another process."""
    entry = next(entry for entry in read_entries(run) if entry["kind"] == "train")
    port = free_port()
    served = PrometheusSink(run, steps=10, address=str(port))
    written = PrometheusSink(run, steps=10, file=folder / "timed.prom")
    found = {
        "entry_with_server": timed(lambda: served.write(entry), 500),
        "entry_with_file": timed(lambda: written.write(entry), 500),
        "scrape": timed(lambda: fetch(f"http://127.0.0.1:{port}/metrics"), 100),
    }
    served.close()
    return found


def timed(run: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        run()
    return round(1e6 * (time.perf_counter() - began) / times, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["prometheus", "overhead"])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--prometheus", default="/usr/bin/prometheus")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.part == "overhead":
            result = overhead(options.blocks, options.steps, Path(place))
        else:
            result = scraped_run(options.prometheus, options.minutes, Path(place))
    print(json.dumps(result, indent=1))
    record.save(options.out, [result])


if __name__ == "__main__":
    main()
