"""Measures the quality of the recipes against published results.

    python benchmarks/quality.py --data data/ml1m --runs runs [--recipes hstu-ml1m ...] [--steps N] [--out FILE.json]

Trains each recipe on 2 ranks, or resumes its run where it stopped, and keeps the curve. Protocol: the last event of
each user held out, all 3,706 items ranked, seen items left out. The anchors are those published for the same protocol.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import record
from freescale.checkpoint import checkpoints
from freescale.config import load

ANCHORS = {
    "sasrec-ml1m": {"hr@10": 0.2853, "ndcg@10": 0.1603},
    "hstu-ml1m": {"hr@10": 0.3097, "ndcg@10": 0.1720},
    "hstu-large-ml1m": {"hr@10": 0.3294, "ndcg@10": 0.1893},
}


def train(recipe: str, data: Path, run: Path, steps: int) -> list[str]:
    """Bring the run to its end, and give the command that does it from the beginning."""
    words = ["train", recipe, "--data", str(data), "--nproc", "2", "--out", str(run)]
    words += ["--train.max-steps", str(steps)] if steps else []
    resume = ["--resume"] if checkpoints.complete_checkpoints(run / "checkpoints") else []
    subprocess.run([sys.executable, "-m", "freescale", *words, *resume], check=True)
    return ["freescale", "train", recipe, "--data", "data/ml1m", "--nproc", "2", "--out", f"runs/{recipe}"]


def curve(run: Path) -> list[dict[str, Any]]:
    """Entries of a run by step; where a resumed run went over a step again, the later one."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {(entry["kind"], entry["step"]): entry for entry in entries}
    return [by_step[key] for key in sorted(by_step, key=lambda key: key[1])]


def result(recipe: str, command: list[str], run: Path) -> dict[str, Any]:
    entries = curve(run)
    evaluations = [entry for entry in entries if entry["kind"] == "evaluate"]
    training = [entry for entry in entries if entry["kind"] == "train"]
    wanted = ("step", "hr@10", "hr@50", "hr@200", "ndcg@10", "mrr")
    return {
        "recipe": recipe,
        "command": " ".join(command),
        "seed": load(run / "config.toml").seed,
        "reached": {name: round(evaluations[-1][name], 4) for name in wanted},
        "anchor": ANCHORS[recipe],
        "curve": [{name: round(entry[name], 4) for name in wanted} for entry in evaluations],
        "loss": {entry["step"]: round(entry["loss"], 4) for entry in training[:: max(1, len(training) // 20)]},
        "training_minutes": round(sum(entry["seconds"] * 48 for entry in training) / 60, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", choices=list(ANCHORS), default=list(ANCHORS))
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps; 0: as the recipe says")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for recipe in options.recipes:
        run = options.runs / recipe
        results.append(result(recipe, train(recipe, options.data, run, options.steps), run))
        print(json.dumps({name: results[-1][name] for name in ("recipe", "reached", "anchor")}), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
