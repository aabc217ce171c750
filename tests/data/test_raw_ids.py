"""Raw ids: an import keeps whole numbers and hashes text, the same in every import, and the keys stay known."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from freescale.cli.main import main
from freescale.config import RECIPES, FeatureConfig, override, save
from freescale.data import numbering
from freescale.errors import DataError
from tests.support.datasets import loader

TASTES = ["rock", "jazz", "pop"]


def write_log(path: Path, items: list[str], seed: int) -> list[tuple[int, str, int, str]]:
    rng = np.random.default_rng(seed)
    rows = [(int(rng.integers(20)), items[rng.integers(len(items))], 10**9 + i, TASTES[i % 3]) for i in range(400)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("user_id", "item_id", "timestamp", "taste"), *rows])
    return rows


def import_log(path: Path, target: Path, *more: str) -> None:
    assert main(["data", "import", "events", str(path), str(target), "--features", "taste", "--quiet", *more]) == 0


def ids_of(target: Path) -> dict[str, int]:
    saved = pl.read_parquet(target / "vocabulary.parquet")
    return dict(zip(map(str, saved["key"]), saved["id"], strict=True))


def test_text_has_the_same_id_in_every_import(tmp_path: Path) -> None:
    every = [f"song {i}" for i in range(60)]
    rows = write_log(tmp_path / "a.csv", every[:40], 0)
    write_log(tmp_path / "b.csv", every[20:], 1)
    for name in "ab":
        import_log(tmp_path / f"{name}.csv", tmp_path / name, "--raw-ids", "item_id", "taste")
    a, b = ids_of(tmp_path / "a"), ids_of(tmp_path / "b")
    common = a.keys() & b.keys()
    assert len(common) > 15
    assert all(a[key] == b[key] >= 0 for key in common)
    assert len(set((a | b).values())) == len(a | b)
    tastes = pl.read_parquet(tmp_path / "a" / "vocabulary-taste.parquet")
    taste = dict(zip(tastes["key"], tastes["id"], strict=True))
    found = set()
    for batch in loader(tmp_path / "a", order="log", columns=("taste",)):
        users = np.repeat(batch.scalars["user_id"].numpy(), batch.history.lengths.numpy()).tolist()
        columns = (batch.history[name].tolist() for name in ("item_id", "timestamp", "taste"))
        found |= set(zip(users, *columns, strict=True))
    assert found == {(user, a[item], time, taste[kind]) for user, item, time, kind in rows}


def test_whole_numbers_stay_and_negative_ones_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = [str(7 * 10**15 + i) for i in range(30)]
    write_log(tmp_path / "log.csv", numbers, 0)
    import_log(tmp_path / "log.csv", tmp_path / "data", "--raw-ids", "item_id")
    assert all(int(key) == number for key, number in ids_of(tmp_path / "data").items())
    write_log(tmp_path / "bad.csv", [*numbers, "-1"], 0)
    arguments = ["data", "import", "events", str(tmp_path / "bad.csv"), str(tmp_path / "no"), "--raw-ids", "item_id"]
    assert main(arguments) != 0
    assert "-1 cannot be a raw id" in capsys.readouterr().err


def test_two_keys_with_one_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbering, "_hash_text", len)
    with pytest.raises(DataError, match="'ab' and 'cd' of the items have the same 63-bit hash"):
        numbering.keep_ids(pl.DataFrame({"key": ["ab", "cd", "abc"], "count": [1, 2, 3]}), column="the items")


def test_only_columns_of_ids_can_be_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "log.csv", ["a", "b"], 0)
    assert main(["data", "import", "events", str(tmp_path / "log.csv"), str(tmp_path / "x"), "--raw-ids", "tast"]) == 2
    assert "columns of ids: item_id" in capsys.readouterr().err


def test_a_model_of_raw_ids_is_trained_and_recommends_their_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "log.csv", [f"song {i}" for i in range(60)], 0)
    import_log(tmp_path / "log.csv", tmp_path / "data", "--raw-ids", "item_id")
    config = override(RECIPES["tiny"], ["--data.path", str(tmp_path / "data"), "--train.max_steps", "4"])
    save(config, tmp_path / "fixed.toml")
    assert main(["train", str(tmp_path / "fixed.toml"), "--out", str(tmp_path / "none")]) != 0
    assert "holds raw ids of items, which need a dynamic table" in capsys.readouterr().err
    save(replace(config, features={"item": FeatureConfig(ids="dynamic", rows=128)}), tmp_path / "run.toml")
    assert main(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]) == 0
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "predicted"), "--k", "3"]) == 0
    predicted = pl.read_parquet(tmp_path / "predicted" / "*.parquet")
    known, pairs = ids_of(tmp_path / "data"), predicted.select("item", "item_id").explode("item", "item_id")
    assert predicted["item"].list.len().min() == 3
    assert all(known[key] == number for key, number in pairs.iter_rows())
