"""A data set is complete or absent, is read once over all ranks, and can be read from any address."""

import json
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from freescale.data import manifest, synthetic, writer
from freescale.data.dataset import Dataset
from freescale.errors import DataError
from tests.support.datasets import histories, ids, loader, write_dataset


class CountingFileSystem(LocalFileSystem):
    """A local file system that counts the bytes read."""

    protocol = "counted"
    read = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        data = super().cat_file(path, start=start, end=end, **kwargs)
        CountingFileSystem.read += len(data)
        return data

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("counted://"))


@pytest.mark.parametrize(("preset", "users"), [("ml1m", 6000), ("heavy", 6000), ("kuairand", 200)])
@pytest.mark.parametrize("ranks", [8, 64])
def test_the_bytes_read_over_all_ranks_stay_within_a_fifth_of_the_files(
    tmp_path: Path, preset: synthetic.Preset, users: int, ranks: int
) -> None:
    fsspec.register_implementation("counted", CountingFileSystem, clobber=True)
    synthetic.write_log(tmp_path / "data", preset, users=users)
    size = sum(file.stat().st_size for file in (tmp_path / "data").iterdir())
    CountingFileSystem.read = 0
    claimed = rows = 0
    for rank in range(ranks):
        source = loader(f"counted://{tmp_path}/data", rank=rank, world_size=ranks, global_batch=512)
        rows += sum(len(batch) for batch in source)
        claimed += source.dataset.bytes_read
    assert rows == users
    assert CountingFileSystem.read <= 1.2 * size
    assert claimed == CountingFileSystem.read, "the count of the loader is correct"


def test_a_data_set_can_be_read_from_memory(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", histories([4] * 50), rows_per_group=8)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "data"), "/set", recursive=True)
    assert sorted(sum((ids(batch) for batch in loader("memory://set", workers=2)), [])) == list(range(50))
    memory.rm("/set", recursive=True)


def test_files_without_a_manifest_are_read_in_name_order(tmp_path: Path) -> None:
    table = histories([2] * 30)
    pq.write_table(table.slice(0, 11), tmp_path / "a.parquet", row_group_size=4)
    pq.write_table(table.slice(11), tmp_path / "b.parquet", row_group_size=6)
    users = [u for batch in loader(tmp_path, order="log") for u in batch.scalars["user_id"].tolist()]
    assert users == list(range(30))


def test_row_groups_are_striped_over_files_and_read_back_in_order(tmp_path: Path) -> None:
    table = histories([1] * 1000)
    made = write_dataset(tmp_path / "data", table, rows_per_group=3, groups_per_file=2)
    assert len(made.stripes) == 3
    assert [stripe.groups for stripe in made.stripes] == [128, 128, 78]
    users = [u for batch in loader(tmp_path / "data", order="log") for u in batch.scalars["user_id"].tolist()]
    assert users == list(range(1000))


def test_no_empty_stripe_follows_a_full_last_stripe(tmp_path: Path) -> None:
    made = write_dataset(tmp_path / "data", histories([1] * 128), rows_per_group=1, groups_per_file=1)
    assert [stripe.rows for stripe in made.stripes] == [64, 64]


def test_row_group_size_suits_many_ranks_and_disks() -> None:
    for rows, events in [(6_040, 1_000_209), (31_013, 287_107), (20_000, 190_000_000), (10**9, 10**11)]:
        per_group = writer.rows_per_group(rows, events)
        groups = rows / per_group
        assert groups >= 64
        assert per_group * 16 * events / rows <= 400_000
    assert writer.rows_per_group(10**9, 10**11) * 16 * 100 > 350_000


def test_a_failed_write_leaves_no_files(tmp_path: Path) -> None:
    def fail_in_the_middle() -> None:
        with writer.atomic_folder(tmp_path / "data") as folder:
            (folder / "part").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    assert list(tmp_path.iterdir()) == []


def test_writing_creates_the_folder(tmp_path: Path) -> None:
    writer.write_dataset(str(tmp_path / "new" / "data"), [histories([3, 1, 2])], rows_per_group=2, items=1000)
    assert [len(batch) for batch in loader(tmp_path / "new" / "data")] == [3]


def test_an_existing_data_set_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").touch()
    with pytest.raises(DataError, match="not empty"), writer.atomic_folder(tmp_path / "data"):
        pass
    assert (tmp_path / "data" / "mine").exists()


def test_a_manifest_round_trips_and_damage_is_refused(tmp_path: Path) -> None:
    words = {"note": 'odd "name" \u00e9', "features": {"rating": 7, "g\u00e9nre": 0}}
    made = write_dataset(tmp_path / "data", histories([1] * 20), rows_per_group=3, **words)
    assert made.features == words["features"]
    raw = manifest.dump_manifest(made)
    assert manifest.parse_manifest(raw, "here") == made
    for damaged in (
        raw[:-5],
        raw.replace(b"20", b"21", 1),
        b"[]",
        b"",
        b'{"freescale": 99, "data": {}}',
        b"\xff\xfe",
    ):
        with pytest.raises(DataError, match="manifest"):
            manifest.parse_manifest(damaged, "here")


@pytest.mark.parametrize("features", [{"a": -1}, {"a": 2**63}, {"a": 1.5}, {"a": "1"}, [[1, 2]], 5, None])
def test_implausible_sizes_of_vocabularies_are_refused(tmp_path: Path, features: object) -> None:
    made = write_dataset(tmp_path / "data", histories([1] * 20), rows_per_group=3)
    body = json.loads(manifest.dump_manifest(made))["data"] | {"features": features}
    sealed = {"freescale": manifest.MANIFEST_VERSION, "crc": zlib.crc32(json.dumps(body, sort_keys=True).encode())}
    with pytest.raises(DataError, match="the manifest is damaged"):
        manifest.parse_manifest(json.dumps(sealed | {"data": body}).encode(), "here")


def test_sets_of_ids_are_written_as_nested_lists_without_loss(tmp_path: Path) -> None:
    tags = pa.array([[[1, 2], None, []], [[3]]], pa.list_(pa.list_(pa.int64())))
    table = pa.table({"user_id": [0, 1], "item_id": [[5, 6, 7], [8]], "timestamp": [[1, 2, 3], [4]], "tags": tags})
    made = write_dataset(tmp_path / "data", table, rows_per_group=1, features={"tags": 4})
    assert made.events == 4
    assert pa.concat_tables(map(pq.read_table, sorted((tmp_path / "data").glob("*.parquet")))).equals(table)


def test_written_pages_have_checksums_and_plain_files_without_are_reported(tmp_path: Path) -> None:
    write_dataset(tmp_path / "ours", histories([3] * 9), rows_per_group=4)
    pq.write_table(histories([3] * 9), _new(tmp_path / "plain") / "x.parquet")
    pq.write_table(histories([3] * 9), _new(tmp_path / "careful") / "y.parquet", write_page_checksum=True)
    assert Dataset(str(tmp_path / "ours")).unchecked_files() == []
    assert Dataset(str(tmp_path / "plain")).unchecked_files() == ["x.parquet"]
    assert Dataset(str(tmp_path / "careful")).unchecked_files() == []


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder
