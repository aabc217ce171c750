"""Features pass from columns to batches: every kind and scope, missing values, unknown ids, anchors."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from freescale.config import DataConfig, FeatureConfig, TaskConfig
from freescale.data.batch import Batch, set_group
from freescale.data.dataset import Dataset
from freescale.data.feature_schema import ANCHOR, FeatureSchema
from freescale.data.loader import Loader
from freescale.errors import DataError, FreeScaleError
from tests.support.datasets import lists, write_dataset

LENGTHS = [2, 3, 1]


def write(
    path: Path, sizes: Mapping[str, int] = MappingProxyType({"artist": 4, "tags": 4}), **columns: pa.Array
) -> None:
    base = {
        "user_id": pa.array([0, 1, 2]),
        "item_id": lists(LENGTHS, [0, 1, 2, 0, 1, 2]),
        "timestamp": lists(LENGTHS, [10, 20, 5, 15, 25, 7], pa.int64()),
    }
    write_dataset(path, pa.table(base | columns), rows_per_group=3, items=3, features=sizes)


def read(path: Path, schema: FeatureSchema, **options: Any) -> Batch:
    data = DataConfig(path=str(path), global_batch=3, workers=0, order="log", split="none", shards=1)
    (batch,) = Loader(replace(data, **options), seed=0, schema=schema)
    return batch


def test_ids_of_events_map_unknown_ones_to_shared_rows_and_missing_ones_to_their_own(tmp_path: Path) -> None:
    write(tmp_path / "data", artist=lists(LENGTHS, [0, None, 3, 9, 2, None], pa.int64()))
    schema = FeatureSchema({"artist": FeatureConfig(missing="default")}, dim=8)
    batch = read(tmp_path / "data", schema, oov_rows=2)
    values = batch.history["artist"].tolist()
    assert [values[i] for i in (0, 2, 4)] == [0, 3, 2]
    assert values[3] in (4, 5), "an id outside the vocabulary shares a row"
    assert values[1] == values[5] == 6, "missing values have the last row"


def test_sets_of_events_and_of_rows_keep_their_ids_and_sizes(tmp_path: Path) -> None:
    sets = [[0, 1], [], [2], None, [3, 3, 0], [1]]
    write(
        tmp_path / "data",
        tags=lists(LENGTHS, sets, pa.list_(pa.int64())),
        devices=pa.array([[1, 2], None, []], pa.list_(pa.int64())),
    )
    features = {
        "tags": FeatureConfig(kind="set", missing="default"),
        "devices": FeatureConfig(scope="user", kind="set", rows=4, missing="default"),
    }
    batch = read(tmp_path / "data", FeatureSchema(features, dim=8))
    assert batch.history["tags"].tolist() == [2, 0, 1, 0, 3, 1]
    assert batch.sets[set_group("history", "tags")][""].tolist() == [0, 1, 2, 3, 3, 0, 1]
    assert batch.sets[set_group("history", "tags")].lengths.tolist() == [2, 4, 1]
    assert batch.scalars["devices"].tolist() == [2, 0, 0]
    assert batch.sets[set_group("sample", "devices")][""].tolist() == [1, 2]
    chosen = batch.select(torch.tensor([2, 1]))
    assert chosen.sets[set_group("history", "tags")][""].tolist() == [1, 2, 3, 3, 0]


def test_missing_numbers_are_nan_and_truncated_histories_keep_the_last_events(tmp_path: Path) -> None:
    sets = [[0], [1], [2, 2], [], [3, 1], [0]]
    write(
        tmp_path / "data",
        dwell=lists(LENGTHS, [1.0, None, 3.0, 4.0, 5.0, 6.0], pa.float32()),
        tags=lists(LENGTHS, sets, pa.list_(pa.int64())),
    )
    features = {
        "dwell": FeatureConfig(scope="event", kind="number", missing="default"),
        "tags": FeatureConfig(kind="set"),
    }
    batch = read(tmp_path / "data", FeatureSchema(features, dim=8), max_history=2)
    assert batch.history["dwell"].isnan().tolist() == [False, True, False, False, False]
    assert batch.history["dwell"][2:].tolist() == [4.0, 5.0, 6.0]
    assert batch.sets[set_group("history", "tags")][""].tolist() == [0, 1, 3, 1, 0]


def anchored(rule: str, **options: Any) -> FeatureSchema:
    task = TaskConfig(kind="ranking", labels=("label_click",), anchors=rule, **options)  # type: ignore[arg-type]
    return FeatureSchema({"tags": FeatureConfig(kind="set"), "artist": FeatureConfig(scope="event")}, task, 8)


@pytest.fixture
def labeled(tmp_path: Path) -> Path:
    sets = [[0], [1], [2, 2], [], [3, 1], [0]]
    write(
        tmp_path / "data",
        artist=lists(LENGTHS, [0, 1, 2, 3, 0, 1]),
        tags=lists(LENGTHS, sets, pa.list_(pa.int64())),
        label_click=lists(LENGTHS, [1.0, None, 0.0, 1.0, None, 1.0], pa.float32()),
    )
    return tmp_path / "data"


def test_anchors_are_the_labeled_events_with_the_number_of_events_before_them(labeled: Path) -> None:
    batch = read(labeled, anchored("labeled"))
    candidates = batch.candidates
    assert candidates is not None
    assert candidates.lengths.tolist() == [1, 2, 1]
    assert candidates["candidate_id"].tolist() == [0, 2, 0, 2]
    assert candidates[ANCHOR].tolist() == [0, 0, 1, 0]
    assert candidates["label_click"].tolist() == [1, 0, 1, 1]
    assert candidates["candidate_timestamp"].tolist() == [10, 5, 15, 7]
    assert candidates["candidate_tags"].tolist() == [1, 2, 0, 1]
    assert batch.sets[set_group("candidates", "candidate_tags")][""].tolist() == [0, 2, 2, 0]
    assert "candidate_artist" not in candidates.features, "what is known only after an event is no feature of a target"
    assert "label_click" not in batch.history.features
    visible = batch.visible_events()
    assert visible is not None
    assert visible.tolist() == [0, 1, 0]


def test_anchors_may_be_every_kth_event_or_those_after_a_time(labeled: Path) -> None:
    every = read(labeled, anchored("every", anchor_step=2)).candidates
    after = read(labeled, anchored("after", anchor_time=10)).candidates
    assert every is not None
    assert after is not None
    assert every[ANCHOR].tolist() == [1]
    assert after["candidate_timestamp"].tolist() == [10, 15]


def test_evaluation_with_anchors_sees_the_held_out_events_as_targets_only(labeled: Path) -> None:
    data = DataConfig(path=str(labeled), global_batch=3, workers=0, order="log", split="time", split_time=15, shards=1)
    (train,), (test,) = (Loader(data, seed=0, part=part, schema=anchored("labeled")) for part in ("train", "test"))
    assert train.candidates is not None
    assert test.candidates is not None
    assert train.candidates["candidate_timestamp"].tolist() == [10, 5, 7]
    assert test.candidates["candidate_timestamp"].tolist() == [15]
    assert test.candidates[ANCHOR].tolist() == [1]
    assert test.history.lengths.tolist() == [2, 3, 1]


@pytest.mark.parametrize(
    ("feature", "column", "message"),
    [
        (FeatureConfig(), pa.array([1, 2, 3]), "holds one value per row"),
        (FeatureConfig(scope="user"), lists(LENGTHS, range(6)), "holds a list per row"),
        (FeatureConfig(kind="set"), lists(LENGTHS, range(6)), "holds single values"),
        (FeatureConfig(), lists(LENGTHS, [[1]] * 6, pa.list_(pa.int64())), "holds sets"),
        (FeatureConfig(), lists(LENGTHS, [0.5] * 6), "kind = 'id' needs integers"),
        (FeatureConfig(kind="number"), lists(LENGTHS, list("abcdef")), "holds string"),
        (FeatureConfig(kind="bits"), lists(LENGTHS, [0.5] * 6), "kind = 'bits' needs integers"),
    ],
)
def test_a_column_that_does_not_fit_its_feature_is_refused_with_the_name_of_the_feature(
    tmp_path: Path, feature: FeatureConfig, column: pa.Array, message: str
) -> None:
    write(tmp_path / "data", artist=column)
    with pytest.raises(DataError, match=r"\[features.artist\]") as caught:
        read(tmp_path / "data", FeatureSchema({"artist": feature}, dim=8))
    assert message in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("feature", "values", "kind"),
    [
        (FeatureConfig(), [0, None, 1, 2, 3, 0], "null"),
        (FeatureConfig(), [0, -4, 1, 2, 3, 0], "negative id"),
        (FeatureConfig(kind="number"), [0, np.nan, 1, 2, 3, 0], "not a number"),
        (FeatureConfig(kind="number", missing="default"), [0, np.inf, 1, 2, 3, 0], "not a number"),
    ],
)
def test_a_row_with_a_faulty_value_is_refused_or_skipped(
    tmp_path: Path, feature: FeatureConfig, values: list[float], kind: str
) -> None:
    column = pa.float32() if feature.kind == "number" else pa.int64()
    write(tmp_path / "data", artist=lists(LENGTHS, values, column))
    schema = FeatureSchema({"artist": feature}, dim=8)
    with pytest.raises(FreeScaleError, match="artist"):
        read(tmp_path / "data", schema)
    batch = read(tmp_path / "data", schema, on_bad="skip")
    assert batch.scalars["user_id"].tolist() == [1, 2], kind


def test_a_data_set_with_another_vocabulary_of_a_feature_is_refused(tmp_path: Path) -> None:
    identities = []
    for name, artists in (("trained", 4), ("other", 5)):
        write(tmp_path / name, sizes={"artist": artists, "tags": 4}, artist=lists(LENGTHS, [0, 1, 2, 3, 0, 1]))
        data = DataConfig(path=str(tmp_path / name))
        identities.append(Loader(data, seed=0, schema=FeatureSchema({"artist": FeatureConfig()}, dim=8)).identity)
    identities[0].require_same(identities[0], where="here")
    with pytest.raises(DataError, match="column 'artist' has 5 ids; the model was trained on 4"):
        identities[1].require_same(identities[0], where="here")


def test_a_column_of_candidates_without_candidates_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data", {}, candidate_price=lists(LENGTHS, [1.0] * 6, pa.float64()))
    with pytest.raises(DataError, match="column 'candidate_price' needs candidates"):
        Dataset(str(tmp_path / "data"), features=["candidate_price"])
