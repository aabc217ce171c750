"""Ranking on MovieLens-1M: what features bring, above all for items with few ratings.

    freescale data import ml-1m ml-1m.zip data/ml1m
    python benchmarks/movielens_ranking.py --data data/ml1m [--out benchmarks/results/movielens_ranking.json]

A rating of at least 4 is the label, and every rating is a target that sees the earlier ones. The last fifth of the time
is held out: its ratings see all earlier ratings of their user. HSTU with the item alone, and with genres, year, gender,
age and occupation; in both the history shows how each film was rated. Beside them: logistic regression of the same
features (needs scikit-learn) and popularity, the mean label of the film in training. AUC over all held-out ratings,
and over films with fewer than 50 ratings in training.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from freescale.config import DataConfig, FeatureConfig, ModelConfig, RunConfig, TablesConfig, TaskConfig, TrainConfig
from freescale.data import writer
from freescale.data.dataset import Dataset
from freescale.data.loader import Loader
from freescale.train.build import build
from freescale.train.ranking_metrics import Ranker, auc_by_group
from freescale.transport.world import destroy_world, init_world
from record import save

LIKED, FEW, HELD_OUT = 4.0, 50, 0.2
RATED = {"rating": FeatureConfig(scope="event", rows=6)}
FEATURES = {
    "genres": FeatureConfig(kind="set"),
    "year": FeatureConfig(kind="number", scaling="quantiles", buckets=16),
    "gender": FeatureConfig(scope="user"),
    "age": FeatureConfig(scope="user"),
    "occupation": FeatureConfig(scope="user"),
}


def prepare(source: Path, target: Path) -> int:
    """Copy the log with the label `liked`; return the first held-out timestamp."""
    tables = [pq.read_table(file) for file in sorted(source.glob("*.parquet")) if "vocabulary" not in file.name]
    log = pa.concat_tables([table for table in tables if "item_id" in table.column_names]).combine_chunks()
    ratings = log["rating"].chunk(0)
    values = ratings.values.to_numpy(zero_copy_only=False)
    lists = {
        "label_liked": pa.ListArray.from_arrays(ratings.offsets, pa.array((values >= LIKED).astype(np.float32))),
        "rating": pa.ListArray.from_arrays(ratings.offsets, pa.array(values.astype(np.int64))),
    }
    for name, column in lists.items():
        log = (
            log.set_column(log.column_names.index(name), name, column)
            if name in log.column_names
            else log.append_column(name, column)
        )
    manifest = Dataset(str(source)).manifest
    assert manifest is not None
    kept = log.drop_columns([name for name in log.column_names if name.startswith("label_rating") or name == "zip"])
    with writer.atomic_folder(target) as folder:
        writer.write_dataset(folder, [kept], rows_per_group=32, items=manifest.items, features=manifest.features)
    times = np.sort(kept["timestamp"].combine_chunks().flatten().to_numpy())
    return int(times[int(len(times) * (1 - HELD_OUT))])


def config_of(
    data: Path, split: int, seed: int, options: argparse.Namespace, features: dict[str, FeatureConfig]
) -> RunConfig:
    return RunConfig(
        seed=seed,
        data=DataConfig(path=str(data), global_batch=64, max_history=200, split="time", split_time=split, shards=8),
        model=ModelConfig(dim=options.dim, layers=2, heads=1, dropout=0.2),
        task=TaskConfig(kind="ranking", labels=("label_liked",), anchors="labeled"),
        features=RATED | features,
        tables=TablesConfig(lr=0.02, placement="replicated"),
        train=TrainConfig(epochs=options.epochs, lr=2e-3, warmup_steps=300, decay="cosine", log_every=10**6),
    )


class HeldOut:
    """Predictions, labels and items of the held-out ratings."""

    def __init__(self, config: RunConfig, out: Path) -> None:
        world = init_world(timeout=600)
        trainer = build(config, world, out, quiet=True)
        trainer.fit()
        ranker = Ranker(trainer.components.module, world.device)
        data = replace(config.data, global_batch=256)
        found = []
        for batch in Loader.from_run(config, data=data, part="test"):
            assert batch.candidates is not None
            predicted, label = ranker.predict(batch)
            found.append((predicted[:, 0].numpy(), label[:, 0].numpy(), batch.candidates["candidate_id"].numpy()))
        trainer.close()
        destroy_world()
        self.predicted, self.label, self.item = (np.concatenate(column) for column in zip(*found, strict=True))


def auc(predicted: NDArray[Any], label: NDArray[Any], chosen: NDArray[Any]) -> float:
    """Return the AUC over the chosen ratings."""
    return float(auc_by_group(predicted[chosen], label[chosen], np.zeros(int(chosen.sum())))[0][0])


def rows_of(data: Path, split: int) -> dict[str, NDArray[Any]]:
    """Return all ratings as columns: features, label and whether they are held out."""
    table = pa.concat_tables([pq.read_table(f) for f in sorted(data.glob("*.parquet"))]).combine_chunks()
    lengths = table["item_id"].chunk(0).value_lengths().to_numpy()
    found = {
        n: table[n].chunk(0).flatten().to_numpy(zero_copy_only=False)
        for n in ("item_id", "year", "label_liked", "timestamp")
    }
    found |= {n: np.repeat(table[n].to_numpy(), lengths) for n in ("gender", "age", "occupation")}
    genres = table["genres"].chunk(0).flatten()
    members, entry = genres.flatten().to_numpy(), np.repeat(np.arange(len(genres)), genres.value_lengths().to_numpy())
    many = np.zeros((len(genres), int(members.max()) + 1), dtype=np.float32)
    many[entry, members] = 1
    return found | {"genres": many, "held_out": found["timestamp"] >= split}


def baselines(data: Path, split: int) -> dict[str, dict[str, float]]:
    """Return the AUC of logistic regression of the features, and of popularity."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-not-found]
    from sklearn.preprocessing import OneHotEncoder  # type: ignore[import-not-found]

    rows = rows_of(data, split)
    test, label, item = rows["held_out"], rows["label_liked"], rows["item_id"]
    counts = np.bincount(item[~test], minlength=int(item.max()) + 1)
    rare = counts[item[test]] < FEW
    liked = np.bincount(item[~test], label[~test], minlength=len(counts))
    mean = (liked + 10 * label[~test].mean()) / (counts + 10)
    year = np.digitize(rows["year"], np.quantile(rows["year"][~test], np.linspace(0, 1, 17)[1:-1]))
    ids = np.stack([rows["gender"], rows["age"], rows["occupation"], year], axis=1)
    dense = np.concatenate([OneHotEncoder(sparse_output=False).fit_transform(ids), rows["genres"]], axis=1)
    model = LogisticRegression(max_iter=200).fit(dense[~test], label[~test])
    predicted = {"logistic regression": model.predict_proba(dense[test])[:, 1], "popularity": mean[item[test]]}
    return {
        name: {"all": auc(of, label[test], np.ones(len(of), bool)), "rare": auc(of, label[test], rare)}
        for name, of in predicted.items()
    } | {"held_out": {"all": int(test.sum()), "rare": int(rare.sum())}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        split = prepare(options.data, data)
        result: dict[str, Any] = baselines(data, split)
        print(json.dumps(result), flush=True)
        train = rows_of(data, split)
        counts = np.bincount(train["item_id"][~train["held_out"]], minlength=int(train["item_id"].max()) + 1)
        models: dict[str, dict[str, FeatureConfig]] = {"ids": {}, "features": FEATURES}
        found: dict[str, dict[str, list[float]]] = {name: {"all": [], "rare": []} for name in models}
        for seed, name in itertools.product(options.seeds, models):
            held = HeldOut(config_of(data, split, seed, options, models[name]), Path(folder) / f"{name}-{seed}")
            rare = counts[held.item] < FEW
            found[name]["all"].append(auc(held.predicted, held.label, np.ones(len(rare), bool)))
            found[name]["rare"].append(auc(held.predicted, held.label, rare))
            print(name, seed, found[name]["all"][-1], found[name]["rare"][-1], flush=True)
    for name, of_model in found.items():
        result[name] = {key: {"mean": statistics.mean(of), "seeds": of} for key, of in of_model.items()}
    print(json.dumps(result, indent=1))
    save(options.out, [result])


if __name__ == "__main__":
    main()
