"""What replicated rows do to row traffic between hosts: 8 ranks on 2 hosts (network namespaces).

    python benchmarks/popular_rows.py [--mbit 200] [--out benchmarks/results/popular_rows.json]

Items of production popularity, numbered by it, on emulated compute. Steps without replicated rows, with as many as
`auto` chooses, and with ten times as many take turns on the same batches; `without again` gives the noise. Row bytes
between hosts are counted where the transports hand rows to gloo; those of the links include all-reduces.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tests.support.lab import lab

from freescale.data import synthetic, writer
from freescale.data.vocabulary import VOCABULARY_FILE
from freescale.embedding.replicated_rows import Requesters, choose_replicated
from processes import on_ranks
from record import save
from two_level import measured

LENGTH = 50


def write_popular(folder: Path, users: int, items: int) -> np.ndarray:
    """Write histories whose items are numbered by popularity, with their counts; return the counts."""
    rng, lengths = np.random.default_rng(0), np.full(users, LENGTH)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    drawn = synthetic.draw_items(int(offsets[-1]), items, "production", rng)
    counts = np.bincount(drawn, minlength=items)
    order = np.argsort(-counts, kind="stable")
    number = np.empty(items, dtype=np.int64)
    number[order] = np.arange(items)
    user = np.arange(users, dtype=np.int64)
    columns = {"user_id": user, "item_id": synthetic.list_array(offsets, number[drawn])}
    columns |= {"timestamp": synthetic.list_array(offsets, synthetic.draw_times(user, offsets, rng))}
    with writer.atomic_folder(folder) as created:
        writer.write_dataset(created, [pa.table(columns)], rows_per_group=64, items=items)
    pq.write_table(pa.table({"key": np.arange(items), "count": counts[order]}), folder / VOCABULARY_FILE)
    return counts[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=64, help="of a rank")
    parser.add_argument("--overlap", default="off,on")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder, lab(options.hosts) as hosts:
        counts = write_popular(Path(folder) / "data", 16 * options.ranks * options.samples, options.items)
        local, events = options.ranks / options.hosts, options.samples * (LENGTH - 1)
        asked = Requesters(options.hosts, local, events, options.ranks)
        chosen = choose_replicated(counts / counts.sum(), asked, drawn=1 / options.items)
        lanes = {"without": {}, "chosen": {"replicated_rows": chosen.rows}}
        lanes |= {"ten times": {"replicated_rows": 10 * chosen.rows}, "without again": {}}
        hosts.shape(options.mbit or None)
        for overlap in options.overlap.split(","):
            words = Path(folder) / "data", Path(folder) / "runs", overlap, options.turns, options.steps
            found = on_ranks(measured, options.ranks, *words, lanes, 1, options.samples, lab=hosts)
            results.append({"chosen_rows": chosen.rows, "chosen_saves": chosen.saved / chosen.sent, **found})
            print(json.dumps(results[-1], indent=1), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
