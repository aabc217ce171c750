"""A mistake in the schema of features ends in an error that names the feature, the key and what to do."""

from pathlib import Path

import pyarrow as pa
import pytest

from freescale import config
from freescale.data.loader import Loader
from freescale.errors import FreeScaleError
from tests.support.datasets import lists, write_dataset

LENGTHS = [2, 3]
RANKING = 'task = {kind = "ranking", labels = ["label_click"], anchors = "labeled"}\n'
CANDIDATES = 'task = {kind = "ranking", labels = ["label_click"]}\n'

IN_CONFIG = {
    "an unknown key": "[features.artist]\nkid = 'id'",
    "an unknown kind": "[features.artist]\nkind = 'integer'",
    "an unknown scope": "[features.artist]\nscope = 'items'",
    "a number as text": "[features.artist]\nrows = 'many'",
    "a value instead of a table": "[features]\nartist = 3",
    "the item as a feature": "[features.item]",
    "dynamic items of a scope": "[features.item]\nids = 'dynamic'\nrows = 9\nscope = 'event'",
    "dynamic items in another table": "[features.item]\nids = 'dynamic'\nrows = 9\ntable = 'other'",
    "a name that is none": '[features."my artist"]',
    "a negative size": "[features.artist]\nrows = -1",
    "one bucket": "[features.artist]\nkind = 'number'\nscaling = 'quantiles'\nbuckets = 1",
    "too many bits": "[features.artist]\nkind = 'bits'\nbits = 64",
    "another width that is summed": "[features.artist]\ndim = 16",
    "a width that FBGEMM does not take": "[features.artist]\ndim = 6\ncombine = 'concat'",
    "a table of a number": "[features.artist]\nkind = 'number'\ntable = 'x'",
    "rows of a bit mask": "[features.artist]\nkind = 'bits'\nrows = 4",
    "context in retrieval": "[features.artist]\nscope = 'context'",
    "a candidate feature in retrieval": "[features.artist]\nscope = 'candidate'",
    "two sizes of one table": "[features.artist]\nrows = 4\n[features.other]\nrows = 5\ntable = 'artist'",
    "two widths of one table": "[features.artist]\n[features.other]\ndim = 8\ncombine = 'concat'\ntable = 'artist'",
    "an hour in a table of ids": "[features.artist]\n[features.other]\nkind = 'timestamp'\ntable = 'artist'",
    "dynamic ids without rows": "[features.artist]\nids = 'dynamic'",
    "a dynamic number": "[features.artist]\nkind = 'number'\nids = 'dynamic'\nrows = 9",
    "eviction from a vocabulary": "[features.artist]\neviction = 'lru'",
    "admission after no step": "[features.artist]\nids = 'dynamic'\nrows = 9\nadmit_after = 0",
    "a time to live that is not used": "[features.artist]\nids = 'dynamic'\nrows = 9\nttl = 60",
    "no time to live": "[features.artist]\nids = 'dynamic'\nrows = 9\neviction = 'ttl'",
    "dynamic ids in the table of items": "[features.artist]\nids = 'dynamic'\nrows = 9\ntable = 'item'",
    "dynamic ids on every rank": "tables = {placement = 'replicated'}\n[features.artist]\nids = 'dynamic'\nrows = 9",
    "a cross in retrieval": "[features.artist]\nkind = 'cross'\nscope = 'context'\ncross = ['item', 'user']\nrows = 9",
    "a cross of one": RANKING + "[features.artist]\nkind = 'cross'\nscope = 'context'\ncross = ['item']\nrows = 9",
    "a cross of an unknown feature": RANKING
    + "[features.artist]\nkind = 'cross'\nscope = 'context'\ncross = ['item', 'x']\nrows = 9",
    "a cross without rows": RANKING + "[features.artist]\nkind = 'cross'\nscope = 'context'\ncross = ['item', 'user']",
    "a cross on events": RANKING
    + "[features.artist]\nkind = 'cross'\nscope = 'event'\ncross = ['item', 'user']\nrows = 9",
}
IN_DATA = {
    "a column that is not there": "[features.artist]\ncolumn = 'artists'",
    "an event column for a user": "[features.artist]\nscope = 'user'",
    "a row column for an event": "[features.artist]\ncolumn = 'country'",
    "fractions as ids": "[features.artist]\ncolumn = 'seconds'",
    "single ids as a set": "[features.artist]\nkind = 'set'",
    "a set as an id": "[features.artist]\ncolumn = 'tags'",
    "text as a number": "[features.artist]\ncolumn = 'title'\nkind = 'number'",
    "an id without a vocabulary": "[features.artist]\ncolumn = 'shelf'",
    "fewer rows than ids": "[features.artist]\nrows = 2",
    "a vocabulary shared with another": "[features.artist]\n"
    "[features.other]\ncolumn = 'country'\nscope = 'user'\ntable = 'artist'",
    "two readings of one column": "[features.artist]\n[features.other]\ncolumn = 'artist'\nkind = 'bits'",
    "candidates without their feature": CANDIDATES + "[features.artist]",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistakes") / "data"
    columns = {
        "user_id": pa.array([0, 1]),
        "item_id": lists(LENGTHS, [0, 1, 2, 0, 1]),
        "timestamp": lists(LENGTHS, [1, 2, 1, 2, 3], pa.int64()),
        "artist": lists(LENGTHS, [0, 1, 2, 0, 1]),
        "shelf": lists(LENGTHS, [0, 1, 2, 0, 1]),
        "seconds": lists(LENGTHS, [0.5] * 5),
        "tags": lists(LENGTHS, [[0]] * 5, pa.list_(pa.int64())),
        "title": lists(LENGTHS, list("abcde")),
        "country": pa.array([0, 1]),
        "label_click": lists(LENGTHS, [1.0, 0.0, 1.0, 0.0, 1.0]),
    }
    write_dataset(path, pa.table(columns), rows_per_group=2, items=3, features={"artist": 3, "tags": 1, "country": 2})
    return path


def named(error: FreeScaleError, text: str) -> None:
    feature = "item" if "[features.item]" in text else "my artist" if "my artist" in text else "artist"
    assert any(name in f"{error} {error.where}" for name in (f"features.{feature}", "features.other", feature)), error
    assert error.remedy


@pytest.mark.parametrize("mistake", IN_CONFIG)
def test_a_mistake_in_the_config_names_the_feature_and_the_remedy(mistake: str) -> None:
    with pytest.raises(FreeScaleError) as caught:
        config.parse(IN_CONFIG[mistake])
    named(caught.value, IN_CONFIG[mistake])


@pytest.mark.parametrize("mistake", IN_DATA)
def test_a_schema_that_does_not_fit_the_data_names_the_feature_the_column_and_the_remedy(
    mistake: str, data: Path
) -> None:
    run = config.override(config.parse(IN_DATA[mistake]), ["--data.path", str(data)])
    with pytest.raises(FreeScaleError) as caught:
        Loader.from_run(run)
    named(caught.value, IN_DATA[mistake])
