"""The files that commands are run on: small and valid, made once by the commands themselves, copied for each case."""

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from freescale.simulate import cluster

from .runner import Runner

_SHORT = "--restarts 0 --train.max-steps 4 --train.log-every 1 --data.global-batch 8 --data.shards 4 --quiet"
_MADE = (
    "data synth data/tiny --users 40 --items 60 --shorter 12",
    "data synth data/other --users 30 --items 80 --shorter 12 --seed 1",
    "data synth data/ranking --preset planted --users 60",
    f"train tiny --data data/tiny --out runs/tiny {_SHORT}",
    f"train tiny --data data/other --out runs/other --seed 3 {_SHORT}",
    f"train hstu-ranking-synth --data data/ranking --out runs/ranking {_SHORT}",
    "export runs/tiny model",
)


def build(folder: Path, runner: Runner) -> None:
    """Make the world in a folder."""
    for name in ("tmp", "logs", "empty", "readonly", "traces"):
        (folder / name).mkdir(parents=True)
    for words in _MADE:
        reply = runner.run(words.split(), folder)
        if reply.code:
            raise RuntimeError(f"freescale {words}: exit code {reply.code}\n{reply.err}")
    config = runner.run(["config", "tiny", "--data.path", "data/tiny", "--train.max-steps", "2"], folder)
    (folder / "run.toml").write_text(config.out)
    shutil.copy(cluster._package_folder() / "h100.toml", folder / "cluster.toml")
    _write_logs(folder / "logs")
    for rank in (0, 1):
        (folder / "traces" / f"rank{rank}.json").write_text(json.dumps(_trace(rank)))
    (folder / "empty.txt").touch()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    shutil.rmtree(folder / "tmp")
    (folder / "tmp").mkdir()
    (folder / "readonly").chmod(0o555)


def _write_logs(folder: Path) -> None:
    rows = [(f"u{i % 7}", f"sku-{i * i % 23}", 1_600_000_000 + 37 * i, i % 5) for i in range(90)]
    names = ("user", "item", "time", "rating")
    for suffix, separator in (("csv", ","), ("tsv", "\t")):
        lines = [separator.join(map(str, row)) for row in (names, *rows)]
        (folder / f"events.{suffix}").write_text("\n".join(lines) + "\n")
    as_json = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    (folder / "events.jsonl").write_text("\n".join(as_json) + "\n")
    columns = {name: list(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    pq.write_table(pa.table(columns), folder / "events.parquet")
    (folder / "lists.txt").write_text(
        "".join(f"{u} " + " ".join(str(i + u) for i in range(6)) + "\n" for u in range(9))
    )
    ratings = "".join(f"{i % 7}::{i * i % 23}::{1 + i % 5}::{978_300_000 + i}\n" for i in range(90))
    with zipfile.ZipFile(folder / "ml-1m.zip", "w") as archive:
        archive.writestr("ml-1m/ratings.dat", ratings)


def _trace(rank: int) -> dict[str, object]:
    """Two steps of a rank, as torch.profiler writes them."""
    parts = (
        ("user_annotation", "ProfilerStep#{}", 0, 90),
        ("cpu_op", "aten::mm", 5, 40),
        ("cpu_op", "aten::add", 60, 9),
    )
    events = [
        {"ph": "X", "cat": kind, "name": name.format(step), "pid": 1, "tid": 1, "ts": 100 * step + at, "dur": lasts}
        for step in (3, 4)
        for kind, name, at, lasts in parts
    ]
    return {"baseTimeNanoseconds": 7, "distributedInfo": {"rank": rank}, "traceEvents": events}


def copied(world: Path, folder: Path) -> None:
    """A copy of the world, which a command may change."""
    shutil.copytree(world, folder, symlinks=True)


def files_of(world: Path, name: str) -> Iterator[Path]:
    """The files of a word of a command, relative to the world: itself, or those below it. None if it is no path."""
    place = world / name
    if name.startswith(("/", "-")) or not name or ".." in name or "\0" in name:
        return
    try:
        if place.is_file():
            yield place.relative_to(world)
        elif place.is_dir():
            yield from (path.relative_to(world) for path in sorted(place.rglob("*")) if path.is_file())
    except OSError:  # a name that no file can have
        return
