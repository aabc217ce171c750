"""Dynamic ids have the same slots and rows in any schedule, on any world size, and after any restart."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from freescale.config import FeatureConfig, RunConfig
from freescale.data.dataset import Dataset
from freescale.embedding.zero_collision_ids import Assignment, DynamicIds
from freescale.train.build import build
from freescale.train.slot_summary import summarize_tables
from freescale.train.trained_model import load_config, load_trained_model
from tests.exact.test_resume import finished_run, pieces, train
from tests.support.datasets import lists, write_dataset
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, apart, joined, same, small, whole

ITEMS, USERS = 40, 96
STEPS = 16  # of two epochs with 12 users per batch


def write_drifting(path: Path, users: int = USERS) -> Path:
    """Write a log in whose order ids of artists come and go: more ids than slots, some in every step."""
    rng = np.random.default_rng(0)
    lengths = rng.choice([1, 2, 3, 5, 8, 20], users).tolist()
    total, user = sum(lengths), np.repeat(np.arange(users), lengths)
    artist = rng.integers(0, 30, total) + 5 * user
    artist = artist * 0x9E3779B97F4A7 & (1 << 62) - 1
    offered = [i % 3 + 1 for i in range(users)]
    shown = rng.integers(0, 900, sum(offered)) * 0x9E3779B97F4A7
    table = pa.table(
        {
            "user_id": pa.array(np.arange(users)),
            "item_id": lists(lengths, rng.integers(0, ITEMS, total)),
            "timestamp": lists(lengths, 1_000_000 + 500 * np.arange(total)),
            "artist": lists(lengths, artist),
            "candidate_id": lists(offered, rng.integers(0, ITEMS, sum(offered))),
            "candidate_artist": lists(offered, shown),
            "label_click": lists(offered, rng.integers(0, 2, sum(offered))),
        }
    )
    write_dataset(path, table, rows_per_group=4, items=ITEMS)
    return path


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drifting(tmp_path_factory.mktemp("drifting") / "data")


def dynamic(path: Path, *, eviction: str = "lru", admit_after: int = 1, **changes: Any) -> RunConfig:
    """A run of seconds with 128 slots for many more ids."""
    task = {"kind": "ranking", "labels": ("label_click",)}
    ttl = 20_000 if eviction == "ttl" else 0
    feature = FeatureConfig(ids="dynamic", rows=128, eviction=eviction, ttl=ttl, admit_after=admit_after)  # type: ignore[arg-type]
    return replace(small(path, task=task, **changes), features={"artist": feature})


@pytest.fixture(scope="module")
def finished(groups: dict[int, Ranks], drifting: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Arrays]:
    """A run on two ranks, and what they hold."""
    run = tmp_path_factory.mktemp("finished")
    return run, finished_run(groups[2], dynamic(drifting, train={"log_every": 4}), run)


@pytest.mark.parametrize(
    ("eviction", "admit_after"),
    [("lru", 1), *(pytest.param(*policy, marks=pytest.mark.whole) for policy in (("ttl", 1), ("lfu", 2), ("none", 1)))],
)
def test_slots_and_rows_do_not_depend_on_the_world_size_and_the_schedule(
    groups: dict[int, Ranks], drifting: Path, tmp_path: Path, eviction: str, admit_after: int, whole_form: bool
) -> None:
    config = dynamic(drifting, eviction=eviction, admit_after=admit_after)
    serial = replace(config, tables=replace(config.tables, overlap="off"))
    alone = pieces([groups[1]], serial, tmp_path / "serial", [])
    used = alone["artist.ids"] != -1
    assert used.sum() > 100
    assert (alone["artist.last_step"][used].max() == STEPS - 1) == (alone["artist.count"][used].max() > 1)
    for count in (1, 2, 4) if whole_form else (2,):
        other = pieces([groups[count]], config, tmp_path / f"{count}", [])
        assert same(slots(alone), slots(other)), count
        assert apart(alone, other) < 1e-9, count
    assert same(alone, pieces([groups[1]], config, tmp_path / "again", []))


def slots(arrays: Arrays) -> Arrays:
    """The arrays of slots among those that ranks hold."""
    return {n: a for n, a in arrays.items() if n.startswith(("artist.", "waiting.")) and n != "artist.sum"}


def test_tables_are_described_and_their_changes_are_counted(finished: tuple[Path, Arrays]) -> None:
    run, arrays = finished
    ids = arrays["artist.ids"]
    used = ids != -1
    summary = summarize_tables(run)
    table = summary["tables"]["artist"]
    assert (summary["step"], table["ids"], table["load"]) == (STEPS, used.sum(), used.sum() / 128)
    (hottest, count), *_ = table["hottest"]
    assert arrays["artist.count"][ids == hottest] == count == arrays["artist.count"][used].max()
    coldest, age = table["coldest"][0]
    assert arrays["artist.last_step"][ids == coldest] == STEPS - 1 - age == arrays["artist.last_step"][used].min()
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    changes = {
        name: sum(entry[f"ids/artist/{name}"] for entry in entries if entry["kind"] == "train")
        for name in ("new", "evicted")
    }
    assert changes["new"] - changes["evicted"] == used.sum()
    assert changes["evicted"] > 100
    assert [entry for entry in entries if entry["kind"] == "train"][-1]["ids/artist/load"] == table["load"]


def loaded_rows(world: World, run: str, ids: list[int]) -> NDArray[Any]:
    """Return the rows of ids in the trained model of a run."""
    trained = load_trained_model(Path(run), load_config(Path(run)), joined(world))
    rows = trained.sharded.module.read_rows({"artist": torch.tensor(ids)})["artist"]
    return rows.lookup().numpy()


def test_a_trained_model_has_the_rows_of_its_ids(groups: dict[int, Ranks], finished: tuple[Path, Arrays]) -> None:
    run, arrays = finished
    used = np.flatnonzero(arrays["artist.ids"] != -1)
    for rows in groups[2].run(loaded_rows, str(run), arrays["artist.ids"][used].tolist()):
        assert np.array_equal(rows, arrays["artist"][used])


@pytest.mark.whole  # in the gate, that of dynamic items, in micro-batches
def test_overlapped_and_serial_steps_agree_bitwise(groups: dict[int, Ranks], drifting: Path, tmp_path: Path) -> None:
    config = dynamic(drifting, train={"precision": "fp32"})
    serial = replace(config, tables=replace(config.tables, overlap="off"))
    assert same(*(pieces([groups[2]], c, tmp_path / n, []) for c, n in ((config, "overlapped"), (serial, "serial"))))


@pytest.mark.whole  # in the gate, that of dynamic items
def test_a_run_resumes_bitwise_and_on_other_world_sizes(
    groups: dict[int, Ranks], drifting: Path, tmp_path: Path, finished: tuple[Path, Arrays]
) -> None:
    config, (_, once) = dynamic(drifting), finished
    assert same(once, pieces([groups[2]] * 3, config, tmp_path / "again", [5, 9]))
    other = pieces([groups[4], groups[2], groups[1]], config, tmp_path / "other", [5, 11])
    assert same(slots(once), slots(other))
    assert apart(once, other) < 1e-9


@pytest.mark.whole
def test_200_steps_with_evictions_in_each_agree_in_both_schedules_and_after_4_2_3_4_ranks(
    groups: dict[int, Ranks], tmp_path: Path
) -> None:
    log = write_drifting(tmp_path / "data", users=2400)
    config = dynamic(log, train={"epochs": 1, "log_every": 1})
    serial = replace(config, tables=replace(config.tables, overlap="off"))
    overlapped, in_turn = (pieces([groups[2]], c, tmp_path / n, []) for c, n in ((config, "a"), (serial, "b")))
    assert same(overlapped, in_turn)
    entries = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    evicted, new = (
        [entry[f"ids/artist/{name}"] for entry in entries if entry["kind"] == "train"] for name in ("evicted", "new")
    )
    assert len(evicted) == 200
    assert min(evicted[8:]) > 0
    assert min(new) > 0
    manifest = Dataset(str(log)).manifest
    assert manifest is not None
    assert sum(new) > 0.1 * (manifest.events + 2 * 2400), "10% of all ids, those of two candidates per user included"
    three = Ranks(3)
    others = {"1": ([groups[1]], []), "4, 2, 3, 4": ([groups[4], groups[2], three, groups[4]], [50, 100, 150])}
    for counts, (ranks, stops) in others.items():
        other = pieces(ranks, config, tmp_path / counts, stops)
        assert same(slots(overlapped), slots(other)), counts
        assert apart(overlapped, other) < 1e-9, counts
    three.close()


def killed(world: World, config: RunConfig, folder: str, step: int) -> None:
    """Train until the last rank is killed in a step that has given slots to new ids, but not initialized their rows."""
    trainer = build(config, joined(world), Path(folder))
    assign = DynamicIds.assign

    def assign_and_die(self: DynamicIds, ids: torch.Tensor, **now: int) -> Assignment:
        assigned = assign(self, ids, **now)
        if now["step"] == step and len(assigned.new) and world.rank == world.ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return assigned

    DynamicIds.assign = assign_and_die  # type: ignore[method-assign]
    trainer.fit()


def test_a_run_killed_during_inserts_resumes_bitwise(
    groups: dict[int, Ranks], drifting: Path, tmp_path: Path, finished: tuple[Path, Arrays]
) -> None:
    config, (_, once) = dynamic(drifting, train={"save_every": 5}), finished
    doomed = Ranks(2)
    doomed.send(killed, config, str(tmp_path / "killed"), 13)
    doomed.processes[1].join(60)
    assert doomed.processes[1].exitcode == -signal.SIGKILL
    doomed.close()
    again = whole(groups[2].run(train, config, str(tmp_path / "killed"), True, 0))
    assert same(once, again)
