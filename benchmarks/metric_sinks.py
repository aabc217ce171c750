"""Weights & Biases and MLflow hold what metrics.jsonl holds: real packages, offline.

    python benchmarks/metric_sinks.py [--entries 200] [--out FILE.json]

Needs both extras: pip install 'freescale[wandb,mlflow]'. Writes the entries of a training, whose steps go back once, to
both sinks, and reads them back: MLflow's from its store by its client, W&B's from the file that `wandb sync` sends.
"""

import argparse
import importlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import record
from freescale.config import resolve
from freescale.train.metric_sinks import MlflowSink, WandbSink, scalars


def entries(count: int) -> list[dict[str, Any]]:
    """Return entries as a training writes them; steps go back once, to the last checkpoint."""
    steps = [*range(10, 5 * count, 10), *range(5 * count // 2, 5 * count, 10)][:count]
    now = time.time()
    found: list[dict[str, Any]] = [{"kind": "start", "step": 0, "world_size": 2, "reason": "new run", "time": now}]
    for place, step in enumerate(steps):
        values = {"loss": 8.0 / (1 + place), "tokens/s": 1e4 + place, "grad_norm": float("nan") if place == 3 else 0.5}
        found.append({"kind": "train", "step": step, **values, "time": now + place})
    found.append({"kind": "evaluate", "step": steps[-1], "hr@10": 0.1 + 0.2, "users": 100, "time": now + count})
    return [*found, {"kind": "end", "step": steps[-1], "finished": True, "time": now + count}]


def expected(given: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of each name, in order."""
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in given:
        for name, value in scalars(entry).items():
            found.setdefault(name, []).append((entry["step"], value))
    return found


def in_mlflow() -> tuple[dict[str, list[tuple[int, float]]], dict[str, Any]]:
    """Return what MLflow's store has of the only run, and its status and parameters."""
    mlflow: Any = importlib.import_module("mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("freescale")
    (run,) = client.search_runs([experiment.experiment_id])
    names = run.data.metrics
    history = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    values = {
        name.replace("_at_", "@"): [(one.step, one.value) for one in sorted(found, key=lambda one: one.timestamp)]
        for name, found in history.items()
    }
    return values, {"status": run.info.status, "dim": run.data.params["model.dim"], "name": run.info.run_name}


def leveldb_records(raw: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, behind W&B's header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(raw):
        if (left := 32768 - at % 32768) < 7:  # no header fits: the rest of the block is empty
            at += left
            continue
        size, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        parts += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def in_wandb(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what the offline file of W&B has."""
    wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.rglob("*.wandb")
    found: dict[str, list[tuple[int, float]]] = {}
    for raw in leveldb_records(path.read_bytes()):
        one = wandb_internal_pb2.Record()
        one.ParseFromString(raw)
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.history.item}
        for name in items:
            if "/" in name:
                found.setdefault(name, []).append((items["step"], items[name]))
    return found


def measure(count: int, folder: Path) -> dict[str, Any]:
    os.environ |= {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
    }
    run = folder / "mine"
    run.mkdir()
    config, given = resolve("tiny"), entries(count)
    seconds = {}
    for name, kind in (("wandb", WandbSink), ("mlflow", MlflowSink)):
        sink = kind(run, config)
        began = time.perf_counter()
        for entry in given:
            sink.write(entry)
        seconds[name] = (time.perf_counter() - began) / len(given)
        sink.close()
    stored, facts = in_mlflow()
    return {
        "entries": len(given),
        "values": sum(map(len, expected(given).values())),
        "mlflow_equal": stored == expected(given),
        "wandb_equal": in_wandb(run) == expected(given),
        "mlflow_run": facts,
        "milliseconds_per_entry": {name: round(1e3 * value, 3) for name, value in seconds.items()},
        "versions": {name: version(name) for name in ("wandb", "mlflow-skinny")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.entries, Path(folder))
    print(json.dumps(result, indent=1))
    record.save(options.out, [result])


if __name__ == "__main__":
    main()
