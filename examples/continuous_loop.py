"""A recommender that never stops training: append, validate, train, publish and serve, partition by partition.

    python examples/continuous_loop.py --demo

replays two days of a synthetic log, and writes a page with quality, staleness, table load and cost. With the path of a
CSV log (columns user_id, item_id, timestamp) instead of --demo, it replays that: partitions of --hours hours.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from freescale import page
from freescale.serving import serve
from freescale.serving.follow import Follower

HOUR = 3_600
CONFIG = """
[data]
path = {stream}
order = "log"
split = "none"
global_batch = 64
max_history = 100

[model]
dim = 32
layers = 2

[task]
negatives = 64

[features.item]
ids = "dynamic"
rows = {rows}
eviction = "lru"

[tables]
lr = 0.05

[train]
log_every = 10
save_every = 10
"""
QUALITY = """The next event of each user, before the partition is trained on. Known items: without targets that no
earlier partition has. New users: those without earlier events."""
Events = list[tuple[int, int, int]]
"""User, item and time."""
Run = Callable[[Sequence[Any]], None]
"""Run a command of freescale, given as its words."""


class Round(NamedTuple):
    """What a partition took and gave."""

    partition: str
    events: int
    seconds: dict[str, float]
    """Of `data import`, `train` and `publish`, and until the server answers by the version."""
    megabytes: float
    """Of the version that was published."""
    is_full: bool

    @property
    def staleness(self) -> float:
        """Return the seconds from the end of a partition to an answer that reflects it."""
        return sum(self.seconds.values())


def run_command(words: Sequence[Any]) -> None:
    """Run a command of freescale; raise an error if it fails."""
    subprocess.run([sys.executable, "-m", "freescale", *map(str, words), "--quiet"], check=True)


class Loop:
    """A data set, the run that trains on it, and the versions that it publishes."""

    def __init__(self, folder: Path, *, ranks: int, rows: int, addresses: str = "", run: Run = run_command) -> None:
        """Prepare a loop. `addresses`: where the data set and the versions are; by default in the folder."""
        folder.mkdir(parents=True)
        self._folder, self._ranks, self._run = folder, ranks, run
        self.stream, self.versions = (f"{addresses or folder}/{name}" for name in ("stream", "versions"))
        self.run, self.toml = folder / "run", folder / "run.toml"
        self.toml.write_text(CONFIG.format(stream=json.dumps(self.stream), rows=rows))

    def add(self, partition: str, events: Events) -> None:
        """Append a partition, train on it and publish. Each command may be killed and repeated."""
        log = self._folder / "log.csv"
        with log.open("w", newline="") as file:
            csv.writer(file).writerows([("user_id", "item_id", "timestamp"), *events])
        words = ["data", "import", "events", log, self.stream, "--append", partition]
        self._run([*words, "--raw-ids", "item_id", "--max-history", 100])
        ranks = ["--nproc", self._ranks, "--restarts", 0]
        self._run(["train", self.toml, "--out", self.run, "--until", "now", *ranks])
        self._run(["publish", self.run, self.versions])

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return the entries of metrics.jsonl of a kind; `validate`: of a partition before it is trained."""
        entries = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        return [entry for entry in entries if entry["kind"] == kind]


class TimedLoop:
    """A loop on the local disk with a server that follows it."""

    def __init__(self, folder: Path, *, ranks: int, rows: int) -> None:
        self._seconds: dict[str, float] = {}
        self.loop = Loop(folder, ranks=ranks, rows=rows, run=self._time)
        self.follower = Follower(self.loop.versions, serve)

    def _time(self, words: Sequence[Any]) -> None:
        began = time.perf_counter()
        run_command(words)
        self._seconds[words[0]] = time.perf_counter() - began

    def add(self, partition: str, events: Events) -> Round:
        """Add a partition; return when the server answers by the version that was trained on it."""
        self.loop.add(partition, events)
        began, before = time.perf_counter(), self.follower.version
        if not self.follower.poll() or self.follower.version == before:
            raise SystemExit(f"no new version after {partition}: {self.follower.error}")
        users = defaultdict[int, list[tuple[int, int]]](list)
        for user, item, at in events:
            users[user].append((at, item))
        history = sorted(max(users.values(), key=len))[-100:]
        request = {"item_id": [item for _, item in history], "timestamp": [at for at, _ in history]}
        self.follower.model.recommend([request], k=10)
        self._seconds["serve"] = time.perf_counter() - began
        version = Path(self.loop.versions) / f"v{self.follower.version:06d}"
        size = sum(path.stat().st_size for path in version.iterdir()) / 1e6
        return Round(partition, len(events), dict(self._seconds), size, (version / "serving.json").exists())


def write_page(path: Path, rounds: Sequence[Round], loop: Loop, others: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the rounds. `others`: HR@10 of other models, by partition."""
    names = [one.partition for one in rounds]
    x = page.Axis("partition", whole=True)

    def chart(title: str, note: str, lines: Mapping[str, Mapping[str, float]], y: page.Axis) -> str:
        series = [
            page.Series(name, [names.index(at) + 1 for at in of_line], list(of_line.values()))
            for name, of_line in lines.items()
        ]
        return page.section(title, note, page.line_chart([line for line in series if line.x], x, y))

    def by_partition(values: Sequence[float]) -> dict[str, float]:
        return dict(zip(names, values, strict=True))

    entries = [entry for entry in loop.metrics("validate") if entry["partition"] in names]
    hits = {
        label: {entry["partition"]: entry[name] for entry in entries if name in entry}
        for label, name in (
            ("all items", "hr@10"),
            ("known items", "hr@10/known_items"),
            ("new users", "hr@10/new_users"),
        )
    }
    load, trained = {}, loop.metrics("train")
    for entry in entries:
        load[entry["partition"]] = max((e["ids/item/load"] for e in trained if e["step"] <= entry["step"]), default=0.0)
    seconds = page.Axis("seconds")
    parts = [
        chart("Quality", QUALITY, {**hits, **others}, page.Axis("HR@10")),
        chart(
            "Staleness",
            "From the end of a partition to an answer that reflects it.",
            {"staleness": by_partition([one.staleness for one in rounds])},
            seconds,
        ),
        chart(
            "Cost",
            "Each command, and until the server answers by the version.",
            {name: by_partition([one.seconds[name] for one in rounds]) for name in rounds[0].seconds},
            seconds,
        ),
        chart("Table load", "Slots of items in use when a partition begins.", {"": load}, page.Axis("", percent=True)),
        chart(
            "Published",
            "Full versions and deltas.",
            {
                kind: {one.partition: one.megabytes for one in rounds if one.is_full is is_full}
                for kind, is_full in (("full", True), ("delta", False))
            },
            page.Axis("MB", log=True),
        ),
    ]
    lead = f"{len(rounds)} partitions from {names[0]} to {names[-1]}, {sum(one.events for one in rounds):,} events."
    path.write_text(page.document("Continuous training", lead, *parts))


def partitions_of(events: Events, hours: int) -> list[tuple[str, Events]]:
    """Cut a log into partitions."""
    cut = defaultdict[int, Events](list)
    for event in events:
        cut[event[2] // (hours * HOUR)].append(event)
    names = (time.strftime("date=%Y-%m-%d/hour=%H", time.gmtime(part * hours * HOUR)) for part in sorted(cut))
    return list(zip(names, (cut[part] for part in sorted(cut)), strict=True))


def demo_log() -> Events:
    """Return two days in which users go through items, and new items come."""
    events = []
    for number in range(2_400):
        at = 1_600_041_600 + number * 72
        user = number * 7 % 150
        events.append((user, number // 12 + user % 10, at))
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay a log through append, train, publish and serve.")
    parser.add_argument("log", type=Path, nargs="?")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8192, help="slots for items")
    parser.add_argument("--folder", type=Path, help="to keep everything; must not exist")
    options = parser.parse_args()
    if options.log is None and not options.demo:
        parser.error("give a CSV log, or --demo")
    events = demo_log()
    if options.log is not None:
        with options.log.open(newline="") as file:
            rows = csv.DictReader(file)
            events = [(int(row["user_id"]), int(row["item_id"]), int(row["timestamp"])) for row in rows]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "loop"
        timed = TimedLoop(folder, ranks=options.ranks, rows=options.rows)
        rounds = []
        for partition, part in partitions_of(events, options.hours):
            rounds.append(timed.add(partition, part))
            print(f"{partition}: {len(part)} events, {rounds[-1].staleness:.1f} s until they count in an answer")
        write_page(folder / "loop.html", rounds, timed.loop, {})
        print(f"page: {folder / 'loop.html'}" if options.folder else "give --folder to keep the page")


if __name__ == "__main__":
    main()
