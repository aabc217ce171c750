"""Throughput and memory of the loader, against a pyarrow scan of the same columns.

    python benchmarks/streaming.py [--events 20000000] [--repeats 5] [--presets NAME ...] [--out FILE.json]

Each measurement runs in a separate process; loader and pyarrow alternate. The ratio is rows per second of the loader
over pyarrow, reported with the spread of pyarrow against itself. Memory is the peak resident size above that of a
process that only imported the same modules.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import record

COLUMNS = ["user_id", "item_id", "timestamp"]
MEAN_LENGTH = {"kuairand": 9_300, "ml1m": 173, "heavy": 157}


def scan(path: str) -> int:
    import pyarrow.dataset as ds

    files = [str(file) for file in sorted(Path(path).glob("*.parquet"))]
    return sum(batch.num_rows for batch in ds.dataset(files, format="parquet").to_batches(columns=COLUMNS))


def stream(path: str, order: Any, workers: int) -> int:
    from freescale.config import DataConfig
    from freescale.data.loader import Loader

    config = DataConfig(path=path, order=order, workers=workers, global_batch=256, max_history=10**6, split="none")
    return sum(len(batch) for batch in Loader(config, seed=0))


def measure(what: str, path: str, order: str, workers: int) -> dict[str, float]:
    """Run one measurement in this process; return rows, seconds and growth of resident memory."""
    import psutil
    import torch  # noqa: F401  both sides import the same modules

    import freescale.data.loader  # noqa: F401

    process = psutil.Process()
    bare = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    rows = scan(path) if what == "scan" else stream(path, order, workers)
    seconds = time.perf_counter() - begin
    done.set()
    watcher.join()
    return {"rows": rows, "seconds": seconds, "grown_mb": (peak - bare) / 2**20}


def child(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(preset: str, path: str, order: str, workers: int, repeats: int) -> dict[str, object]:
    pairs = [(child("scan", path, order, 0), child("stream", path, order, workers)) for _ in range(repeats)]
    pyarrow_speeds = [a["rows"] / a["seconds"] for a, _ in pairs]
    speeds = [b["rows"] / b["seconds"] for _, b in pairs]
    ratios = [b / a for a, b in zip(pyarrow_speeds, speeds, strict=True)]
    again = [b / a for a, b in pairwise(pyarrow_speeds)]
    return {
        "preset": preset,
        "order": order,
        "workers": workers,
        "rows": int(pairs[0][1]["rows"]),
        "pyarrow_rows": int(pairs[0][0]["rows"]),
        "rows_per_second": round(statistics.median(speeds)),
        "pyarrow_rows_per_second": round(statistics.median(pyarrow_speeds)),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "pyarrow_against_itself": [round(min(again), 3), round(max(again), 3)] if again else [],
        "memory_grown_mb": round(max(b["grown_mb"] for _, b in pairs)),
        "pyarrow_memory_grown_mb": round(max(a["grown_mb"] for a, _ in pairs)),
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        what, path, order, workers = sys.argv[2:]
        print(json.dumps(measure(what, path, order, int(workers))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--presets", nargs="+", choices=MEAN_LENGTH, default=MEAN_LENGTH)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from freescale.data import synthetic

    results = []
    with tempfile.TemporaryDirectory() as folder:
        for preset in options.presets:
            path = f"{folder}/{preset}"
            manifest = synthetic.write_log(path, preset, users=max(64, options.events // MEAN_LENGTH[preset]))
            for order in ("shuffle", "log"):
                result = compare(preset, path, order, workers=2, repeats=options.repeats)
                results.append({"events": manifest.events, **result})
                print(json.dumps(results[-1]), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
