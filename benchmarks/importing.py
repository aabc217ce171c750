"""Peak memory of an import against the size of its log.

    python benchmarks/importing.py [--events 20000000 60000000] [--memory-mb 256] [--out FILE.json]

Writes unordered CSV event logs of growing size and imports each in a separate process. The peak must not grow with the
log. Also reports the number of bucket files on disk and of events in the data set.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq

import record

CHUNK = 1_000_000


def write_log(path: Path, events: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        file.write("user_id,item_id,timestamp\n")
        for begin in range(0, events, CHUNK):
            count = min(CHUNK, events - begin)
            columns = [
                rng.integers(0, events // 100, count),
                rng.integers(0, 100_000, count),
                rng.integers(0, 10**9, count),
            ]
            np.savetxt(file, np.stack(columns, axis=1), fmt="%d", delimiter=",")


def measure(log: Path, target: Path, memory_mb: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "freescale",
        "data",
        "import",
        "events",
        log,
        target,
        "--memory-mb",
        str(memory_mb),
    ]
    begin = time.perf_counter()
    child = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    process, peak, buckets = psutil.Process(child.pid), 0, 0
    while child.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
        except psutil.Error:
            break
        buckets = max(buckets, len(list(target.parent.glob(".freescale-import-*/buckets-events/*"))))
        time.sleep(0.02)
    if child.wait() != 0:
        raise RuntimeError(f"the import ended with {child.returncode}")
    seconds = round(time.perf_counter() - begin, 1)
    found = {"buckets": buckets, "imported_events": events_in(target)}
    return {"seconds": seconds, "peak_mb": round(peak / 2**20), **found}


def events_in(folder: Path) -> int:
    """Events of all histories of a data set, counted in its files."""
    files = [pq.ParquetFile(path) for path in folder.rglob("*.parquet")]
    logs = [file for file in files if "item_id" in file.schema_arrow.names]
    return sum(
        len(batch.column("item_id").flatten()) for file in logs for batch in file.iter_batches(columns=["item_id"])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[20_000_000, 60_000_000])
    parser.add_argument("--memory-mb", type=int, default=256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for events in options.events:
            log = Path(folder) / "log.csv"
            write_log(log, events)
            size = log.stat().st_size / 2**20
            measured = measure(log, Path(folder) / f"data-{events}", options.memory_mb)
            results.append({"events": events, "log_mb": round(size), "memory_mb": options.memory_mb, **measured})
            print(json.dumps(results[-1]), flush=True)
    record.save(options.out, results)


if __name__ == "__main__":
    main()
