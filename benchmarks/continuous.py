"""Replay a log as it would have arrived: append, validate, train, publish and serve, by the real commands.

    python benchmarks/continuous.py ml-1m.zip [--days 14] [--hourly 2] [--ranks 2] [--kills 20] [--faults 10]
                                    [--page FILE.html] [--out FILE.json]

Takes the busiest days of MovieLens-1M in partitions of 6 hours, of which some days in hours. Two replays, both by the
loop of `examples/continuous_loop.py`. One is undisturbed, on the local disk, and a server follows it. In the other the
data and the versions are in an object store with errors, delays and truncated answers, and commands are killed with
SIGKILL at random moments and started again. Their weights and published versions must be equal, bit for bit. Then a
model that was trained once, on the first half of the days, is evaluated on the days after it.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from examples.continuous_loop import HOUR, Events, Loop, TimedLoop, write_page
from tests.support.faulty_http import FaultyProxy
from tests.support.object_store import BUCKET, address, install_packages, object_store

import record
from freescale.checkpoint.checkpoints import complete_checkpoints
from freescale.data.dataset import Dataset
from freescale.data.partitions import IS_TARGET
from freescale.errors import NOTHING_NEW
from freescale.serving import serve
from freescale.serving.follow import Follower

DAY, ROWS = 86_400, 8192


class Partition(NamedTuple):
    """The events of one partition."""

    name: str
    events: pl.DataFrame

    def rows(self) -> Events:
        """Return the events as the loop takes them."""
        return list(self.events.iter_rows())


def busiest_days(log: Path, days: int) -> pl.DataFrame:
    """Return the events of the days in a row that have most of them."""
    with zipfile.ZipFile(log) as archive:
        name = next(member for member in archive.namelist() if member.endswith("ratings.dat"))
        fields = np.array([line.split("::") for line in archive.read(name).decode().split()], dtype=np.int64)
    events = pl.DataFrame({"user_id": fields[:, 0], "item_id": fields[:, 1], "timestamp": fields[:, 3]})
    per_day = np.bincount((fields[:, 3] - fields[:, 3].min() // DAY * DAY) // DAY)
    first = int(fields[:, 3].min()) // DAY + int(np.convolve(per_day, np.ones(days, int), "valid").argmax())
    return events.filter(pl.col("timestamp").is_between(first * DAY, (first + days) * DAY, closed="left"))


def cut(events: pl.DataFrame, hourly: int) -> list[Partition]:
    """Cut days into partitions of 6 hours, and the days in the middle into hours."""
    first, last = int(events["timestamp"].min()) // DAY, int(events["timestamp"].max()) // DAY  # type: ignore[arg-type]
    middle = range((first + last) // 2, (first + last) // 2 + hourly)
    bounds = [
        at
        for day in range(first, last + 1)
        for at in range(day * DAY, (day + 1) * DAY, HOUR if day in middle else 6 * HOUR)
    ]
    partitions = []
    for begin, end in pairwise([*bounds, (last + 1) * DAY]):
        inside = events.filter(pl.col("timestamp").is_between(begin, end, closed="left"))
        day = time.strftime("%Y-%m-%d", time.gmtime(begin))
        if len(inside):
            partitions.append(Partition(f"date={day}/hour={begin % DAY // HOUR:02d}", inside))
    return partitions


class Killer:
    """Runs commands, and kills some of them at random moments before it lets them end."""

    def __init__(self, kills: int, commands: int, environment: dict[str, str]) -> None:
        self._kills, self._left, self._environment = kills, commands, environment
        self._rng, self.killed = np.random.default_rng(3), Counter[str]()
        self._last = defaultdict[str, float](lambda: 10.0)

    def run(self, words: Sequence[Any]) -> None:
        """Run a command until it ends by itself."""
        command, name = [sys.executable, "-m", "freescale", *map(str, words), "--quiet"], words[0]
        while self._rng.random() < min(0.8, (self._kills - self.killed.total()) / max(1, self._left)):
            process = subprocess.Popen(command, env=self._environment, start_new_session=True)
            time.sleep(self._rng.random() * self._last[name])
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                self.killed[name] += 1
            process.wait()
        self._left -= 1
        began = time.perf_counter()
        code = subprocess.run(command, env=self._environment, check=False).returncode
        if code not in (0, NOTHING_NEW):
            raise SystemExit(f"{name} ended with exit code {code}")
        self._last[name] = time.perf_counter() - began


def replay_disturbed(folder: Path, partitions: list[Partition], options: argparse.Namespace) -> dict[str, Any]:
    """Replay in an object store with faults and kills; return what is compared with the undisturbed replay."""
    with tempfile.TemporaryDirectory() as packages:
        environment = install_packages(Path(packages))
        with object_store(environment) as port:
            proxy = FaultyProxy(port, rate=options.faults / (60 * len(partitions)), most=options.faults, seed=1)
            environment["AWS_ENDPOINT_URL"] = address(proxy.port)
            killer = Killer(options.kills, 3 * len(partitions), environment)
            loop = Loop(folder, ranks=options.ranks, rows=ROWS, addresses=f"s3://{BUCKET}", run=killer.run)
            for partition in partitions:
                loop.add(partition.name, partition.rows())
            proxy.close()
            get = f"import s3fs; s3fs.S3FileSystem().get('{BUCKET}/versions', '{folder}/versions', recursive=True)"
            direct = environment | {"AWS_ENDPOINT_URL": address(port)}
            subprocess.run([sys.executable, "-c", get], env=direct, check=True)
    found = {"kills": dict(killer.killed), "faults": dict(proxy.counts)}
    return found | {"weights": weights(loop), "served": served(str(folder / "versions")), "metrics": validated(loop)}


def weights(loop: Loop) -> list[bytes]:
    """Return all that the newest checkpoint holds."""
    newest = complete_checkpoints(loop.run / "checkpoints")[-1]
    return [path.read_bytes() for path in sorted(newest.glob("*.bytes"))]


def served(versions: str) -> dict[str, bytes]:
    """Return the weights of the newest version, as a server has them after all deltas."""
    follower = Follower(versions, serve)
    if not follower.poll():
        raise SystemExit(f"the newest version cannot be served: {follower.error}")
    model = follower.model
    rows = {f"{name}.ids": np.concatenate(slots) for name, slots in model.slots.items()}
    return {name: np.asarray(value).tobytes() for name, value in (model.weights | rows).items()}


def validated(loop: Loop) -> dict[str, dict[str, Any]]:
    """Return the metrics of each partition before it was trained."""
    entries = ({k: v for k, v in entry.items() if k != "time"} for entry in loop.metrics("validate"))
    return {entry["partition"]: entry for entry in entries}


def count_targets(stream: Path) -> Counter[tuple[int, int, int]]:
    """Return how often each event is a target."""
    rows = pl.read_parquet(stream / "date=*" / "hour=*" / "part-*.parquet", hive_partitioning=False)
    targets = rows.select("user_id", "item_id", "timestamp", IS_TARGET).explode("item_id", "timestamp", IS_TARGET)
    return Counter(targets.filter(pl.col(IS_TARGET) == 1).drop(IS_TARGET).iter_rows())


def evaluate_once_trained(run: Path, partitions: list[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of partitions by a model that trains no more."""
    from freescale.train.evaluation import build_validation
    from freescale.train.trained_model import load_config, load_trained_model
    from freescale.transport.world import destroy_world, init_world

    config, world = load_config(run), init_world(timeout=600)
    validate = build_validation(config, world, load_trained_model(run, config, world).sharded.module)
    found = {name: validate(name) for name in partitions}
    destroy_world()
    return found


def by_day(metrics: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return HR@10 of each day."""
    hits, samples = defaultdict[str, float](float), Counter[str]()
    for name, values in metrics.items():
        day = name.split("/")[0].removeprefix("date=")
        hits[day] += values["hr@10"] * values["samples"]
        samples[day] += int(values["samples"])
    return {day: round(hits[day] / max(1, samples[day]), 4) for day in hits}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--hourly", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("runs/continuous"))
    parser.add_argument("--page", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    partitions = cut(busiest_days(options.log, options.days), options.hourly)
    half = sorted({one.name.split("/")[0] for one in partitions})[options.days // 2 - 1]
    timed = TimedLoop(options.folder / "undisturbed", ranks=options.ranks, rows=ROWS)
    rounds = [timed.add(one.name, one.rows()) for one in partitions]
    loop = timed.loop

    once = options.folder / "once"
    words = ["train", loop.toml, "--out", once, "--until", f"{half}/hour=99", "--nproc", options.ranks, "--quiet"]
    subprocess.run([sys.executable, "-m", "freescale", *map(str, words)], check=True)
    later = [one.name for one in partitions if one.name.split("/")[0] > half]
    continued, trained_once = validated(loop), evaluate_once_trained(once, later)

    disturbed = replay_disturbed(options.folder / "disturbed", partitions, options)
    targets = count_targets(Path(loop.stream))
    events = Counter(event for one in partitions for event in one.rows())
    staleness = [one.staleness for one in rounds]
    result = {
        "events": sum(events.values()),
        "partitions": len(partitions),
        "targets": sum(targets.values()),
        "targets_twice": sum(count > 1 for count in targets.values()),
        "events_without_target": len(events.keys() - targets.keys()),
        "kills": disturbed["kills"],
        "faults": disturbed["faults"],
        "bitwise_weights": disturbed["weights"] == weights(loop),
        "bitwise_served": disturbed["served"] == served(loop.versions),
        "same_metrics": disturbed["metrics"] == continued,
        "seconds": {name: round(median(one.seconds[name] for one in rounds), 1) for name in rounds[0].seconds},
        "staleness_seconds": {"median": round(median(staleness), 1), "largest": round(max(staleness), 1)},
        "hr@10 continued": by_day({name: continued[name] for name in later}),
        "hr@10 trained once": by_day(trained_once),
        "rows": Dataset(loop.stream).rows,
    }
    record.save(options.out, [result])
    print(result)
    if options.page is not None:
        hits = {name: values["hr@10"] for name, values in trained_once.items()}
        write_page(options.page, rounds, loop, {f"trained once, until {half}": hits})


if __name__ == "__main__":
    main()
