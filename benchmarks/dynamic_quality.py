"""Quality of dynamic ids on catalogues that change: HR@10 of the next day, all with the same number of table rows.

    python benchmarks/dynamic_quality.py [--seeds 3] [--items 1000] [--sessions 1000] [--foursquare NYC.npy] [--out F]

Trains one epoch in the order of days and recommends the last event of every session of the days that follow. Three
tables: `dynamic`, with eviction of the least recently used; `hashed`, where an id has the row of its hash; `fixed`, the
vocabulary of the items that are most frequent in the 10 days up to day 30, then before, in which later items share 16
rows. Ten items are recommended. Items without a row of their own are misses for `dynamic` and `fixed`. Each of the ten
best rows of `hashed` stands for its item that is most frequent in the last 10 days (`hr@10_of_rows`: for all of them).
`dynamic` has one more shared row for each of its 64 buckets. All have the same settings, which were not tuned.

Data sets: `drift`, see `freescale.data.synthetic_drift`, `--sessions` per day, the last day is held out;
foursquare-nyc, a session per user and day after up to 20 earlier events, the last 7 days are held out.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from freescale.config import DataConfig, FeatureConfig, ModelConfig, RunConfig, TablesConfig, TaskConfig, TrainConfig
from freescale.data import writer
from freescale.data.loader import Loader
from freescale.data.order import splitmix64
from freescale.data.synthetic import list_array
from freescale.data.synthetic_drift import DAYS, write_drift_log
from freescale.data.vocabulary import RAW_IDS
from freescale.train.build import build
from freescale.train.evaluation import Corpus
from freescale.transport.world import destroy_world, init_world
from record import save

Ints = NDArray[np.int64]
VOCABULARY_DAY, RECENT_DAYS, SHARED_ROWS, CONTEXT, DAY = 30, 10, 16, 20, 86_400
TABLES = ("dynamic", "hashed", "fixed")


class Sessions(NamedTuple):
    """Sessions in the order of days."""

    offsets: Ints
    item: Ints
    time: Ints
    day: Ints
    """Of each session."""
    rows: int
    """Of every table."""
    held_out: int
    """The first day that is held out."""


def drift(folder: Path, items: int, per_day: int, seed: int) -> Sessions:
    """Generate sessions of a catalogue that changes."""
    write_drift_log(folder / "drift", users=per_day * DAYS, catalogue=items, seed=seed)
    files = sorted((folder / "drift").glob("*.parquet"))  # groups of rows are dealt to them
    table = pa.concat_tables([pq.read_table(file) for file in files]).sort_by("user_id")
    column = table["item_id"].combine_chunks()
    offsets = np.concatenate([[0], np.cumsum(column.value_lengths().to_numpy())])
    time = table["timestamp"].combine_chunks().flatten().to_numpy()
    day = time[offsets[:-1]] // DAY - time[0] // DAY
    return Sessions(offsets, column.flatten().to_numpy(), time, day, _whole_buckets(items * 4 // 3), DAYS - 1)


def foursquare(path: Path) -> Sessions:
    """Return the check-ins of each user on each day, after some earlier ones."""
    user, place, minute = np.load(path, allow_pickle=False).T.astype(np.int64)
    order = np.lexsort([minute, user])
    user, place, minute = user[order], place[order], minute[order] - minute.min()
    day = minute // (24 * 60)
    begin = np.flatnonzero(np.diff(user * 10**6 + day, prepend=-1))
    end = np.append(begin[1:], len(user))
    first = np.maximum(begin - CONTEXT, np.searchsorted(user, user[begin]))
    by_day = np.argsort(day[begin], kind="stable")
    parts = [np.arange(first[i], end[i]) for i in by_day if end[i] - first[i] > 1]
    kept = np.array([i for i in by_day if end[i] - first[i] > 1])
    events, offsets = np.concatenate(parts), np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    rows = _whole_buckets(len(np.unique(place)) // 2)
    return Sessions(offsets, place[events], 60 * minute[events], day[begin][kept], rows, int(day.max()) - 6)


def _whole_buckets(rows: int) -> int:
    return -(-rows // 64) * 64


def item_ids(sessions: Sessions, table: str) -> tuple[Ints, int]:
    """Return the ids that a table has for the items, and how many of them have a row; 0 for raw ids."""
    if table == "dynamic":
        return sessions.item, 0
    if table == "hashed":
        return (splitmix64(sessions.item) % np.uint64(sessions.rows)).astype(np.int64), sessions.rows
    day = np.repeat(sessions.day, np.diff(sessions.offsets))
    items, order = by_frequency(sessions.item, day, before=VOCABULARY_DAY + 1)
    kept = np.sort(items[order[: sessions.rows - SHARED_ROWS]])
    place = np.searchsorted(kept, sessions.item).clip(max=len(kept) - 1)
    hashed = len(kept) + (splitmix64(sessions.item) >> np.uint64(2)).astype(np.int64)
    return np.where(kept[place] == sessions.item, place, hashed), len(kept)


def by_frequency(item: Ints, day: Ints, *, before: int) -> tuple[Ints, Ints]:
    """Return the items before a day, and their order: by how often they occur in the 10 days before it, then at all."""
    known, day = item[day < before], day[day < before]
    items, index, total = np.unique(known, return_inverse=True, return_counts=True)
    recent = np.bincount(index, day >= before - RECENT_DAYS)
    return items, np.lexsort([-total, -recent])


def write(sessions: Sessions, ids: Ints, items: int, chosen: NDArray[np.bool_], folder: Path) -> None:
    """Write the chosen sessions as a data set."""
    rows, lengths = np.flatnonzero(chosen), np.diff(sessions.offsets)
    events = np.repeat(chosen, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths[rows])])
    columns = {"item_id": list_array(offsets, ids[events]), "timestamp": list_array(offsets, sessions.time[events])}
    vocabulary = RAW_IDS if not items else ""
    table = pa.table({"user_id": pa.array(rows), **columns})
    writer.write_dataset(folder, [table], rows_per_group=64, items=items, vocabulary=vocabulary)


def hit_rate(sessions: Sessions, table: str, seed: int, folder: Path) -> dict[str, float]:
    """Train with a kind of table; return the metrics of the held-out days."""
    ids, items = item_ids(sessions, table)
    held_out = sessions.day >= sessions.held_out
    write(sessions, ids, items, ~held_out, folder / "train")
    write(sessions, ids, items, held_out, folder / "test")
    config = RunConfig(
        seed=seed,
        data=DataConfig(
            path=str(folder / "train"), test_path=str(folder / "test"), split="none", order="log", global_batch=64,
            shards=8, max_history=40, oov_rows=SHARED_ROWS,
        ),
        model=ModelConfig(dim=32, layers=1, heads=1, dropout=0.1),
        task=TaskConfig(negatives=64, seen="allow"),
        tables=TablesConfig(lr=0.1, overlap="off"),
        train=TrainConfig(epochs=1, lr=3e-3, log_every=10**6, save_every=10**6),
    )  # fmt: skip
    if table == "dynamic":
        config = replace(config, features={"item": FeatureConfig(ids="dynamic", rows=sessions.rows, eviction="lru")})
    trainer = build(config, init_world(timeout=600), folder / "run", quiet=True)
    trainer.fit()
    entries = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = next(entry for entry in entries if entry["kind"] == "evaluate")
    found = {name: metrics[name] for name in ("hr@10", "users", "unknown_targets")}
    if table == "hashed":
        corpus = Corpus(trainer.components.module, items, torch.device("cpu"), exclude_seen=False)
        found |= {"hr@10": hit_rate_of_items(sessions, ids, corpus, config), "hr@10_of_rows": metrics["hr@10"]}
    trainer.close()
    destroy_world()
    return found


def hit_rate_of_items(sessions: Sessions, ids: Ints, corpus: Corpus, config: RunConfig) -> float:
    """Recommend the ten items that are the most frequent ones of the ten best rows."""
    held_out = sessions.day >= sessions.held_out
    day = np.repeat(sessions.day, np.diff(sessions.offsets))
    items, order = by_frequency(sessions.item, day, before=sessions.held_out)
    row = dict(zip(sessions.item.tolist(), ids.tolist(), strict=True))
    of_row = {row[item]: item for item in items[order][::-1].tolist()}  # the first one of a row stays
    targets = sessions.item[sessions.offsets[1:] - 1][held_out]
    data, hits = replace(config.data, path=config.data.test_path, test_path="", split="last"), 0
    for batch in Loader.from_run(config, data=data, part="test"):
        for sample, rows in zip(batch.sample_id.tolist(), corpus.top(batch, 10)[0].tolist(), strict=True):
            hits += int(targets[sample]) in [of_row.get(row) for row in rows]
    return hits / len(targets)


def summarize(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the hit rates of all seeds, and their means and ranges."""
    rates = {table: [metrics["hr@10"] for metrics in found[table]] for table in found}
    return {
        "held_out_sessions": found["dynamic"][0]["users"],
        "hr@10": rates,
        "hr@10_of_rows": {"hashed": [metrics["hr@10_of_rows"] for metrics in found["hashed"]]},
        "mean": {table: float(np.mean(values)) for table, values in rates.items()},
        "spread": {table: max(values) - min(values) for table, values in rates.items()},
        "unknown_targets": {t: float(np.mean([m["unknown_targets"] for m in found[t]])) for t in found},
        "dynamic_is_best": all(min(rates["dynamic"]) > max(rates[table]) for table in TABLES[1:]),
    }


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train with each kind of table and each seed, in turns."""
    found: dict[str, list[dict[str, float]]] = {table: [] for table in TABLES}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            work = Path(folder) / str(seed)
            if name == "drift":
                sessions = drift(work, options.items, options.sessions, seed)
            else:
                sessions = foursquare(options.foursquare)
            for table in TABLES:
                found[table].append(hit_rate(sessions, table, seed, work / table))
                print(f"{name}, seed {seed}, {table}: {found[table][-1]}", flush=True)
            events = int(sessions.offsets[np.searchsorted(sessions.day, sessions.held_out)])
            sizes = {"rows": sessions.rows, "training_events": events}
    return {"data": name, **sizes, **summarize(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--foursquare", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for name in ("drift", "foursquare-nyc") if options.foursquare else ("drift",):
        results.append(compare(name, options))
        print(json.dumps(results[-1]), flush=True)
        save(options.out, results)


if __name__ == "__main__":
    main()
