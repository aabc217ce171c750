"""Fuzz every file reader (see `tests.support.fuzz`).

python benchmarks/fuzz.py [--examples 10000] [--targets config data ...] [--out FILE.json]
"""

import argparse
import json
from pathlib import Path

from tests.support.fuzz import TARGETS, fuzz

import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.targets:
        results.append({"target": name, **fuzz(TARGETS[name], options.examples)})
        print(json.dumps(results[-1]), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
