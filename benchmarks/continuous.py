"""Replay a log as it would have arrived: append a partition, train on it, and so on, by the real commands.

    python benchmarks/continuous.py ml-1m.zip [--days 14] [--hourly 2] [--ranks 2] [--kills 20] [--out FILE.json]

Takes the busiest days of MovieLens-1M in partitions of 6 hours, of which some days in hours. Two replays: one is
undisturbed, in the other commands are killed with SIGKILL at random moments and started again. Their weights must be
equal, bit for bit. Then the model of the first half of the days is evaluated on the days after it, beside the one that
went on: HR@10 of the next event of each user in a partition, before the partition is trained on, by day.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

import record
from freescale.checkpoint.checkpoints import complete_checkpoints
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
from freescale.data.partitions import IS_TARGET
from freescale.errors import NOTHING_NEW

DAY, HOUR = 86_400, 3_600
FREESCALE = [sys.executable, "-m", "freescale"]


class Piece(NamedTuple):
    """The events of one partition."""

    name: str
    events: pl.DataFrame


def busiest_days(log: Path, days: int) -> pl.DataFrame:
    """Return the events of the days in a row that have most of them."""
    with zipfile.ZipFile(log) as archive:
        name = next(member for member in archive.namelist() if member.endswith("ratings.dat"))
        fields = np.array([line.split("::") for line in archive.read(name).decode().split()], dtype=np.int64)
    events = pl.DataFrame({"user_id": fields[:, 0], "item_id": fields[:, 1], "timestamp": fields[:, 3]})
    per_day = np.bincount((fields[:, 3] - fields[:, 3].min() // DAY * DAY) // DAY)
    first = int(fields[:, 3].min()) // DAY + int(np.convolve(per_day, np.ones(days, int), "valid").argmax())
    return events.filter(pl.col("timestamp").is_between(first * DAY, (first + days) * DAY, closed="left"))


def cut(events: pl.DataFrame, hourly: int) -> list[Piece]:
    """Cut days into partitions of 6 hours, and the days in the middle into hours."""
    first, last = int(events["timestamp"].min()) // DAY, int(events["timestamp"].max()) // DAY  # type: ignore[arg-type]
    middle = range((first + last) // 2, (first + last) // 2 + hourly)
    bounds = [
        at
        for day in range(first, last + 1)
        for at in range(day * DAY, (day + 1) * DAY, HOUR if day in middle else 6 * HOUR)
    ]
    pieces = []
    for begin, end in pairwise([*bounds, (last + 1) * DAY]):
        inside = events.filter(pl.col("timestamp").is_between(begin, end, closed="left"))
        day = time.strftime("%Y-%m-%d", time.gmtime(begin))
        if len(inside):
            pieces.append(Piece(f"date={day}/hour={begin % DAY // HOUR:02d}", inside))
    return pieces


class Replay:
    """The data set and the run of one replay."""

    def __init__(self, folder: Path, options: argparse.Namespace, kills: int) -> None:
        folder.mkdir(parents=True)
        self.stream, self.run, self._toml = folder / "stream", folder / "run", folder / "run.toml"
        self._folder, self._options, self._kills = folder, options, kills
        self._rng, self.killed = np.random.default_rng(3), Counter[str]()
        self.seconds, self._last = defaultdict[str, float](float), defaultdict[str, float](lambda: 10.0)
        data = DataConfig(path=str(self.stream), order="log", split="none", global_batch=64, max_history=100)
        config = RunConfig(
            data=data,
            model=ModelConfig(dim=32, layers=2),
            task=TaskConfig(negatives=64),
            features={"item": FeatureConfig(ids="dynamic", rows=8192, eviction="lru")},
            tables=TablesConfig(lr=0.05),
            train=TrainConfig(log_every=10, save_every=10),
        )
        save(config, self._toml)

    def add(self, number: int, piece: Piece) -> None:
        """Append a partition and train on it."""
        log = self._folder / "log.csv"
        piece.events.write_csv(log)
        words = ["data", "import", "events", log, self.stream, "--append", piece.name, "--raw-ids", "item_id"]
        self._command("append", number, [*words, "--max-history", 100, "--quiet"])
        ranks = ["--nproc", self._options.ranks, "--restarts", 0]
        self._command("train", number, ["train", self._toml, "--out", self.run, "--until", "now", *ranks, "--quiet"])

    def _command(self, what: str, number: int, words: list[Any]) -> None:
        """Run a command until it ends by itself. Kills are spread over all partitions."""
        left = self._options.partitions - number
        while self._kills > sum(self.killed.values()) and self._rng.random() < self._share(left):
            process = subprocess.Popen([*FREESCALE, *map(str, words)], start_new_session=True)
            time.sleep(self._rng.random() * self._last[what])
            self.killed[what] += process.poll() is None
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        began = time.perf_counter()
        code = subprocess.run([*FREESCALE, *map(str, words)], check=False).returncode
        if code not in (0, NOTHING_NEW):
            raise SystemExit(f"{what} ended with exit code {code}")
        self._last[what] = time.perf_counter() - began
        self.seconds[what] += self._last[what]

    def _share(self, left: int) -> float:
        return min(0.9, (self._kills - sum(self.killed.values())) / max(1, 2 * left) * 1.5)

    def weights(self) -> list[bytes]:
        """Return all that the newest checkpoint holds."""
        newest = complete_checkpoints(self.run / "checkpoints")[-1]
        return [path.read_bytes() for path in sorted(newest.glob("*.bytes"))]

    def validated(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each partition before it was trained."""
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return {entry["partition"]: entry for entry in lines if entry["kind"] == "validate"}


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


def by_day(metrics: dict[str, dict[str, float]]) -> dict[str, float]:
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
    parser.add_argument("--folder", type=Path, default=Path("runs/continuous"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pieces = cut(busiest_days(options.log, options.days), options.hourly)
    options.partitions = len(pieces)
    half = f"{sorted({piece.name.split('/')[0] for piece in pieces})[options.days // 2 - 1]}/hour=99"
    undisturbed, once = Replay(options.folder / "undisturbed", options, 0), options.folder / "once"
    for number, piece in enumerate(pieces):
        undisturbed.add(number, piece)
    words = ["train", options.folder / "undisturbed" / "run.toml", "--out", once, "--until", half, "--quiet"]
    subprocess.run([*FREESCALE, *map(str, words), "--nproc", str(options.ranks)], check=True)
    later = [piece.name for piece in pieces if piece.name > half]
    disturbed = Replay(options.folder / "disturbed", options, options.kills)
    for number, piece in enumerate(pieces):
        disturbed.add(number, piece)
    targets = count_targets(undisturbed.stream)
    events = Counter(event for piece in pieces for event in piece.events.iter_rows())
    validated = undisturbed.validated()
    result = {
        "events": sum(events.values()),
        "partitions": len(pieces),
        "targets": sum(targets.values()),
        "targets_twice": sum(count > 1 for count in targets.values()),
        "events_without_target": len(events.keys() - targets.keys()),
        "kills": dict(disturbed.killed),
        "bitwise": disturbed.weights() == undisturbed.weights() and disturbed.validated().keys() == validated.keys(),
        "seconds": {what: round(undisturbed.seconds[what] / len(pieces), 1) for what in ("append", "train")},
        "hr@10 continued": by_day({name: validated[name] for name in later}),
        "hr@10 trained once": by_day(evaluate_once_trained(once, later)),
        "rows": Dataset(str(undisturbed.stream)).rows,
    }
    record.save(options.out, [result])


if __name__ == "__main__":
    main()
