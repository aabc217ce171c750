"""Compares the steps of two commits: does a change make training slower?

    git worktree add BEFORE COMMIT
    python benchmarks/between_commits.py BEFORE [--measures cpu emulated] [--rounds 10] [--out FILE.json]

Each round measures this checkout, the earlier one, and this one again, every time with the scripts of that checkout.
`cpu`: CPU milliseconds of a step of the trainer on 2 ranks, by `overhead.py`. `emulated`: the time of a step with all
techniques over compute alone, by one lane of `step.py` with emulated compute on 2 hosts. Met if the median of now over
before is at most 1.02, or inside the range of again over now.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import save

ROOT = Path(__file__).parents[1]
_OVERHEAD = ["overhead.py", "--blocks", "5", "--steps", "10"]
_LANE = ["--presets", "heavy", "--ranks", "2", "--no-real", "--samples", "32", "--items", "500000", "--layers", "2"]
_STEP = ["step.py", *_LANE, "--steps", "8", "--turns", "1", "--exact-steps", "1"]


def trainer_cpu_ms(checkout: Path) -> float:
    """Return the CPU milliseconds of a step of the trainer."""
    (result,) = run(checkout, _OVERHEAD)
    return result["bare_cpu_ms_per_step"] * (1 + result["cpu_beyond_bare_percent"] / 100)


def emulated_step(checkout: Path) -> float:
    """Return the time of a step with all techniques over compute alone."""
    (result,) = run(checkout, _STEP)
    (everything,) = [one for one in result["variants"] if one["variant"] == "everything"]
    return everything["step_over_compute"]


def run(checkout: Path, command: list[str]) -> list[Any]:
    """Run a script of a checkout and return its results."""
    script, *options = command
    path = f"{checkout / 'src'}:{checkout}:{checkout / 'benchmarks'}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        words = [sys.executable, checkout / "benchmarks" / script, *options, "--out", out]
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())["results"]


MEASURES = {"cpu": trainer_cpu_ms, "emulated": emulated_step}


def compare(measure: str, before: Path, rounds: int) -> dict[str, Any]:
    """Return the ratios of this checkout to the earlier one and to itself."""
    checkouts = {"now": ROOT, "before": before, "again": ROOT}
    figures: dict[str, list[float]] = {name: [] for name in checkouts}
    for number in range(rounds):
        for name in list(checkouts) if number % 2 else list(checkouts)[::-1]:
            figures[name].append(MEASURES[measure](checkouts[name]))
        print(json.dumps({name: of[-1] for name, of in figures.items()}), flush=True)
    ratio = [now / then for now, then in zip(figures["now"], figures["before"], strict=True)]
    floor = [again / now for again, now in zip(figures["again"], figures["now"], strict=True)]
    median, (least, most) = statistics.median(ratio), (min(floor), max(floor))
    return {
        "measure": measure,
        "before": subprocess.check_output(["git", "-C", before, "rev-parse", "--short", "HEAD"], text=True).strip(),
        "rounds": rounds,
        "figures": {name: statistics.median(of) for name, of in figures.items()},
        "now_over_before": [min(ratio), median, max(ratio)],
        "again_over_now": [least, statistics.median(floor), most],
        "met": median <= 1.02 or least <= median <= most,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the earlier commit")
    parser.add_argument("--measures", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for measure in options.measures:
        results.append(compare(measure, options.before.resolve(), options.rounds))
        print(json.dumps(results[-1]), flush=True)
        save(options.out, results)


if __name__ == "__main__":
    main()
