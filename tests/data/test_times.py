"""Events are sorted at the full resolution of the log and stored as whole seconds since 1970."""

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.data.event_log import guess_unit
from tests.data.imported import HEADER, histories, import_events, rows

NOW = 1_700_000_000
SUB_SECOND = {
    "fractions": ["100.9", "100.1", "100.5"],
    "nanoseconds as fractions": [f"{NOW}.123456789", f"{NOW}.123456787", f"{NOW}.123456788"],
    "milliseconds": [f"{NOW}900", f"{NOW}100", f"{NOW}500"],
    "microseconds": [f"{NOW}000009", f"{NOW}000001", f"{NOW}000005"],
    "nanoseconds": [f"{NOW}123456789", f"{NOW}123456787", f"{NOW}123456788"],
    "some without a fraction": ["100.9", "100", "100.5"],
    "dates": ["2023-11-14T22:13:20.9Z", "2023-11-14T22:13:20.1Z", "2023-11-14T22:13:20.5Z"],
    "dates with nanoseconds": [f"2023-11-14 22:13:20.00000000{digit}" for digit in "915"],
    "offsets": ["2023-11-14T23:13:20.9+01:00", "2023-11-14 22:13:20.1Z", "2023-11-14T17:13:20.5-0500"],
}


@pytest.mark.parametrize("kind", SUB_SECOND)
def test_times_within_one_second_sort_events_and_are_stored_as_seconds(tmp_path: Path, kind: str) -> None:
    third, first, second = SUB_SECOND[kind]
    text = f"{HEADER}u,third,{third}\nu,first,{first}\nu,second,{second}\n"
    ((_, items, times),) = histories(text, tmp_path)
    assert items == ["first", "second", "third"]
    assert times == [100 if third == "100.9" else NOW] * 3


@pytest.mark.parametrize("kind", ["fractions", "milliseconds", "dates"])
def test_histories_are_ordered_by_their_last_event_within_one_second(tmp_path: Path, kind: str) -> None:
    late, early, between = SUB_SECOND[kind]
    text = f"{HEADER}1,a,{late}\n2,a,{early}\n3,a,{between}\n"
    assert [user for user, _, _ in histories(text, tmp_path)] == [2, 3, 1]


@pytest.mark.parametrize(
    ("column", "stored"),
    [
        (pa.array([100_900, 100_100, 100_500], pa.timestamp("ms")), 100),
        (pa.array([100_900, 100_100, 100_500], pa.timestamp("us", "Europe/Paris")), 0),
        (pa.array([NOW * 10**9 + 9, NOW * 10**9 + 1, NOW * 10**9 + 5], pa.timestamp("ns")), NOW),
        (pa.array([NOW * 10**9 + 9, NOW * 10**9 + 1, NOW * 10**9 + 5]), NOW),
        (pa.array([NOW + 0.9, NOW + 0.1, NOW + 0.5]), NOW),
        (pa.array([-0.1, -0.9, -0.5]), -1),
    ],
)
def test_parquet_timestamps_keep_their_unit(tmp_path: Path, column: pa.Array, stored: int) -> None:
    pq.write_table(pa.table({"user": [1] * 3, "item": ["c", "a", "b"], "time": column}), tmp_path / "log.parquet")
    assert import_events(tmp_path / "log.parquet", target=tmp_path / "data") == 0
    (row,) = rows(tmp_path / "data")
    assert (row["item_id"], row["timestamp"]) == (["a", "b", "c"], [stored] * 3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-31", 1769817600),
        ("2026-01-31 12:00", 1769860800),
        ("2026-01-31T12:00:00", 1769860800),
        ("2026-01-31T12:00:00Z", 1769860800),
        ("2026-01-31T12:00:00+02:00", 1769853600),
        ("2026-01-31 12:00:00.25-0030", 1769862600),
        ("2026-01-31T12:00:00+02", 1769853600),
        ("2026-01-31 12:00:00.25 UTC", 1769860800),
        ("2026/01/31 12:00:00", 1769860800),
        ("1.7e9", NOW),
        ("-1", -1),
        ("9999-12-31T00:00:00Z", 253402214400),
    ],
)
def test_date_formats_are_parsed(tmp_path: Path, text: str, seconds: int) -> None:
    assert histories(f"{HEADER}u,a,{text}\n", tmp_path) == [(0, ["a"], [seconds])]


@pytest.mark.parametrize(("unit", "stored"), [("s", NOW), ("ms", NOW // 10**3), ("us", 1700), ("ns", 1)])
def test_the_unit_can_be_stated(tmp_path: Path, unit: str, stored: int) -> None:
    assert histories(f"{HEADER}u,a,{NOW}\n", tmp_path, "--time-unit", unit) == [(0, ["a"], [stored])]


def test_the_detected_unit_is_logged_with_its_dates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    histories(f"{HEADER}u,a,1500000000000\nu,a,1600000000000\n", tmp_path)
    assert "column 'time' counts milliseconds (2017-07-14 to 2020-09-13)" in capsys.readouterr().err


def test_small_numbers_are_seconds() -> None:
    assert [guess_unit(value) for value in (0, 5, NOW, NOW * 10**3, -NOW * 10**6, NOW * 10**9)] == [
        "s",
        "s",
        "s",
        "ms",
        "us",
        "ns",
    ]


@pytest.mark.parametrize(
    ("times", "words", "message"),
    [
        ((NOW, NOW * 1000), (), "unit of column 'time' is not clear"),
        (("01/02/2026",), (), "is not a time column: '01/02/2026'"),
        (("2026-01-31",), ("--time-unit", "s"), "holds dates"),
        ((5, "soon"), (), "timestamp missing"),
        (("2026-01-31", "2026-02-30"), (), "timestamp missing"),
        ((f"{NOW}.5", "1e30"), (), "timestamp missing"),
        (("2262-01-01T00:00:00.0000001Z", "2263-01-01T00:00:00Z"), (), "timestamp missing"),
    ],
)
def test_ambiguous_or_invalid_times_are_refused(
    tmp_path: Path, times: tuple[Any, ...], words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.csv").write_text(HEADER + "".join(f"u,a,{time}\n" for time in times))
    assert import_events(tmp_path / "log.csv", *words, target=tmp_path / "data") == 3
    assert message in capsys.readouterr().err


def test_fractions_that_begin_after_the_sample_are_kept(tmp_path: Path) -> None:
    times = [*range(10_000, 0, -1), "0.75", "0.5"]
    text = HEADER + "".join(f"u,i{n},{time}\n" for n, time in enumerate(times))
    ((_, items, stored),) = histories(text, tmp_path)
    assert items[:3] == ["i10001", "i10000", "i9999"]
    assert stored == [0, 0, *range(1, 10_001)]


def test_the_number_of_buckets_does_not_change_the_result(tmp_path: Path) -> None:
    times = pl.Series("time", range(20_000)).sample(fraction=1, shuffle=True, seed=1) + NOW * 10**9
    log = pl.DataFrame({"user": pl.int_range(20_000, eager=True) % 300, "item": times % 50, "time": times})
    log.write_parquet(tmp_path / "log.parquet")
    for name, memory in (("one", "1024"), ("many", "1")):
        assert import_events(tmp_path / "log.parquet", "--memory-mb", memory, target=tmp_path / name) == 0
    assert rows(tmp_path / "one") == rows(tmp_path / "many")
    last = log.group_by("user").agg(pl.col("time").max()).sort("time")["user"].to_list()
    assert [row["user_id"] for row in rows(tmp_path / "one")] == last
