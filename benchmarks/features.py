"""What features cost, what anchors save, and whether the recipe `dlrm-v4` finds a planted signal.

    python benchmarks/features.py cost [--before FOLDER] [--rounds 10] [--out FILE.json]
    python benchmarks/features.py anchors [--out FILE.json]
    python benchmarks/features.py planted [--ranks 2 4] [--out FILE.json]

cost: CPU time of steps of width 64 with 0, 1, 2 and 4 summed features, one process each, in turn. `--before`: another
checkout, of an earlier commit, whose steps without features take turns, too. The second process without features gives
the floor of the comparison.

anchors: one pass over histories with 20 evenly spaced targets against 20 separate samples each: gradients in fp64, and
time.

planted: the recipe `dlrm-v4`, small, on the synthetic log `yambda` with every technique; its AUC against that of the
true probabilities.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from record import save

ROOT = Path(__file__).parents[1]
LANES = {"before": 0, "0 features": 0, "0 features again": 0, "1 feature": 1, "2 features": 2, "4 features": 4}
_ROWS = 500_000


def worker(data: str, features: int, steps: int) -> None:
    """Run steps for every line of input; print the CPU milliseconds of a step. Works with earlier commits, too."""
    import freescale as fs
    from freescale.train.build import build
    from freescale.transport.world import init_world

    options: dict[str, Any] = {}
    if features:
        names = ("artist_id", "album_id", "third_id", "fourth_id")[:features]
        options["features"] = {name: fs.FeatureConfig(scope="event") for name in names}
    config = fs.RunConfig(
        data=fs.DataConfig(path=data, global_batch=64, max_history=100, workers=0),
        model=fs.ModelConfig(dim=64, layers=2, heads=2),
        task=fs.TaskConfig(negatives=64),
        tables=fs.TablesConfig(overlap="off"),
        train=fs.TrainConfig(epochs=10**6),
        **options,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(config, init_world(timeout=60), Path(folder), quiet=True)
        batches = list(itertools.islice(trainer.components.loader, steps))
        for _ in sys.stdin:
            began = time.process_time()
            for batch in batches:
                trainer.components.step.run(batch, trainer._learning_rates(), following=None)
            trainer.components.step.synchronize()
            print(1e3 * (time.process_time() - began) / steps, flush=True)


def write_log_with_columns(folder: Path, users: int) -> None:
    """Write a log whose events have four more ids."""
    import pyarrow as pa

    from freescale.data import synthetic, writer

    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(20, 100, users))])
    user, total = np.arange(users), int(offsets[-1])
    columns = {"user_id": pa.array(user), "item_id": synthetic.list_array(offsets, rng.integers(0, 5000, total))}
    columns["timestamp"] = synthetic.list_array(offsets, synthetic.draw_times(user, offsets, rng))
    names = ("artist_id", "album_id", "third_id", "fourth_id")
    columns |= {name: synthetic.list_array(offsets, rng.integers(0, 1000, total)) for name in names}
    with writer.atomic_folder(folder) as place:
        sizes = dict.fromkeys(names, 1000)
        writer.write_dataset(place, [pa.table(columns)], rows_per_group=32, items=5000, features=sizes)


def measure_cost(options: argparse.Namespace) -> dict[str, Any]:
    """Return the CPU time of every lane over that without features, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_log_with_columns(place / "data", options.users)
        lanes = {name: _start(name, place, options) for name in LANES if name != "before" or options.before}
        times: dict[str, list[float]] = {name: [] for name in lanes}
        for number in range(options.rounds + 1):
            for name in list(lanes) if number % 2 else list(lanes)[::-1]:
                spent = _run_steps(lanes[name])
                if number:  # the first round warms up
                    times[name].append(spent)
        for lane in lanes.values():
            lane.communicate()
    base = times["0 features"]
    ratios = {name: [a / b for a, b in zip(of, base, strict=True)] for name, of in times.items() if of is not base}
    over = {name: [min(r), statistics.median(r), max(r)] for name, r in ratios.items()}
    return {"ms": {name: statistics.median(of) for name, of in times.items()}, "over_0_features": over}


def _start(name: str, place: Path, options: argparse.Namespace) -> "subprocess.Popen[str]":
    """Start the process of a lane."""
    source, data = (options.before, place / "before") if name == "before" else (ROOT, place / "data")
    if name == "before":  # another commit may have another manifest: it imports the files itself
        (place / "files").mkdir()
        for file in (place / "data").glob("*.parquet"):
            (place / "files" / file.name).write_bytes(file.read_bytes())
        words = [sys.executable, "-m", "freescale", "data", "import", "histories", str(place / "files"), str(data)]
        subprocess.run(words, check=True, env=_environment(source), stdout=subprocess.DEVNULL)
    command = [sys.executable, __file__, "worker", "--data", str(data), "--features", str(LANES[name])]
    command += ["--steps", str(options.steps)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=_environment(source), **pipes)


def _run_steps(lane: "subprocess.Popen[str]") -> float:
    """Let a lane run its steps; return the milliseconds of one."""
    assert lane.stdin is not None
    lane.stdin.write("run\n")
    lane.stdin.flush()
    return _read(lane)


def _read(lane: "subprocess.Popen[str]") -> float:
    """Return the next number that a worker prints."""
    assert lane.stdout is not None
    for line in iter(lane.stdout.readline, ""):
        if line[:1].isdigit():
            return float(line)
    raise RuntimeError("a worker has ended")


def _environment(source: Path) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{source / 'src'}:{source}:{source / 'benchmarks'}"}
    return {**os.environ, **threads}


def measure_anchors(options: argparse.Namespace) -> dict[str, Any]:
    """Return the largest relative difference of gradients, and the CPU time over that of separate samples."""
    import torch
    from tests.support.anchored import batches, gradients

    torch.set_num_threads(1)
    both = batches()
    together, apart = (gradients(batch, dtype=torch.float64) for batch in both)
    worst = max(float((together[n] - apart[n]).norm() / apart[n].norm().clamp(min=1e-300)) for n in together)
    ratios = []
    for _ in range(options.rounds + 1):
        spent = []
        for batch in both:
            began = time.process_time()
            gradients(batch, dtype=torch.float32)
            spent.append(time.process_time() - began)
        ratios.append(spent[0] / spent[1])
    ratios = ratios[1:]  # the first round warms up
    return {"worst_difference": worst, "time_ratio": [min(ratios), statistics.median(ratios), max(ratios)]}


def measure_planted(options: argparse.Namespace) -> dict[str, Any]:
    """Train the recipe at a small scale on 2 and 4 ranks; return AUC and that of the true probabilities."""
    from freescale.config import RECIPES
    from freescale.config import save as save_config
    from freescale.data.synthetic import planted_auc
    from freescale.data.synthetic_features import write_feature_log

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, seed in (("train", 0), ("test", 1)):
            users = options.users if name == "train" else max(30, options.users // 32)
            write_feature_log(place / name, "yambda", users=users, catalogue=200, seed=seed, shorter=100)
        found["planted_auc"] = planted_auc(place / "test", "label_full_listen")
        for ranks in options.ranks:
            config = small_recipe(RECIPES["dlrm-v4"], place, rows=min(_ROWS, 32 * options.users))
            save_config(config, place / f"{ranks}.toml")
            out = place / f"run-{ranks}"
            command = [sys.executable, "-m", "freescale", "train", str(place / f"{ranks}.toml"), "--nproc", str(ranks)]
            subprocess.run([*command, "--out", str(out)], check=True)
            entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            found[f"{ranks} ranks"] = [entry for entry in entries if entry["kind"] == "evaluate"][-1]
    return found


def small_recipe(recipe: Any, place: Path, *, rows: int) -> Any:
    """The recipe for a log of some thousand users: smaller tables, and the features that the planted signal needs.

    One epoch, as in the reference: the crosses with the user would remember the labels of a first epoch in a second.
    """
    from freescale.config import FeatureConfig

    features = {name: replace(feature, rows=min(feature.rows, rows)) for name, feature in recipe.features.items()}
    features |= {name: FeatureConfig(scope="user") for name in ("region", "subscription")}
    features["device"] = FeatureConfig(column="device_type", scope="context")
    for first, second in (("region", "artist"), ("subscription", "device")):
        cross = FeatureConfig(scope="context", kind="cross", cross=(first, second), rows=rows)
        features[f"{first}_x_{second}"] = cross
    return replace(
        recipe,
        data=replace(
            recipe.data,
            path=str(place / "train"),
            test_path=str(place / "test"),
            global_batch=16,
            shards=4,
            split="none",
        ),
        model=replace(recipe.model, dim=32, layers=2, heads=2, dropout=0.0),
        features=features,
        tables=replace(recipe.tables, lr=0.05, overlap="on"),
        train=replace(
            recipe.train,
            lr=1e-2,
            warmup_steps=50,
            precision="fp32",
            epochs=1,
            decay="cosine",
            evaluate_every=1,
            log_every=50,
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "anchors", "planted", "worker"])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--users", type=int, default=32_000)
    parser.add_argument("--data")
    parser.add_argument("--features", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "worker":
        worker(options.data, options.features, options.steps)
        return
    measure = {"cost": measure_cost, "anchors": measure_anchors, "planted": measure_planted}[options.what]
    result = measure(options)
    print(json.dumps(result, indent=1))
    save(options.out, [result])


if __name__ == "__main__":
    main()
