"""Measures ranking against the optimum, on a log whose labels have known probabilities.

    python benchmarks/ranking.py [--users 16000] [--test-users 8000] [--ranks 1 2] [--seeds 0 1 2] [--out FILE.json]

Trains the recipe `hstu-ranking-synth` on a planted log and evaluates it on other users. `ratio` is its normalised
entropy over the planted optimum. The optimum holds on average over draws of the labels; `ratio_of_truth` is what the
chances themselves reach on the very labels of the test log, so its distance from 1 is the luck of that draw. The noise
of training is that over seeds. Every rank computes on one thread.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record
from freescale.data import synthetic

RECIPE = "hstu-ranking-synth"


def train(folder: Path, ranks: int, seed: int) -> tuple[list[dict[str, Any]], float]:
    """The evaluations of a run, and the seconds that all of it took."""
    run = folder / f"run-{ranks}-{seed}"
    words = ["train", RECIPE, "--data", str(folder / "log"), "--data.test-path", str(folder / "test")]
    words += ["--nproc", str(ranks), "--seed", str(seed), "--out", str(run)]
    begin = time.perf_counter()
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "freescale", *words], check=True, env=one_thread)
    seconds = time.perf_counter() - begin
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == "evaluate"], seconds


def result(folder: Path, ranks: int, seed: int) -> dict[str, Any]:
    evaluations, seconds = train(folder, ranks, seed)
    found: dict[str, Any] = {"recipe": RECIPE, "ranks": ranks, "seed": seed, "seconds": round(seconds, 1)}
    for label in synthetic.CHANCES:
        best = synthetic.planted_optimum(folder / "test", label)
        found[label] = {
            "ne": round(evaluations[-1][f"ne/{label}"], 4),
            "optimum": round(best, 4),
            "ratio": round(evaluations[-1][f"ne/{label}"] / best, 4),
            "ratio_of_truth": round(
                synthetic.normalised_entropy(*synthetic.planted_truth(folder / "test", label)) / best, 4
            ),
            "auc": round(evaluations[-1][f"auc/{label}"], 4),
            "curve": {entry["step"]: round(entry[f"ne/{label}"], 4) for entry in evaluations},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=16_000)
    parser.add_argument("--test-users", type=int, default=8_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synthetic.write_planted_log(folder / "log", users=options.users, seed=0)
        synthetic.write_planted_log(folder / "test", users=options.test_users, seed=1)
        for ranks in options.ranks:
            for seed in options.seeds:
                results.append(result(folder, ranks, seed))
                print(json.dumps(results[-1]), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
