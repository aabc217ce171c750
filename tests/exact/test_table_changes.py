"""At a resume a dynamic table can grow, and a vocabulary can become dynamic. No id loses its row."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from freescale.config import FeatureConfig, RunConfig, save
from freescale.data.vocabulary import MISSING_ID
from freescale.embedding.zero_collision_layout import EMPTY
from freescale.errors import FreeScaleError
from freescale.train.build import build
from freescale.train.slot_summary import summarize_tables
from tests.exact.test_dynamic_ids import dynamic, loaded_rows, slots, write_drifting
from tests.exact.test_resume import train
from tests.support.datasets import lists, write_dataset
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, apart, joined, same, small, whole

STOP = 9
GENRES = 20


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drifting(tmp_path_factory.mktemp("drifting") / "data")


@pytest.fixture(scope="module")
def genres(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with a vocabulary of genres, some of them missing."""
    rng = np.random.default_rng(2)
    lengths, offered = rng.choice([1, 2, 3, 5, 8, 20], 144).tolist(), [2] * 144
    columns = {
        "item_id": lists(lengths, rng.integers(0, 40, sum(lengths))),
        "timestamp": lists(lengths, 1_000_000 + 500 * np.arange(sum(lengths))),
        "genre": _some_missing(lengths, rng),
        "candidate_id": lists(offered, rng.integers(0, 40, sum(offered))),
        "candidate_genre": _some_missing(offered, rng),
        "label_click": lists(offered, rng.integers(0, 2, sum(offered))),
    }
    path = tmp_path_factory.mktemp("genres") / "data"
    table = pa.table({"user_id": pa.array(np.arange(144)), **columns})
    write_dataset(path, table, rows_per_group=4, items=40)
    return path


def _some_missing(lengths: Sequence[int], rng: np.random.Generator) -> pa.Array:
    values = pa.array(rng.integers(0, GENRES, sum(lengths)), mask=rng.random(sum(lengths)) < 0.1)
    return pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), values)


def with_rows(config: RunConfig, rows: int) -> RunConfig:
    """The config with another size of its dynamic table."""
    return replace(config, features={name: replace(f, rows=rows) for name, f in config.features.items()})


def changed(
    groups: dict[int, Ranks], counts: tuple[int, int], configs: tuple[RunConfig, RunConfig], folder: Path
) -> Arrays:
    """Train on some ranks with one config, then on others with another."""
    first = replace(configs[0], train=replace(configs[0].train, max_steps=STOP))  # a signal may take a step longer
    groups[counts[0]].run(train, first, str(folder), False, 0)
    return whole(groups[counts[1]].run(train, configs[1], str(folder), True, 0))


def by_id(arrays: Arrays, table: str) -> Arrays:
    """Row and optimizer state of each id."""
    used = np.flatnonzero(arrays[f"{table}.ids"] != EMPTY)
    return {f"{arrays[f'{table}.ids'][i]}{name}": arrays[table + name][i] for i in used for name in ("", ".sum")}


@pytest.mark.parametrize(
    ("eviction", "admit_after", "rows"), [pytest.param("lru", 1, 300, marks=pytest.mark.whole), ("lfu", 2, 140_000)]
)
def test_a_grown_table_is_the_same_on_any_world_size(
    groups: dict[int, Ranks],
    drifting: Path,
    tmp_path: Path,
    eviction: str,
    admit_after: int,
    rows: int,
    whole_form: bool,
) -> None:
    before = dynamic(drifting, eviction=eviction, admit_after=admit_after)
    after = with_rows(before, rows)
    alone = changed(groups, (1, 1), (before, after), tmp_path / "alone")
    used = (alone["artist.ids"] != EMPTY).sum()
    assert used > 140
    for counts in ((2, 4), (4, 2)) if whole_form else ((2, 4),):
        other = changed(groups, counts, (before, after), tmp_path / str(counts))
        assert same(slots(alone), slots(other)), counts
        assert apart(alone, other) < 1e-9, counts
    save(after, tmp_path / "alone" / "config.toml")
    table = summarize_tables(tmp_path / "alone")["tables"]["artist"]
    assert (table["ids"], table["slots"]) == (used, 64 * -(-rows // 64)), "it keeps its 64 buckets"
    ids = np.flatnonzero(alone["artist.ids"] != EMPTY)
    for found in groups[2].run(loaded_rows, str(tmp_path / "alone"), alone["artist.ids"][ids].tolist()):
        assert np.array_equal(found, alone["artist"][ids])


@pytest.mark.whole
def test_growing_changes_no_row_where_none_is_evicted(groups: dict[int, Ranks], drifting: Path, tmp_path: Path) -> None:
    before, after = (with_rows(dynamic(drifting, eviction="none"), 64 * slots) for slots in (40, 80))
    grown = changed(groups, (2, 2), (before, after), tmp_path / "grown")
    large = whole(groups[2].run(train, after, str(tmp_path / "large"), False, 0))
    assert apart(by_id(grown, "artist"), by_id(large, "artist")) < 1e-9


def ranking(path: Path, **features: FeatureConfig) -> RunConfig:
    return replace(small(path, task={"kind": "ranking", "labels": ("label_click",)}), features=features)


@pytest.mark.parametrize(
    "counts", [(2, 1), *(pytest.param(counts, marks=pytest.mark.whole) for counts in ((1, 2), (2, 4)))]
)
def test_a_vocabulary_that_becomes_dynamic_keeps_its_rows_and_trains_as_before(
    groups: dict[int, Ranks], genres: Path, tmp_path: Path, counts: tuple[int, int]
) -> None:
    fixed = ranking(genres, genre=FeatureConfig(rows=GENRES, missing="default"))
    free: Any = {"ids": "dynamic", "eviction": "lru"}
    after = ranking(
        genres,
        item=FeatureConfig(rows=1024, **free),
        genre=FeatureConfig(rows=1024, missing="default", **free),
    )
    converted = changed(groups, counts, (fixed, after), tmp_path / "converted")
    unchanged = whole(groups[counts[1]].run(train, fixed, str(tmp_path / "fixed"), False, 0))
    for table, ids in (("item", range(40)), ("genre", [*range(GENRES), MISSING_ID])):
        rows = by_id(converted, table)
        assert rows.keys() == {f"{id_}{name}" for id_ in ids for name in ("", ".sum")}
        last = len(unchanged[table]) - 1
        numbers = [last if id_ == MISSING_ID else id_ for id_ in ids]
        expected = {
            f"{i}{name}": unchanged[table + name][n] for i, n in zip(ids, numbers, strict=True) for name in ("", ".sum")
        }
        assert apart(expected, rows) < 1e-9


def refusal(world: World, config: RunConfig, folder: str) -> str:
    """Try to resume; gives the error."""
    trainer = build(config, joined(world), Path(folder))
    try:
        trainer.checkpoints.resume()
    except FreeScaleError as error:
        return str(error)
    finally:
        trainer.components.profiler.close()
        trainer.close()
    return ""


def test_a_table_that_shrinks_and_ids_that_would_lose_their_rows_are_refused(
    groups: dict[int, Ranks], drifting: Path, tmp_path: Path
) -> None:
    config = dynamic(drifting)
    groups[1].run(train, config, str(tmp_path / "dynamic"), False, 3)
    (error,) = groups[1].run(refusal, with_rows(config, 64), str(tmp_path / "dynamic"))
    assert "table 'artist' has 128 slots there, and cannot shrink to 64" in error
    assert "at least 128 rows" in error
    fixed = ranking(drifting)
    groups[1].run(train, fixed, str(tmp_path / "fixed"), False, 3)
    few: Any = FeatureConfig(ids="dynamic", rows=64)
    (error,) = groups[1].run(refusal, ranking(drifting, item=few), str(tmp_path / "fixed"))
    assert "ids of table 'item' would find no slot among 64" in error
