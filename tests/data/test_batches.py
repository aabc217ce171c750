"""A batch contains exactly the events of the log, packed, split and mapped according to the config."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from freescale.data.batch import Split
from freescale.data.columns import Column
from freescale.data.validation import RowGroup
from freescale.data.vocabulary import ItemVocabulary
from tests.support.datasets import histories, ids, lists, loader, write_dataset

LENGTHS = [1 + (7 * i) % 23 for i in range(300)]


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return histories(LENGTHS, candidates=True)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, table: pa.Table) -> Path:
    path = tmp_path_factory.mktemp("batches") / "data"
    write_dataset(path, table, rows_per_group=9)
    return path


@pytest.mark.parametrize("order", ["shuffle", "log"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_feature_stays_with_its_sample(dataset: Path, table: pa.Table, order: str, workers: int) -> None:
    seen = 0
    for batch in loader(dataset, order=order, workers=workers, columns=("rating", "age")):
        offsets = batch.history.offsets.tolist()
        assert batch.candidates is not None
        offered = batch.candidates.offsets.tolist()
        for i, row in enumerate(ids(batch)):
            for name in ("item_id", "timestamp", "rating"):
                assert batch.history[name][offsets[i] : offsets[i + 1]].tolist() == table[name][row].as_py(), (
                    name,
                    row,
                )
            for name in ("candidate_id", "label_click"):
                assert batch.candidates[name][offered[i] : offered[i + 1]].tolist() == table[name][row].as_py()
            assert batch.scalars["age"][i] == table["age"][row].as_py()
            assert batch.scalars["user_id"][i] == row
            seen += 1
    assert seen == len(LENGTHS)


def test_only_requested_columns_are_read(dataset: Path) -> None:
    batch = next(iter(loader(dataset)))
    assert set(batch.history.features) == {"item_id", "timestamp"}
    assert set(batch.scalars) == {"user_id"}
    narrow, wide = loader(dataset), loader(dataset, columns=("rating",))
    for each in (narrow, wide):
        for _ in each:
            pass
    assert narrow.dataset.bytes_read < wide.dataset.bytes_read


def test_long_histories_keep_their_most_recent_events(dataset: Path, table: pa.Table) -> None:
    kept: list[int] = []
    for batch in loader(dataset, max_history=4):
        kept += ids(batch)
        offsets = batch.history.offsets.tolist()
        for i, row in enumerate(ids(batch)):
            assert (
                batch.history["timestamp"][offsets[i] : offsets[i + 1]].tolist() == table["timestamp"][row].as_py()[-4:]
            )
    assert sorted(kept) == list(range(len(table)))


@pytest.mark.parametrize(("split", "time"), [("last", 0), ("time", 150_004)])
def test_training_never_reads_held_out_events(dataset: Path, table: pa.Table, split: str, time: int) -> None:
    config = {"split": split, "split_time": time, "order": "log"}
    train, test = loader(dataset, **config), loader(dataset, part="test", **config)
    held_out = 0
    for seen, evaluated in zip(train, test, strict=True):
        assert ids(seen) == ids(evaluated)
        assert seen.targets is None
        assert evaluated.targets is not None
        assert torch.equal(seen.history["timestamp"], evaluated.history["timestamp"])
        for i, row in enumerate(ids(seen)):
            before = seen.history["timestamp"][seen.history.offsets[i] : seen.history.offsets[i + 1]].tolist()
            after = evaluated.targets["timestamp"][
                evaluated.targets.offsets[i] : evaluated.targets.offsets[i + 1]
            ].tolist()
            assert before + after == table["timestamp"][row].as_py()
            if split == "last":
                assert len(after) == 1
            else:
                assert all(t < time for t in before)
                assert all(t >= time for t in after)
            held_out += len(after)
    assert held_out == (
        300 if split == "last" else sum(t >= time for row in table["timestamp"].to_pylist() for t in row)
    )


def test_a_time_split_holds_out_events_at_the_split_time() -> None:
    times = Column(np.array([10, 20, 30, 40, 50]), np.array([0, 3, 5]))
    rows = RowGroup({"item_id": times, "timestamp": times}, np.ones(2, bool))
    assert Split("time", time=20).cut(rows).tolist() == [1, 3]


def test_unknown_items_share_a_few_rows_by_hash_and_are_counted(tmp_path: Path) -> None:
    table = histories([5] * 40, items=100)
    write_dataset(tmp_path / "new", table, rows_per_group=8, items=60)
    source = loader(tmp_path / "new", oov_rows=4, order="log")
    got = torch.cat([batch.history["item_id"] for batch in source]).numpy()
    raw = table["item_id"].combine_chunks().flatten().to_numpy()
    known = raw < 60
    assert np.array_equal(got[known], raw[known])
    assert set(got[~known]) <= {60, 61, 62, 63}
    assert len(set(got[~known])) == 4
    assert source.unknown["item_id"] == (~known).sum()
    assert source.vocabulary.rows == 64
    assert "mapped to 4 shared rows" in " ".join(source.report())
    again = ItemVocabulary(60, 4).map_unknown(raw)[0]
    assert np.array_equal(again, got), "an id always has the same row"


def test_contiguous_rows_are_not_copied(tmp_path: Path) -> None:
    write_dataset(tmp_path / "one", histories([3] * 64), rows_per_group=64)
    batches = list(loader(tmp_path / "one", order="log", shards=1))
    first = batches[0].history["item_id"]
    step = first.numel() * first.element_size()
    starts = [batch.history["item_id"].data_ptr() for batch in batches]
    assert starts == [starts[0] + i * step for i in range(len(batches))], "slices of one decoded buffer"


def test_lists_of_smaller_integers_are_widened_and_scalars_kept(tmp_path: Path) -> None:
    table = histories([2, 3, 1])
    table = table.set_column(1, "item_id", lists([2, 3, 1], [1, 2, 3, 4, 5, 6], pa.int32()))
    write_dataset(tmp_path / "narrow", table, rows_per_group=2)
    batch = next(iter(loader(tmp_path / "narrow", order="log")))
    assert batch.history["item_id"].dtype == torch.int64
    assert batch.history["item_id"].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_consumer_that_stops_early_leaves_no_thread(dataset: Path) -> None:
    import threading

    before = set(threading.enumerate())  # those of other tests may end meanwhile
    for _ in range(5):
        for _batch in loader(dataset, workers=3):
            break
    assert set(threading.enumerate()) <= before
