"""A data set grows by partitions: every event is a target once, in order, and an append happens completely or not."""

import contextlib
import csv
import io
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from freescale.cli.main import main
from freescale.data.dataset import Dataset
from freescale.data.partitions import IS_TARGET, PARTITIONS_FILE, PartitionList
from freescale.errors import DataError

Event = tuple[str, str, int]
DAY = 86_400
START = 1_600_000_000


def random_log(rng: np.random.Generator, day: int, *, users: int = 12, events: int = 150) -> list[Event]:
    """Events of a day, some of them up to five days late."""
    late = rng.random(events) < 0.1
    times = START + day * DAY + rng.integers(0, DAY, events) - late * rng.integers(0, 5 * DAY, events)
    return [(f"user {rng.integers(users)}", f"item {rng.integers(90)}", int(at)) for at in times]


def append(folder: Path, name: str, log: list[Event], *more: str, code: int | None = 0) -> dict[str, int]:
    """Append a partition by the command; return its counts, or nothing if it was there already."""
    path, out = folder.parent / "log.csv", io.StringIO()
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("user_id", "item_id", "timestamp"), *log])
    words = ["data", "import", "events", str(path), str(folder), "--append", name, "--json", "--quiet", *more]
    with contextlib.redirect_stdout(out):
        ended = main(words)
    assert ended == code if code is not None else ended in (2, 3)
    return json.loads(out.getvalue()) if out.getvalue().startswith("{") else {}


def samples(folder: Path) -> pl.DataFrame:
    """The samples of all partitions, in order, with keys instead of ids."""
    names = [one.name for one in listed(folder).partitions]
    rows = pl.concat([pl.read_parquet(folder / name / "part-*.parquet").with_columns(p=pl.lit(name)) for name in names])
    items = pl.read_parquet(folder / "vocabulary.parquet")
    return rows.with_columns(
        item_id=pl.col("item_id").list.eval(pl.element().replace_strict(items["id"], items["key"]))
    )


def listed(folder: Path) -> PartitionList:
    found = Dataset(str(folder)).partitioned
    assert found is not None
    return found


def targets_of(rows: pl.DataFrame) -> Counter[tuple[int, str, int]]:
    events = rows.explode("item_id", "timestamp", IS_TARGET).filter(pl.col(IS_TARGET) == 1)
    return Counter(events.select("user_id", "item_id", "timestamp").iter_rows())


@pytest.mark.parametrize("max_history", [8, 500])
def test_every_event_is_a_target_exactly_once(tmp_path: Path, max_history: int) -> None:
    rng, folder, expected, too_late = np.random.default_rng(max_history), tmp_path / "stream", set[Event](), 0
    late = duplicates = 0
    newest = 0
    for day in range(5):
        log = random_log(rng, day)
        log += log[:7] + (sorted(expected, key=lambda event: event[2])[-5:] if day else [])  # delivered again
        counts = append(
            folder, f"date=2020-09-{day + 10}", log, "--raw-ids", "item_id", "--max-history", str(max_history)
        )
        too_late += counts["too_late"]
        late, duplicates = late + counts["late"], duplicates + counts["duplicates"]
        expected |= set(log)
        newest = max(newest, *(event[2] for event in log))
        assert listed(folder).partitions[-1].last_time == newest
    rows = samples(folder)
    targets = targets_of(rows)
    assert set(targets.values()) == {1}
    assert len(targets) == sum(one.targets for one in listed(folder).partitions)
    if max_history == 500:
        assert too_late == 0
        assert Counter((item, at) for _, item, at in targets) == Counter((item, at) for _, item, at in expected)
        assert duplicates >= 5 * 7 + 4 * 5
    assert late > 0
    lists = rows["timestamp"].to_list()
    assert max(map(len, lists)) <= max_history
    assert all(times == sorted(times) for times in lists), "no target sees a later event"


def test_a_target_has_the_events_of_earlier_partitions_as_context(tmp_path: Path) -> None:
    folder = tmp_path / "stream"
    options = ("--raw-ids", "item_id", "--max-history", "4")
    append(folder, "date=1", [("u", "a", 10), ("u", "b", 20), ("v", "x", 15)], *options)
    append(folder, "date=2", [("u", "c", 30), ("u", "a2", 12)], *options)
    append(folder, "date=3", [("u", f"n{i}", 40 + i) for i in range(5)])
    rows = samples(folder).select("p", "item_id", IS_TARGET).rows()
    assert rows[2] == ("date=2", ["a", "a2", "b", "c"], [0, 1, 0, 1]), "the late event is before b"
    assert rows[3:] == [
        ("date=3", ["b", "c", "n0", "n1"], [0, 0, 1, 1]),
        ("date=3", ["n0", "n1", "n2", "n3"], [0, 0, 1, 1]),
        ("date=3", ["n1", "n2", "n3", "n4"], [0, 0, 0, 1]),
    ]


def test_partitions_are_appended_in_order_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, log = tmp_path / "stream", [("u", "a", 10), ("u", "b", 20)]
    append(folder, "date=2020-01-02/hour=03", log, "--max-history", "9")
    before = (folder / PARTITIONS_FILE).read_bytes()
    assert append(folder, "date=2020-01-02/hour=03", [("w", "new", 50)]) == {}
    assert (folder / PARTITIONS_FILE).read_bytes() == before
    later = [("u", "b", 30)]
    for name, events, more, error in [
        ("date=2020-01-02/hour=02", later, (), "not behind date=2020-01-02/hour=03"),
        ("../elsewhere", later, (), "cannot be the name of a partition"),
        ("date=2020-01-03", later, ("--max-history", "10"), "--max-history cannot change"),
        ("date=2020-01-03", later, ("--raw-ids", "item_id"), "--raw-ids cannot change"),
        ("date=2020-01-03", later, ("--time", "none"), "needs events with times"),
        ("date=2020-01-03", log, (), "every event of the log is in the data set already"),
    ]:
        capsys.readouterr()
        assert append(folder, name, events, *more, code=None) == {}
        assert error in capsys.readouterr().err
    assert (folder / PARTITIONS_FILE).read_bytes() == before
    assert append(folder, "date=2020-01-03", later)["targets"] == 1
    assert listed(folder).until("2020-01-02").partitions[-1].name == "date=2020-01-02/hour=03"
    assert Dataset(str(folder), until="date=2020-01-02").rows == 1


def test_an_append_that_is_killed_leaves_the_data_set_as_it_was(tmp_path: Path, whole_form: bool) -> None:
    rng = np.random.default_rng(5)
    logs = [random_log(rng, day, users=300, events=4000) for day in range(2)]
    options = ("--raw-ids", "item_id")
    append(tmp_path / "a", "date=1", logs[0], *options)
    append(tmp_path / "undisturbed", "date=1", logs[0], *options)
    append(tmp_path / "undisturbed", "date=2", logs[1])
    folder = tmp_path / "a"
    before = (folder / PARTITIONS_FILE).read_bytes()
    words = [sys.executable, "-m", "freescale", "data", "import", "events", str(tmp_path / "log.csv"), str(folder)]
    for kill in range(12 if whole_form else 2):
        process = subprocess.Popen([*words, "--append", "date=2", "--quiet"], stdout=subprocess.DEVNULL)
        wait_for_files(folder / "date=2", process)
        time.sleep(rng.random() * 0.1 * kill)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (folder / PARTITIONS_FILE).read_bytes() != before:
            break
        assert len(Dataset(str(folder)).partitioned.partitions) == 1  # type: ignore[union-attr]
    append(folder, "date=2", logs[1])
    assert (folder / PARTITIONS_FILE).read_bytes() == (tmp_path / "undisturbed" / PARTITIONS_FILE).read_bytes()
    assert samples(folder).equals(samples(tmp_path / "undisturbed"))


def wait_for_files(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while not any(folder.glob("*.parquet")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def test_a_damaged_list_of_partitions_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "stream"
    append(folder, "date=1", [("u", "a", 10), ("u", "b", 20)])
    raw = (folder / PARTITIONS_FILE).read_bytes()
    for damaged in (raw[: len(raw) // 2], raw.replace(b"date=1", b"date=2"), b"[]", b""):
        (folder / PARTITIONS_FILE).write_bytes(damaged)
        with pytest.raises(DataError, match="the manifest is damaged"):
            Dataset(str(folder))
