"""Bad input causes an error with file, row group, row and remedy, or is counted in a quarantine. It never causes a
hang, a library traceback or a partial batch."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.config import DataConfig
from freescale.data.dataset import Dataset
from freescale.data.loader import Loader
from freescale.errors import DataError
from tests.support.datasets import histories, ids, lists, loader, write_dataset

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6]
BAD = 5  # the row that the faults below are in
TIMES = sum(([1000 * row + i for i in range(n)] for row, n in enumerate(LENGTHS)), [])
FIRST = sum(LENGTHS[:BAD])


def replaced(name: str, column: Any) -> pa.Table:
    table = histories(LENGTHS, candidates=True)
    return table.set_column(table.column_names.index(name), name, column)


def with_value(values: list[Any], index: int, value: Any) -> list[Any]:
    return [*values[:index], value, *values[index + 1 :]]


def as_lists() -> list[list[int]]:
    return histories(LENGTHS)["item_id"].to_pylist()


ROW_FAULTS = {
    "null or holds a null": replaced("item_id", pa.array(with_value(as_lists(), BAD, None))),
    "user_id is null": replaced("user_id", pa.array(with_value(list(range(8)), BAD, None), pa.int64())),
    "item_id is null or holds a null": replaced(
        "item_id", lists(LENGTHS, with_value(sum(as_lists(), []), FIRST + 2, None), pa.int64())
    ),
    "the history is empty": replaced("item_id", pa.array(with_value(as_lists(), BAD, []), pa.list_(pa.int64()))),
    "negative id": replaced("item_id", lists(LENGTHS, with_value(sum(as_lists(), []), FIRST + 3, -7))),
    "timestamp and item_id have unequal lengths": replaced(
        "timestamp",
        pa.array(with_value(histories(LENGTHS)["timestamp"].to_pylist(), BAD, [1, 2]), pa.list_(pa.int64())),
    ),
    "timestamps decrease": replaced("timestamp", lists(LENGTHS, with_value(TIMES, FIRST + 4, 0), pa.int64())),
    "label_click and candidate_id have unequal lengths": replaced(
        "label_click",
        pa.array(
            with_value(histories(LENGTHS, candidates=True)["label_click"].to_pylist(), BAD, [1, 0, 1, 0]),
            pa.list_(pa.int64()),
        ),
    ),
}


@pytest.mark.parametrize("fault", ROW_FAULTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_is_an_error_with_location_and_remedy(tmp_path: Path, fault: str, workers: int) -> None:
    pq.write_table(ROW_FAULTS[fault], tmp_path / "log.parquet", row_group_size=4)
    with pytest.raises(DataError, match=fault) as caught:
        list(loader(tmp_path, workers=workers))
    assert caught.value.where == "log.parquet, row group 1, row 1"
    assert "on_bad = skip" in caught.value.remedy


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_skipping_a_bad_row_counts_it_once_and_keeps_all_others(tmp_path: Path, fault: str) -> None:
    pq.write_table(ROW_FAULTS[fault], tmp_path / "log.parquet", row_group_size=4)
    config = DataConfig(path=str(tmp_path), on_bad="skip", global_batch=3, workers=1, split="none")
    source = Loader(config, seed=0, quarantine_file=str(tmp_path / "bad.jsonl"))
    for _ in range(2):  # two epochs
        assert sorted(sum((ids(batch) for batch in source), [])) == [0, 1, 2, 3, 4, 6, 7]
    assert source.dataset.quarantine.rows == 1
    (line,) = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert (line["file"], line["row_group"], line["row"]) == ("log.parquet", 1, 1)
    assert "1 rows skipped" in source.report()[0]


def test_a_history_above_the_limit_is_a_fault(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", histories([3, 200, 4]), rows_per_group=8)
    with pytest.raises(DataError, match="200 events, above longest = 100"):
        list(loader(tmp_path / "data", longest=100))
    kept = sum((ids(batch) for batch in loader(tmp_path / "data", longest=100, on_bad="skip")), [])
    assert sorted(kept) == [0, 2]


def test_a_missing_column_is_reported_with_the_closest_name(tmp_path: Path) -> None:
    pq.write_table(
        histories(LENGTHS).rename_columns(["user_id", "itemid", "timestamp", "rating", "age"]),
        tmp_path / "x.parquet",
    )
    with pytest.raises(DataError, match="'item_id' is missing") as caught:
        Dataset(str(tmp_path))
    assert "'itemid'" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("item_id", pa.array([["a"]] * 8)),
        ("item_id", pa.array(range(8))),
        ("timestamp", pa.array([[1.5]] * 8)),
        ("user_id", pa.array(list("abcdefgh"))),
        ("user_id", pa.array([[1]] * 8)),
        ("label_click", pa.array(range(8))),
    ],
)
def test_a_column_of_wrong_type_is_reported_with_the_expected_type(tmp_path: Path, name: str, column: pa.Array) -> None:
    pq.write_table(replaced(name, column), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=f"column '{name}' (has type|holds) .*, not") as caught:
        Dataset(str(tmp_path))
    assert caught.value.where == "x.parquet"


@pytest.mark.parametrize("cut", [0, 3, 100, -1, -9, -300])
def test_a_truncated_file_is_an_error_or_is_skipped_with_its_rows(tmp_path: Path, cut: int) -> None:
    write_dataset(tmp_path / "data", histories([4] * 130), rows_per_group=1)
    victim = tmp_path / "data" / "part-00000-03.parquet"
    victim.write_bytes(victim.read_bytes()[:cut])
    with pytest.raises(DataError) as caught:
        list(loader(tmp_path / "data"))
    assert "part-00000-03.parquet" in caught.value.where
    kept = sorted(sum((ids(batch) for batch in loader(tmp_path / "data", on_bad="skip")), []))
    assert kept == [row for row in range(130) if row % 64 != 3]


def test_a_file_deleted_during_reading_is_reported(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", histories([4] * 400), rows_per_group=2)
    batches = iter(loader(tmp_path / "data", global_batch=8, order="log"))
    next(batches)
    (tmp_path / "data" / "part-00000-11.parquet").unlink()
    with pytest.raises(DataError) as caught:
        list(batches)
    assert "part-00000-11.parquet" in caught.value.where


def test_one_unreadable_plain_parquet_file_can_be_skipped(tmp_path: Path) -> None:
    table = histories([2] * 12)
    pq.write_table(table.slice(0, 6), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    pq.write_table(table.slice(6), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="not Parquet"):
        Dataset(str(tmp_path))
    users = [u for b in loader(tmp_path, on_bad="skip", order="log") for u in b.scalars["user_id"].tolist()]
    assert users == list(range(12))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (replaced("item_id", pa.array([["a"]] * 8)), "has type"),
        (replaced("age", pa.array(range(8))).drop(["item_id"]), "missing"),
        (histories(LENGTHS, candidates=True).drop(["label_click"]), "missing"),
        (histories(LENGTHS, candidates=True).drop(["candidate_id"]), "missing"),
    ],
)
def test_a_later_file_with_other_columns_is_reported(tmp_path: Path, second: pa.Table, message: str) -> None:
    pq.write_table(histories(LENGTHS, candidates=True), tmp_path / "a.parquet")
    pq.write_table(second, tmp_path / "b.parquet")
    with pytest.raises(DataError, match=message) as caught:
        list(loader(tmp_path))
    assert "b.parquet" in caught.value.where
    source = loader(tmp_path, on_bad="skip")
    assert sorted(sum((ids(batch) for batch in source), [])) == list(range(8))
    assert source.dataset.quarantine.rows == 8


def test_a_later_file_with_single_values_instead_of_lists_is_reported(tmp_path: Path) -> None:
    pq.write_table(histories(LENGTHS), tmp_path / "a.parquet")
    pq.write_table(replaced("rating", pa.array([0.5] * 8)), tmp_path / "b.parquet")
    dataset = Dataset(str(tmp_path), features=("rating",))
    with pytest.raises(DataError, match="column 'rating' has type") as caught:
        list(map(dataset.read_group, range(dataset.layout.groups)))
    assert "b.parquet" in caught.value.where


def test_a_file_instead_of_a_folder_is_an_error(tmp_path: Path) -> None:
    pq.write_table(histories(LENGTHS), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="a file, not a data set") as caught:
        Dataset(str(tmp_path / "x.parquet"))
    assert "folder" in caught.value.remedy


@pytest.mark.parametrize("address", ["/no/such/folder", "nosuchscheme://x/y", "memory://nothing"])
def test_a_wrong_address_is_an_error_with_a_remedy(address: str) -> None:
    with pytest.raises(DataError) as caught:
        Dataset(address)
    assert caught.value.remedy


def damage(raw: bytes, rng: np.random.Generator) -> bytes:
    """Apply one random kind of damage that changes the bytes."""
    data = bytearray(raw)
    at = int(rng.integers(len(data)))
    size = int(rng.integers(1, 64))
    kind = rng.integers(5)
    if kind == 0:
        data[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at : at + size] = bytes(len(data[at : at + size]))
    elif kind == 3:
        data[at:at] = rng.bytes(size)
    else:
        data[at : at + size] = rng.bytes(len(data[at : at + size]))
    return bytes(data) if bytes(data) != raw else damage(raw, rng)


def test_every_damaged_file_is_detected(tmp_path: Path, whole_form: bool) -> None:
    write_dataset(tmp_path / "whole", histories([1 + i % 40 for i in range(640)]), rows_per_group=5)
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    rng = np.random.default_rng(2026)
    missed = []
    for case in range(200 if whole_form else 20):
        folder = tmp_path / f"case-{case}"
        shutil.copytree(tmp_path / "whole", folder)
        victim = folder / names[int(rng.integers(len(names)))]
        victim.write_bytes(damage(victim.read_bytes(), rng))
        detected = False
        try:
            list(loader(folder, columns=("rating", "age"), workers=int(rng.integers(3))))
        except DataError as error:
            detected = bool(error.what and error.where and error.remedy)
        if victim.name != "manifest.json" and detected:
            source = loader(folder, columns=("rating", "age"), on_bad="skip")
            kept = sum((ids(batch) for batch in source), [])
            detected = source.dataset.quarantine.rows > 0 and len(kept) == 640 - source.dataset.quarantine.rows
        if not detected:
            missed.append((case, victim.name))
        shutil.rmtree(folder)
    assert missed == []


def test_page_checksums_of_other_writers_are_verified(tmp_path: Path) -> None:
    file = tmp_path / "log.parquet"
    plain = {"compression": "none", "use_dictionary": False}
    pq.write_table(histories([3] * 9), file, write_page_checksum=True, **plain)
    assert len(list(loader(tmp_path))) == 1
    whole, value = file.read_bytes(), (5002).to_bytes(8, "little")
    assert whole.count(value) == 1
    file.write_bytes(whole.replace(value, (5006).to_bytes(8, "little")))  # a flipped bit in a valid timestamp
    with pytest.raises(DataError) as caught:
        list(loader(tmp_path))
    assert "log.parquet" in caught.value.where


def test_every_flipped_byte_of_a_data_set_is_detected(tmp_path: Path, whole_form: bool) -> None:
    write_dataset(tmp_path / "data", histories([1 + i % 5 for i in range(12)]), rows_per_group=12)
    rng = np.random.default_rng(7)
    unseen = []
    for file in sorted((tmp_path / "data").iterdir()):
        whole = file.read_bytes()
        for at in range(0, len(whole), 1 if whole_form else 5):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
            try:
                list(loader(tmp_path / "data", columns=("rating", "age")))
                unseen.append((file.name, at))
            except DataError:
                pass
        file.write_bytes(whole)
    assert unseen == []
