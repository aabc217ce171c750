"""Synthetic logs with features have the documented columns and signal; a reader of the columns reaches the optimum."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from freescale.cli.main import main
from freescale.data import synthetic, synthetic_features
from freescale.data.manifest import MANIFEST_FILE, parse_manifest
from freescale.data.synthetic import GROUPS
from freescale.data.synthetic_signal import REGIONS, SIGNALS, Catalogue, FeaturePreset, ends_of

CATALOGUE = 200
SIZES: dict[FeaturePreset, tuple[int, int]] = {"yambda": (1200, 64), "kuairand-ranking": (3000, 400)}
"""Users, and the factor by which their histories are shorter."""
LABELS = [(preset, label) for preset, labels in SIGNALS.items() for label in labels]
Parts = dict[FeaturePreset, tuple[pa.Table, pa.Table]]
Ints, Floats = NDArray[np.int64], NDArray[np.float64]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    for preset in SIZES:
        for name, seed in (("log", 0), ("unseen", 1)):
            write(folder / preset / name, preset, seed)
    return folder


def write(folder: Path, preset: FeaturePreset, seed: int) -> None:
    users, shorter = SIZES[preset]
    synthetic_features.write_feature_log(folder, preset, users=users, catalogue=CATALOGUE, shorter=shorter, seed=seed)


def table(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("*.parquet"))]).combine_chunks()


EVENT_COLUMNS = {
    "yambda": {
        **{name: pa.int64() for name in ("artist_id", "album_id", "device_type", "action")},
        "is_organic": pa.int8(),
        **{name: pa.float32() for name in ("played_ratio_pct", "label_full_listen", "label_like")},
        **{name: pa.float64() for name in ("true_full_listen", "true_like")},
    },
    "kuairand-ranking": {
        "author_id": pa.int64(),
        "tags": pa.list_(pa.int64()),
        "duration": pa.float32(),
        "action": pa.int64(),
    },
}
CANDIDATE_COLUMNS = {
    "candidate_id": pa.int64(),
    "candidate_author_id": pa.int64(),
    "candidate_tags": pa.list_(pa.int64()),
    "candidate_duration": pa.float32(),
    **{f"label_{name}": pa.int8() for name in ("click", "like", "long_view")},
    "label_play_time": pa.float32(),
    **{f"true_{name}": pa.float64() for name in ("click", "like", "long_view", "play_time")},
}
USER_COLUMNS = {
    "user_id": pa.int64(),
    "region": pa.int64(),
    "subscription": pa.int64(),
    "devices": pa.list_(pa.int64()),
    "account_age": pa.float32(),
}
NULLABLE = {"account_age", "played_ratio_pct"}


@pytest.mark.parametrize("preset", SIZES)
def test_columns_have_the_documented_types_lengths_and_vocabularies(logs: Path, preset: FeaturePreset) -> None:
    made, file = table(logs / preset / "log"), logs / preset / "log" / MANIFEST_FILE
    manifest = parse_manifest(file.read_bytes(), str(file))
    ranking = preset == "kuairand-ranking"
    lists = {"item_id": pa.int64(), "timestamp": pa.int64(), **EVENT_COLUMNS[preset]}
    shown = CANDIDATE_COLUMNS if ranking else {}
    scalars = {**USER_COLUMNS, **({"tab": pa.int64(), "hour": pa.int64()} if ranking else {})}
    expected = {**scalars, **{name: pa.list_(kind) for name, kind in (*lists.items(), *shown.items())}}
    assert {field.name: field.type for field in made.schema} == expected
    for names, key in ((lists, "item_id"), (shown, "candidate_id")):
        for name in names:
            assert made[name].chunk(0).offsets.equals(made[key].chunk(0).offsets), name
    for name in made.column_names:
        values = made[name].chunk(0)
        while pa.types.is_list(values.type):
            assert not values.null_count
            values = values.flatten()
        missing = values.null_count / len(values)
        may_miss = name in NULLABLE or (name.startswith("label_") and not ranking)
        assert 0.03 < missing < 0.4 if may_miss else missing == 0, name
        feature = name.removeprefix("candidate_")
        if feature in manifest.features:
            assert (np.unique(values.to_numpy())[[0, -1]] == (0, manifest.features[feature] - 1)).all(), name
    numbers = {"user_id", "item_id", "timestamp", "action", "account_age", "is_organic", "played_ratio_pct", "duration"}
    columns = {name for name in expected if not name.startswith(("candidate_", "label_", "true_"))}
    assert set(manifest.features) == columns - numbers
    assert (manifest.items, manifest.rows) == (CATALOGUE, SIZES[preset][0])


def test_an_item_has_one_artist_and_an_album_of_that_artist(logs: Path) -> None:
    seen = [
        set(
            zip(
                *(log[name].chunk(0).flatten().to_pylist() for name in ("item_id", "artist_id", "album_id")),
                strict=True,
            )
        )
        for log in (table(logs / "yambda" / name) for name in ("log", "unseen"))
    ]
    facts = seen[0] | seen[1]
    assert len(facts) == len({item for item, _, _ in facts}) == CATALOGUE
    assert len({(artist, album) for _, artist, album in facts}) == len({album for _, _, album in facts})
    assert len({album for _, _, album in facts}) > len({artist for _, artist, _ in facts}) > GROUPS


def test_actions_agree_with_played_ratios_labels_and_devices(logs: Path) -> None:
    for row in table(logs / "yambda" / "log").slice(0, 100).to_pylist():
        assert set(row["device_type"]) <= set(row["devices"])
        assert sorted(set(row["devices"])) == row["devices"]
        names = ("action", "played_ratio_pct", "label_full_listen", "label_like", "is_organic")
        for action, played, full, like, organic in zip(*(row[name] for name in names), strict=True):
            assert action == 1 + 2 * bool(full) + 4 * bool(like) + 16 * organic
            assert (played is None) == (full is None)
            assert played is None or (0 <= played <= 100 and (played >= 50) == bool(full))


def chance(preset: FeaturePreset, label: str, share: float, **facts: float) -> float:
    """Recompute a probability with plain Python."""
    weights = SIGNALS[preset][label]._asdict()
    odds = weights["bias"] + weights["share"] * (share - 0.5) + sum(weights[name] * facts[name] for name in facts)
    return 1 / (1 + math.exp(-odds))


def test_probabilities_of_listens_follow_from_the_columns_of_earlier_events(logs: Path) -> None:
    good = Catalogue.from_size(CATALOGUE).good
    for row in table(logs / "yambda" / "log").slice(0, 60).to_pylist():
        heard, finished = Counter[int](), Counter[int]()
        for i, artist in enumerate(row["artist_id"]):
            group = artist % GROUPS
            facts = {
                "good": good[row["item_id"][i]],
                "home": row["region"] == group,
                "limited": row["subscription"] == 0 and row["device_type"][i] < 2,
            }
            share = (finished[group] + 1) / (heard[group] + 2)
            for label in SIGNALS["yambda"]:
                assert row[synthetic.true_column(label)][i] == pytest.approx(chance("yambda", label, share, **facts))
            heard[group] += 1
            finished[group] += row["action"][i] >> 1 & 1


def test_probabilities_of_candidates_follow_from_the_columns_of_the_row(logs: Path) -> None:
    good, preset = Catalogue.from_size(CATALOGUE).good, "kuairand-ranking"
    for row in table(logs / preset / "log").slice(0, 60).to_pylist():
        groups = [{tag % GROUPS for tag in tags} for tags in row["tags"]]
        clicked = [group for group, action in zip(groups, row["action"], strict=True) if action & 1]
        for i, tags in enumerate(row["candidate_tags"]):
            (group,) = {tag % GROUPS for tag in tags}
            assert row["candidate_author_id"][i] % GROUPS == group
            assert len(set(tags)) == len(tags) > 0
            facts = {
                "good": good[row["candidate_id"][i]],
                "home": row["region"] == group,
                "limited": row["subscription"] == 0 and row["tab"] < 2,
                "duration": math.log(row["candidate_duration"][i] / 5) / math.log(120) - 0.5,
            }
            share = (clicked.count({group}) + 1) / (groups.count({group}) + 2)
            for label in SIGNALS[preset]:
                expected = chance(preset, label, share, **facts)
                assert row[synthetic.true_column(label)][i] == pytest.approx(expected, rel=1e-6)
            mean = row["candidate_duration"][i] * (0.2 + 0.6 * row["true_long_view"][i])
            assert row["true_play_time"][i] == pytest.approx(mean, rel=1e-6)
        assert row["hour"] == row["timestamp"][-1] // 3600 % 24


@pytest.mark.parametrize(("preset", "label"), LABELS)
def test_labels_follow_their_probabilities(logs: Path, preset: FeaturePreset, label: str) -> None:
    true, drawn = synthetic.planted_truth(logs / preset / "log", label)
    assert set(np.unique(drawn)) == {0.0, 1.0}
    place, bins = (true * 20).astype(int), 20
    surplus, variance = np.bincount(place, drawn - true, bins), np.bincount(place, true * (1 - true), bins)
    used = variance > 5
    assert used.sum() >= 10
    assert (surplus[used] ** 2 / variance[used]).sum() < used.sum() + 4 * math.sqrt(2 * used.sum())


def test_play_times_scatter_around_their_means(logs: Path) -> None:
    mean, drawn = synthetic.planted_truth(logs / "kuairand-ranking" / "log", "label_play_time")
    ratio = drawn / mean
    assert ratio.mean() == pytest.approx(1, abs=4 * 0.5 / math.sqrt(len(ratio)))
    assert ratio.std() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("preset", "label"), LABELS)
def test_the_planted_auc_is_that_of_all_pairs(logs: Path, tmp_path: Path, preset: FeaturePreset, label: str) -> None:
    synthetic_features.write_feature_log(tmp_path / "log", preset, users=30, catalogue=CATALOGUE, shorter=100)
    true, _ = synthetic.planted_truth(tmp_path / "log", label)
    true = true[:2000]
    pq.write_table(
        pa.table({synthetic.true_column(label): [true], label: [np.zeros(len(true))]}), tmp_path / "only.parquet"
    )
    weight = true[:, None] * (1 - true)
    above = (true[:, None] > true) + 0.5 * (true[:, None] == true)
    best = synthetic.planted_auc(tmp_path, label)
    assert best == pytest.approx((weight * above).sum() / weight.sum(), abs=1e-5)
    chances, drawn = synthetic.planted_truth(logs / preset / "log", label)
    assert auc(chances, drawn) == pytest.approx(synthetic.planted_auc(logs / preset / "log", label), abs=0.01)


def auc(scores: Floats, labels: Floats) -> float:
    """Area under the ROC curve; scores without ties."""
    place = np.empty(len(scores))
    place[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = labels.sum()
    return float((place[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive)))


class Features(NamedTuple):
    """What a reader of the columns sees: categories (with their number) and numbers, one per label."""

    categories: Mapping[str, tuple[Ints, int]]
    numbers: Mapping[str, Floats]
    labels: Floats

    def without(self, name: str) -> "Features":
        return self._replace(
            categories={key: value for key, value in self.categories.items() if key != name},
            numbers={key: value for key, value in self.numbers.items() if key != name},
        )


def read_listens(log: pa.Table, label: str) -> Features:
    row, values = flat(log, "item_id")
    region, subscription = (log[name].to_numpy()[row] for name in ("region", "subscription"))
    group = flat(log, "artist_id")[1] % GROUPS
    full = flat(log, "action")[1] >> 1 & 1
    of_group = np.eye(GROUPS)[group]
    heard, finished = (before(row, of_group * weight[:, None]) for weight in (np.ones(len(row)), full))
    at = np.arange(len(row)), group
    labels = flat(log, label)[1]
    device = flat(log, "device_type")[1]
    return Features(
        {
            "item": (values, CATALOGUE),
            "region and group": (region * GROUPS + group, REGIONS * GROUPS),
            "subscription and request": (subscription * 4 + device, 12),
        },
        {"share": (finished[at] + 1) / (heard[at] + 2)},
        labels,
    )


def read_candidates(log: pa.Table, label: str) -> Features:
    row, candidate = flat(log, "candidate_id")
    event_row, _ = flat(log, "item_id")
    group, event_group = (first_tag(log, name) % GROUPS for name in ("candidate_tags", "tags"))
    click = flat(log, "action")[1] & 1
    clicks, events = (
        np.bincount(event_row * GROUPS + event_group, weight, log.num_rows * GROUPS)[row * GROUPS + group]
        for weight in (click, None)
    )
    region, subscription, tab = (log[name].to_numpy()[row] for name in ("region", "subscription", "tab"))
    return Features(
        {
            "item": (candidate, CATALOGUE),
            "region and group": (region * GROUPS + group, REGIONS * GROUPS),
            "subscription and request": (subscription * 4 + tab, 12),
        },
        {"share": (clicks + 1) / (events + 2), "duration": np.log(flat(log, "candidate_duration")[1])},
        flat(log, label)[1].astype(np.float64),
    )


def flat(log: pa.Table, name: str) -> tuple[Ints, NDArray[Any]]:
    """Row and value of every entry of a list column."""
    column = log[name].chunk(0)
    lengths = np.diff(column.offsets.to_numpy())
    return np.repeat(np.arange(log.num_rows), lengths), column.flatten().to_numpy(zero_copy_only=False)


def first_tag(log: pa.Table, name: str) -> Ints:
    sets = log[name].chunk(0).flatten()
    return sets.flatten().to_numpy()[sets.offsets.to_numpy()[:-1] - sets.offsets[0].as_py()]


def before(row: Ints, values: Floats) -> Floats:
    """Sums over the earlier events of the same row."""
    sums = np.cumsum(values, 0) - values
    return sums - sums[np.searchsorted(row, row)]


def fit_and_score(train: Features, test: Features) -> float:
    """AUC on `test` of a logistic regression that is fitted to `train` by alternating Newton steps."""
    known = np.isfinite(train.labels)
    labels, odds = train.labels[known], np.zeros(known.sum())
    numbers = [np.stack([np.ones(len(part.labels)), *part.numbers.values()], 1) for part in (train, test)]
    inputs, score = numbers[0][known], np.zeros(len(test.labels))
    for _ in range(8):
        p = 1 / (1 + np.exp(-odds))
        step = np.linalg.solve((inputs.T * (p * (1 - p))) @ inputs, inputs.T @ (labels - p))
        odds, score = odds + inputs @ step, score + numbers[1] @ step
        for name, (category, size) in train.categories.items():
            p = 1 / (1 + np.exp(-odds))
            of = category[known]
            step = np.bincount(of, labels - p, size) / (np.bincount(of, p * (1 - p), size) + 1)
            odds, score = odds + step[of], score + step[test.categories[name][0]]
    rated = np.isfinite(test.labels)
    return auc(score[rated], test.labels[rated])


READERS = {"yambda": read_listens, "kuairand-ranking": read_candidates}


@pytest.fixture(scope="module")
def parts(logs: Path) -> Parts:
    return {preset: (table(logs / preset / "log"), table(logs / preset / "unseen")) for preset in SIZES}


@pytest.mark.parametrize(("preset", "label"), LABELS)
def test_a_reader_of_the_columns_reaches_the_planted_auc(
    logs: Path, parts: Parts, preset: FeaturePreset, label: str
) -> None:
    assert len(parts[preset][0]["item_id"].chunk(0).flatten()) < 110_000
    best = synthetic.planted_auc(logs / preset / "unseen", label)
    assert fit_and_score(*(READERS[preset](part, label) for part in parts[preset])) == pytest.approx(best, abs=0.01)
    assert 0.75 < best < 0.9


@pytest.mark.parametrize(("preset", "label"), [("yambda", "label_like"), ("kuairand-ranking", "label_long_view")])
def test_every_part_of_the_signal_is_needed(parts: Parts, preset: FeaturePreset, label: str) -> None:
    train, test = (READERS[preset](part, label) for part in parts[preset])
    reached = fit_and_score(train, test)
    for name in ("share", *train.categories):
        assert fit_and_score(train.without(name), test.without(name)) < reached - 0.005, name


def test_a_seed_reproduces_its_log_and_another_seed_changes_only_users(parts: Parts, tmp_path: Path) -> None:
    for preset, (first, other) in parts.items():
        made = [tmp_path / f"{preset}-{name}" for name in ("a", "b")]
        for folder in made:
            synthetic_features.write_feature_log(folder, preset, users=100, catalogue=CATALOGUE, shorter=400)
        names = sorted(file.name for file in made[0].iterdir())
        assert names == sorted(file.name for file in made[1].iterdir())
        assert all((made[0] / name).read_bytes() == (made[1] / name).read_bytes() for name in names)
        assert not set(first["user_id"].to_pylist()) & set(other["user_id"].to_pylist())
        assert not first["item_id"].equals(other["item_id"])
        columns = "item_id", "artist_id" if preset == "yambda" else "author_id"
        owners = {
            pair for log in (first, other) for pair in zip(*(flat(log, name)[1] for name in columns), strict=True)
        }
        assert len(owners) == CATALOGUE


@pytest.mark.parametrize("preset", SIZES)
def test_a_log_is_drawn_in_blocks_of_other_users_and_other_events(
    preset: FeaturePreset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_features, "_BLOCK_EVENTS", 500)
    drawn = []
    monkeypatch.setattr(synthetic_features, "ends_of", lambda lengths: drawn.append(len(lengths)) or ends_of(lengths))
    synthetic_features.write_feature_log(tmp_path / "log", preset, users=100, catalogue=CATALOGUE, shorter=400)
    made = table(tmp_path / "log")
    assert max(drawn) < 60
    assert made["user_id"].to_pylist() == list(range(100))
    last = [times[-1] for times in made["timestamp"].to_pylist()]
    assert last == sorted(last)
    histories = [tuple(items) for items in made["item_id"].to_pylist() if len(items) > 5]
    assert len(set(histories)) == len(histories) > 20


def test_listens_have_the_lengths_of_the_public_log() -> None:
    lengths = synthetic_features.draw_lengths("yambda", 200_000, np.random.default_rng(0))
    assert np.median(lengths) == pytest.approx(2695, rel=0.02)
    assert lengths.mean() == pytest.approx(4763, rel=0.02)
    assert lengths.max() == 27_738


@pytest.mark.parametrize("preset", SIZES)
def test_the_command_prints_the_best_scores(
    preset: FeaturePreset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "synth", "--preset", preset, "--users", "40", "--shorter", "400", "--seed", "5"]
    assert main([*words, str(tmp_path / "log")]) == 0
    output = capsys.readouterr().out
    assert "40 users, 256 items" in output
    for label in SIGNALS[preset]:
        entropy, best = (score(tmp_path / "log", label) for score in (synthetic.planted_optimum, synthetic.planted_auc))
        assert f"{label}: normalised entropy is {entropy:.4f} at best, AUC {best:.4f}" in output
    assert main([*words, "--items", "15", str(tmp_path / "other")]) == 2
    assert "--items 16" in capsys.readouterr().err
