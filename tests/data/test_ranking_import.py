"""Impressions become samples whose history is exactly the strictly earlier events of the user."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.cli.main import main
from tests.data.imported import import_events, rows
from tests.support.datasets import histories, loader

EVENTS = "user,item,time,price\nu,c,3,30\nu,a,1,10\nu,b,2,20\nv,a,2,5\nw,z,9,1\n"
SHOWN = """user,item,time,click,like
u,x,2,1,0.5
u,c,3.5,True,1
u,a,2,0,0
v,a,2,1,1
v,b,7,false,0
q,a,5,1,1
"""


def ranked(folder: Path, *words: str, target: str = "data") -> Path:
    shown = ["--impressions", str(folder / "shown.csv"), "--labels", "click", "like"]
    assert import_events(folder / "log.csv", *shown, *words, target=folder / target) == 0
    return folder / target


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "log.csv").write_text(EVENTS)
    (tmp_path / "shown.csv").write_text(SHOWN)
    return tmp_path


def test_impressions_of_one_user_and_time_become_one_sample_with_earlier_events(logs: Path) -> None:
    result = rows(ranked(logs, "--features", "price"))
    names = ("user_id", "item_id", "timestamp", "price", "candidate_id", "label_click", "label_like")
    assert [tuple(row[name] for name in names) for row in result] == [
        (0, ["a"], [1], [10], ["x", "a"], [1, 0], [0.5, 0]),
        (0, ["a", "b", "c"], [1, 2, 3], [10, 20, 30], ["c"], [1], [1]),
        (1, ["a"], [2], [5], ["b"], [0], [0]),
    ]


def test_dropped_impressions_and_truncated_histories_are_counted(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (logs / "shown.csv").write_text(SHOWN + "q,b,5,1,1\n" * 10)
    assert rows(ranked(logs, "--max-history", "2"))[1]["item_id"] == ["b", "c"]
    output = capsys.readouterr()
    assert "12 impressions are dropped: their users have no event before them" in output.err
    assert "1 histories are truncated to their last 2 events" in output.err
    assert "3 samples of 2 users, 5 items, 4 events" in output.out


def test_a_later_data_set_keeps_the_items_of_an_earlier_one(logs: Path) -> None:
    first = ranked(logs)
    (logs / "shown.csv").write_text("user,item,time,click,like\nu,new,9,1,1\nu,x,9,0,1\n")
    ranked(logs, "--vocabulary", str(first), target="later")
    (batch,) = loader(logs / "later", oov_rows=4)
    assert batch.candidates is not None
    new, known = batch.candidates["candidate_id"].tolist()
    assert known == pl.read_parquet(first / "vocabulary.parquet")["key"].to_list().index("x")
    assert new >= 5


def brute_force(events: list[Any], shown: list[Any], most: int) -> Iterator[Any]:
    samples: dict[tuple[int, int], list[Any]] = {}
    for user, item, time, label in shown:
        samples.setdefault((time, user), []).append((item, label))
    for (time, user), candidates in sorted(samples.items()):
        before = sorted((e for e in events if e[0] == user and e[2] < time), key=lambda e: e[2])[-most:]
        if before:
            yield user, [e[1] for e in before], [e[2] // 1000 for e in before], candidates


@pytest.mark.parametrize("memory", ["1024", "1"])
def test_any_log_gives_the_brute_force_result(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freescale.data.histories._CHUNK", 500)  # several pieces
    rng = np.random.default_rng(3)
    start = 1_700_000_000_000
    logs = [
        np.stack([rng.integers(0, 30, n), rng.integers(0, 40, n), start + rng.integers(0, 9000, n)], 1)
        for n in (9000, 1500)
    ]
    names = ["user", "item", "time"]
    labels = rng.integers(0, 2, 1500)
    pl.DataFrame(logs[0], schema=names, orient="row").write_parquet(tmp_path / "log.parquet")
    shown = pl.DataFrame(logs[1], schema=names, orient="row").with_columns(click=pl.Series(labels))
    shown.write_parquet(tmp_path / "shown.parquet")
    words = ["--impressions", str(tmp_path / "shown.parquet"), "--labels", "click"]
    words += ["--max-history", "20", "--memory-mb", memory]
    assert import_events(tmp_path / "log.parquet", *words, target=tmp_path / "data") == 0
    result = [
        (
            row["user_id"],
            row["item_id"],
            row["timestamp"],
            list(zip(row["candidate_id"], row["label_click"], strict=True)),
        )
        for row in rows(tmp_path / "data")
    ]
    rated = [[*row, label] for row, label in zip(logs[1].tolist(), labels.tolist(), strict=True)]
    assert result == list(brute_force(logs[0].tolist(), rated, most=20))


def test_events_and_impressions_may_format_times_and_keys_differently(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,time\n1,7,1700000000\n1,8,1700000001\n")
    (tmp_path / "shown.csv").write_text("user,item,time,click,like\n1,x,2023-11-14T22:13:20.5Z,1,1\n")
    (row,) = rows(ranked(tmp_path))
    assert (row["item_id"], row["candidate_id"], row["timestamp"]) == (["7"], ["x"], [1_700_000_000])


@pytest.mark.parametrize(
    ("shown", "words", "code", "message"),
    [
        ("u,x,5,2,0\n", (), 3, "label_click missing or not of its type: a label is a number from 0 to 1"),
        ("u,x,5,yes,0\n", (), 3, "shown.csv, line 2"),
        ("u,x,0,1,0\n", (), 3, "no impression has an event of its user before it"),
        ("", (), 3, "no usable event"),
        ("u,x,5,1,0\n", ("--time", "none"), 2, "impressions need times"),
    ],
)
def test_unusable_impressions_are_refused(
    logs: Path, shown: str, words: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (logs / "shown.csv").write_text("user,item,time,click,like\n" + shown)
    given = ["--impressions", str(logs / "shown.csv"), "--labels", "click", "like", *words]
    assert import_events(logs / "log.csv", *given, target=logs / "data") == code
    assert message in capsys.readouterr().err


def test_impressions_require_labels_and_labels_require_impressions(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_events(logs / "log.csv", "--labels", "click", target=logs / "data") == 2
    assert "ranking needs both" in capsys.readouterr().err


def test_plain_parquet_histories_are_copied_unchanged(tmp_path: Path) -> None:
    table = histories([3, 1, 4, 1, 5], candidates=True)
    (tmp_path / "plain").mkdir()
    pq.write_table(table.slice(0, 2), tmp_path / "plain" / "a.parquet")
    pq.write_table(table.slice(2), tmp_path / "plain" / "b.parquet")
    words = ["data", "import", "histories", str(tmp_path / "plain"), str(tmp_path / "data")]
    assert main([*words, "--features", "rating", "age"]) == 0
    read = loader(tmp_path / "data", columns=("rating", "age"), order="log")
    largest = max(sum(table["item_id"].to_pylist() + table["candidate_id"].to_pylist(), []))
    assert read.vocabulary.items == largest + 1
    (batch,) = read
    (expected,) = loader(tmp_path / "plain", columns=("rating", "age"), order="log")
    for some, other in ((batch.history, expected.history), (batch.candidates, expected.candidates)):
        assert some is not None
        assert other is not None
        assert {n: v.tolist() for n, v in some.features.items()} == {n: v.tolist() for n, v in other.features.items()}
    assert batch.scalars["age"].tolist() == expected.scalars["age"].tolist()


def test_a_bad_plain_parquet_history_can_be_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain").mkdir()
    bad = pa.table({"user_id": [1, 2], "item_id": [[5], [-1]], "timestamp": [[1], [1]]})
    pq.write_table(bad, tmp_path / "plain" / "a.parquet")
    words = ["data", "import", "histories", str(tmp_path / "plain"), str(tmp_path / "data")]
    assert main(words) == 3
    assert "a.parquet, row group 0, row 1" in capsys.readouterr().err
    assert main([*words, "--on-bad", "skip"]) == 0
    assert loader(tmp_path / "data").dataset.rows == 1
