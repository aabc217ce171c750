"""Measures whether the rules of `model.memory` keep the quality of attention to all earlier events.

    freescale data import ml-1m ml-1m.zip data/ml1m
    python benchmarks/memory_quality.py --ml-1m data/ml1m --foursquare NYC.npy [--seeds 3] [--epochs 20] [--out F.json]

HSTU on histories of up to 1,000 events, the last event of each user held out and ranked against all items. Rules: all
earlier events (full); a history of the last 100 events alone, in training and evaluation (last); segments of 100 events
with 8 summary tokens (segments); the last 100 events and the first 16 (local). All have the same settings, which were
not tuned. Pairs: visible pairs of the training histories over those of full. Recommended are items that are not in the
history (ml-1m), or all (foursquare-nyc, where users return to places). With --out, runs that the file holds already are
kept and not repeated.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.balance.cost import sizes
from freescale.config import DataConfig, ModelConfig, RunConfig, TablesConfig, TaskConfig, TrainConfig
from freescale.data import writer
from freescale.data.synthetic import list_array
from freescale.train.build import build
from freescale.transport.world import destroy_world, init_world
from freescale.visibility import Visibility
from record import save

LONGEST, RECENT = 1000, 100
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "last": {},
    "segments": {"memory": "segments", "segment": RECENT, "summaries": 8},
    "local": {"memory": "local", "window": RECENT, "first": 16},
}


def write_foursquare(source: Path, folder: Path) -> None:
    """Write the check-ins of each user in the order of time."""
    user, place, minute = np.load(source, allow_pickle=False).T.astype(np.int64)
    order = np.lexsort([minute, user])
    users, lengths = np.unique(user, return_counts=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    places, item = np.unique(place[order], return_inverse=True)
    time = 60 * (minute[order] - minute.min())
    columns = {"item_id": list_array(offsets, item), "timestamp": list_array(offsets, time)}
    table = pa.table({"user_id": pa.array(users), **columns})
    writer.write_dataset(folder, [table], rows_per_group=64, items=len(places))


def config_of(data: Path, rule: str, seed: int, *, epochs: int, exclude_seen: bool) -> RunConfig:
    return RunConfig(
        seed=seed,
        data=DataConfig(path=str(data), global_batch=64, max_history=RECENT if rule == "last" else LONGEST, shards=8),
        model=ModelConfig(dim=48, layers=2, heads=1, dropout=0.2, **RULES[rule]),
        task=TaskConfig(negatives=64, seen="exclude" if exclude_seen else "allow"),
        tables=TablesConfig(placement="replicated"),
        train=TrainConfig(epochs=epochs, evaluate_every=max(1, epochs // 4), log_every=10**6, save_every=10**6),
    )


def visible_pairs(data: Path, config: RunConfig) -> float:
    """Return the visible pairs of all training histories."""
    files = [file for file in sorted(data.glob("*.parquet")) if "item_id" in pq.read_schema(file).names]
    columns = [pq.read_table(file, columns=["item_id"])["item_id"].combine_chunks() for file in files]
    lists = [column for column in columns if pa.types.is_list(column.type) or pa.types.is_large_list(column.type)]
    lengths: NDArray[np.int64] = np.concatenate([column.value_lengths().to_numpy() for column in lists]) - 1
    shortened = np.minimum(lengths, config.data.max_history)
    return float(sizes(shortened, visibility=Visibility.of_model(config.model))[1].sum())


def train(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Train; return the metrics of the last evaluation and the curve."""
    trainer = build(config, init_world(timeout=600), folder, quiet=True)
    trainer.fit()
    trainer.close()
    destroy_world()
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [entry for entry in entries if entry["kind"] == "evaluate"]
    last = evaluated[-1]
    return {
        **{name: round(last[name], 4) for name in ("hr@10", "ndcg@10", "mrr")},
        "users": last["users"],
        "curve": {entry["step"]: round(entry["hr@10"], 4) for entry in evaluated},
    }


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and range of every rule on every data set, against full."""
    found: list[dict[str, Any]] = []
    for data in dict.fromkeys(run["data"] for run in runs):
        means: dict[str, float] = {}
        for rule in RULES:
            rates = [run["hr@10"] for run in runs if (run["data"], run["memory"]) == (data, rule)]
            if not rates:
                continue
            means[rule] = statistics.mean(rates)
            (share, *_) = (run["pair_share"] for run in runs if (run["data"], run["memory"]) == (data, rule))
            row = {"data": data, "memory": rule, "pair_share": share, "seeds": len(rates)}
            spread = [min(rates), max(rates)]
            found.append(row | {"hr@10": round(means[rule], 4), "hr@10_range": spread})
            if "full" in means:
                found[-1]["over_full"] = round(means[rule] / means["full"], 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ml-1m", type=Path, help="folder of `freescale data import`")
    parser.add_argument("--foursquare", type=Path, help="NYC.npy: user, place, minute")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    known = json.loads(options.out.read_text())["results"] if options.out and options.out.exists() else []
    runs = [run for run in known if "seed" in run]
    with tempfile.TemporaryDirectory() as place:
        folders = {"ml-1m": options.ml_1m} if options.ml_1m else {}
        if options.foursquare:
            folders["foursquare-nyc"] = Path(place) / "foursquare"
            write_foursquare(options.foursquare, folders["foursquare-nyc"])
        for seed, data, rule in [(s, d, r) for s in range(options.seeds) for d in folders for r in RULES]:
            settings = {"data": data, "memory": rule, "seed": seed, "epochs": options.epochs}
            if any(settings.items() <= run.items() for run in runs):
                continue
            exclude = data == "ml-1m"
            configs = {r: config_of(folders[data], r, seed, epochs=options.epochs, exclude_seen=exclude) for r in RULES}
            pairs = {r: visible_pairs(folders[data], config) for r, config in configs.items()}
            share = round(pairs[rule] / pairs["full"], 4)
            runs.append(settings | {"pair_share": share} | train(configs[rule], Path(place) / f"{data}-{rule}-{seed}"))
            print(json.dumps(runs[-1]), flush=True)
            save(options.out, runs + summarize(runs))
    save(options.out, runs + summarize(runs))
    for row in summarize(runs):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
