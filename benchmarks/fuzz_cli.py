"""Runs random commands on damaged files, and checks that each ends soon with a result or an error of ours.

    python benchmarks/fuzz_cli.py [--cases 2000] [--seed 0] [--workers 2] [--only NUMBER ...] [--out FILE.json]

A case is a random command on files of which some are damaged, in a folder of its own. It must end within --seconds with
a documented exit code. A failure names the cause and the remedy, without a traceback; a success has written its output;
no process and no temporary file is left. A case follows from the seed and its number: --only runs it
again and prints everything.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.cli_fuzz import worlds
from tests.support.cli_fuzz.fuzz import Outcome, run_case
from tests.support.cli_fuzz.runner import SECONDS, Runner

import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    numbers = options.only or range(options.cases)
    with tempfile.TemporaryDirectory(prefix="fuzz-cli-") as folder:
        world = Path(folder) / "world"
        with Runner() as runner:
            worlds.build(world, runner)
        with ThreadPoolExecutor(options.workers) as pool:
            parts = [numbers[i :: options.workers] for i in range(options.workers)]
            runs = [pool.submit(run_cases, options, part, world) for part in parts]
            outcomes = [outcome for run in runs for outcome in run.result()]
    result = summary(options.seed, outcomes)
    print(json.dumps(result, indent=1))
    record.save(options.out, [result])
    raise SystemExit(bool(result["faults"]))


def run_cases(options: argparse.Namespace, numbers: Sequence[int], world: Path) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with Runner(seconds=options.seconds) as runner:
        for number in numbers:
            outcomes.append(run_case(options.seed, number, world, runner))
            show(outcomes[-1], whole=bool(options.only))
            if len(outcomes) % 50 == 0:
                print(f"{len(outcomes)} of {len(numbers)} cases", flush=True)
    return outcomes


def show(outcome: Outcome, *, whole: bool) -> None:
    case, reply = outcome.case, outcome.reply
    if whole:
        print(f"{outcome.command}\n{case.damages} {case.circumstances}\ncode {reply.code}, {reply.seconds} s")
        print(f"--- stdout\n{reply.out}\n--- stderr\n{reply.err}")
    for fault in outcome.faults:
        print(
            f"case {case.number}: {fault}\n    {outcome.command}\n    {case.damages} {case.circumstances}", flush=True
        )


def summary(seed: int, outcomes: list[Outcome]) -> dict[str, Any]:
    codes = Counter(outcome.reply.code for outcome in outcomes)
    commands = Counter(outcome.name for outcome in outcomes)
    seconds = sorted(outcome.reply.seconds for outcome in outcomes)
    return {
        "seed": seed,
        "cases": len(outcomes),
        "exit_codes": dict(sorted(codes.items())),
        "commands": dict(commands.most_common()),
        "damaged": sum(bool(outcome.case.damages) for outcome in outcomes),
        "median_s": seconds[len(seconds) // 2],
        "slowest_s": seconds[-1],
        "faults": [{"case": o.case.number, "command": o.command, "fault": f} for o in outcomes for f in o.faults],
    }


if __name__ == "__main__":
    main()
