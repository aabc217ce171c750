"""Statistics of columns and the proposed schema are those of the data."""

from pathlib import Path

import numpy as np
import pytest

from freescale.config import RECIPES
from freescale.data.feature_stats import describe_columns, propose_config
from freescale.data.loader import Loader
from tests.support.feature_log import ARTISTS, MISSING_SHARE, write_feature_log

LENGTHS = np.random.default_rng(1).integers(1, 30, 80).tolist()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("stats")
    for candidates in (False, True):
        write_feature_log(folder / str(candidates), LENGTHS, candidates=candidates)
    return {candidates: folder / str(candidates) for candidates in (False, True)}


def test_columns_are_described_by_kind_distinct_values_missing_ones_and_quantiles(logs: dict[bool, Path]) -> None:
    columns = {column.name: column for column in describe_columns(str(logs[True]))}
    assert {name: column.group for name, column in columns.items() if column.kind == "set"} == {
        "tags": "history",
        "devices": "sample",
        "candidate_tags": "candidates",
    }
    artist, dwell, price = columns["artist"], columns["dwell"], columns["price"]
    assert (artist.kind, artist.distinct, artist.values) == ("id", ARTISTS, sum(LENGTHS))
    assert artist.missing_share == pytest.approx(MISSING_SHARE, abs=0.05)
    assert artist.top == sorted(artist.top, key=lambda pair: -pair[1])
    assert dwell.quantiles == sorted(dwell.quantiles)
    assert dwell.quantiles[2] == pytest.approx(30 * np.log(2), rel=0.2), "the median of an exponential"
    assert price.by_item
    assert not dwell.by_item


@pytest.mark.parametrize("candidates", [False, True])
def test_the_proposed_schema_fits_the_data(logs: dict[bool, Path], candidates: bool) -> None:
    config = propose_config(RECIPES["tiny"], str(logs[candidates]))
    assert config.task.labels == ("label_click", "label_seconds")
    assert config.task.regression == ("label_seconds",)
    assert config.task.anchors == ("none" if candidates else "labeled")
    scopes = {name: feature.scope for name, feature in config.features.items()}
    assert scopes["price"] == scopes["tags"] == "item"
    assert scopes["dwell"] == scopes["action"] == "event"
    assert scopes["region"] == scopes["devices"] == "user"
    assert config.features["dwell"].missing == "default"
    batch = next(iter(Loader.from_run(config)))
    assert batch.candidates is not None
