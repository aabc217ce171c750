"""A drift log replaces 5% of its items on every day, and its sessions stay in their group."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.cli.main import main
from freescale.data.manifest import MANIFEST_FILE, parse_manifest
from freescale.data.synthetic_drift import catalogue_of, group_of
from freescale.data.vocabulary import RAW_IDS


@pytest.mark.parametrize("day", [0, 7, 19, 38])
def test_five_percent_of_the_items_are_new_on_every_day_and_none_returns(day: int) -> None:
    earlier = {int(item) for before in range(day + 1) for item in catalogue_of(before, 1000)}
    today, tomorrow = (set(catalogue_of(which, 1000).tolist()) for which in (day, day + 1))
    assert len(today) == len(tomorrow) == 1000
    assert len(tomorrow - today) == 50
    assert not (tomorrow - today) & earlier
    assert min(tomorrow) >= 0


def test_sessions_use_the_items_of_their_day_mostly_of_one_group(tmp_path: Path) -> None:
    assert main(["data", "synth", "--preset", "drift", "--users", "2000", "--items", "200", str(tmp_path / "log")]) == 0
    manifest = parse_manifest((tmp_path / "log" / MANIFEST_FILE).read_bytes(), where="")
    assert (manifest.rows, manifest.vocabulary) == (2000, RAW_IDS)
    table = pa.concat_tables([pq.read_table(file) for file in (tmp_path / "log").glob("*.parquet")])
    shares, first = [], min(times[0] for times in table["timestamp"].to_pylist()) // 86_400
    for items, times in zip(table["item_id"].to_pylist(), table["timestamp"].to_pylist(), strict=True):
        assert times[0] // 86_400 == times[-1] // 86_400
        assert set(items) <= set(catalogue_of(times[0] // 86_400 - first, 200).tolist())
        shares.append(np.bincount(group_of(np.array(items), 200)).max() / len(items))
    assert 0.8 < np.mean(shares) < 0.9


def test_options_that_a_drift_log_does_not_have_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "synth", "--preset", "drift", "--popularity", "public", str(tmp_path / "log")]) != 0
    assert "leave out --popularity" in capsys.readouterr().err
