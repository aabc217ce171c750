"""Dynamic items: negatives are slots, and the result does not depend on the schedule, the world size or restarts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray

from freescale.config import FeatureConfig, RunConfig
from freescale.data.loader import Loader
from freescale.data.vocabulary import FIRST_SLOT
from freescale.embedding.ids import deduplicate
from freescale.embedding.prioritized import EmbeddingContext, RowOperations
from freescale.embedding.sharded import shard_tables
from freescale.embedding.tables import Table
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout
from freescale.train.evaluation import build_evaluation
from freescale.train.trained_model import load_config, load_trained_model
from tests.exact.test_dynamic_ids import USERS
from tests.exact.test_resume import finished_run, pieces
from tests.support.datasets import lists, write_dataset
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, apart, joined, same, small

SLOTS = 128


def write_catalogue(path: Path) -> Path:
    """Write a log in whose order items come and go: more than there are slots, some in every step."""
    rng = np.random.default_rng(1)
    lengths = rng.choice([2, 3, 5, 8, 20], USERS).tolist()
    total, user = sum(lengths), np.repeat(np.arange(USERS), lengths)
    item = (rng.integers(0, 30, total) + 5 * user) * 0x9E3779B97F4A7
    columns = {"item_id": lists(lengths, item), "timestamp": lists(lengths, 1_000_000 + 500 * np.arange(total))}
    write_dataset(path, pa.table({"user_id": pa.array(np.arange(USERS)), **columns}), rows_per_group=4)
    return path


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_catalogue(tmp_path_factory.mktemp("catalogue") / "data")


def dynamic_items(path: Path, *, eviction: str = "lru", admit_after: int = 1, **changes: Any) -> RunConfig:
    """A run of seconds with 128 slots for many more items."""
    ttl = 20_000 if eviction == "ttl" else 0
    item = FeatureConfig(ids="dynamic", rows=SLOTS, eviction=eviction, ttl=ttl, admit_after=admit_after)  # type: ignore[arg-type]
    return replace(small(path, **changes), features={"item": item})


def slots(arrays: Arrays) -> Arrays:
    """The arrays of slots among those that ranks hold."""
    return {name: array for name, array in arrays.items() if name.startswith("item.") and name != "item.sum"}


@pytest.fixture(scope="module")
def finished(
    groups: dict[int, Ranks], catalogue: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Arrays]:
    """A run on two ranks, and what they hold."""
    run = tmp_path_factory.mktemp("finished")
    return run, finished_run(groups[2], dynamic_items(catalogue), run)


@pytest.mark.parametrize(
    ("eviction", "admit_after"),
    [("lfu", 2), *(pytest.param(*policy, marks=pytest.mark.whole) for policy in (("lru", 1), ("ttl", 1)))],
)
def test_slots_and_rows_do_not_depend_on_the_world_size_and_the_schedule(
    groups: dict[int, Ranks], catalogue: Path, tmp_path: Path, eviction: str, admit_after: int, whole_form: bool
) -> None:
    config = dynamic_items(catalogue, eviction=eviction, admit_after=admit_after)
    serial = replace(config, tables=replace(config.tables, overlap="off"))
    alone = pieces([groups[1]], serial, tmp_path / "serial", [])
    assert (alone["item.ids"] != EMPTY).sum() > 100
    for count in (1, 2, 4) if whole_form else (2,):
        other = pieces([groups[count]], config, tmp_path / f"{count}", [])
        assert same(slots(alone), slots(other)), count
        assert apart(alone, other) < 1e-9, count


def test_overlapped_and_serial_steps_agree_bitwise(groups: dict[int, Ranks], catalogue: Path, tmp_path: Path) -> None:
    config = dynamic_items(catalogue, train={"precision": "fp32", "micro_batches": 2})
    serial = replace(config, tables=replace(config.tables, overlap="off"))
    assert same(*(pieces([groups[2]], c, tmp_path / n, []) for c, n in ((config, "overlapped"), (serial, "serial"))))


@pytest.mark.parametrize("overlap", ["on", pytest.param("off", marks=pytest.mark.whole)])
def test_a_run_resumes_bitwise_and_on_other_world_sizes(
    groups: dict[int, Ranks],
    catalogue: Path,
    tmp_path: Path,
    overlap: str,
    finished: tuple[Path, Arrays],
    whole_form: bool,
) -> None:
    config, (_, once) = dynamic_items(catalogue, tables={"overlap": overlap}), finished
    stops, others = ([5, 9], [5, 11]) if whole_form else ([7], [9])
    assert same(once, pieces([groups[2]] * (len(stops) + 1), config, tmp_path / "again", stops))
    sizes = (groups[4], groups[2], groups[1]) if whole_form else (groups[4], groups[1])
    other = pieces(sizes, config, tmp_path / "other", others)
    assert same(slots(once), slots(other))
    assert apart(once, other) < 1e-9


def evaluated(world: World, run: str) -> tuple[dict[str, float], list[Any]]:
    """Return the metrics of a trained model, and the best items and their scores for each sample of this rank."""
    config = load_config(Path(run))
    trained = load_trained_model(Path(run), config, joined(world))
    evaluate = build_evaluation(config, trained.world, trained.sharded.module)
    assert evaluate is not None
    metrics = evaluate()
    found = []
    loader = Loader.from_run(config, rank=world.rank, world_size=world.ranks, part="test")
    for batch in loader:
        best, scores = trained.corpus().top(batch, 5)
        found += zip(batch.sample_id.tolist(), best.tolist(), scores.tolist(), strict=True)
    return metrics, found


def test_evaluation_ranks_the_items_that_have_slots_and_assigns_none(
    groups: dict[int, Ranks], catalogue: Path, tmp_path: Path
) -> None:
    config = dynamic_items(catalogue, data={"split": "last"})
    arrays = finished_run(groups[2], config, tmp_path / "run")
    of_two, of_one = (groups[count].run(evaluated, str(tmp_path / "run")) for count in (2, 1))
    metrics, alone = of_one[0]
    assert of_two[0][0] == pytest.approx(metrics)
    live = set(arrays["item.ids"][arrays["item.ids"] != EMPTY].tolist())
    recommended = {sample: (items, scores) for _, found in of_two for sample, items, scores in found}
    assert len(recommended) == len(alone) == metrics["users"]
    for sample, items, scores in alone:
        assert set(items) <= live
        assert items == recommended[sample][0]
        assert np.allclose(scores, recommended[sample][1])
    assert 0 < metrics["unknown_targets"] < 1


def identified(world: World, run: str, requests: list[int]) -> NDArray[Any]:
    trained = load_trained_model(Path(run), load_config(Path(run)), joined(world))
    return trained.sharded.module.identify_items(torch.tensor(requests)).numpy()


def test_ids_and_slots_identify_each_other(groups: dict[int, Ranks], finished: tuple[Path, Arrays]) -> None:
    run, arrays = finished
    layout, ids = BucketLayout.of(SLOTS), arrays["item.ids"].reshape(-1)
    numbers = np.arange(SLOTS)
    by_number = ids[layout.slot_row(torch.from_numpy(numbers)).numpy()]
    live = by_number != EMPTY
    for found in groups[2].run(identified, str(run), [*(FIRST_SLOT - numbers).tolist(), 5]):
        assert np.array_equal(found, [*by_number, EMPTY])
    for found in groups[2].run(identified, str(run), by_number[live].tolist()):
        assert np.array_equal(found, numbers[live])


def positions(world: World, path: str) -> tuple[list[int], list[int]]:
    """Return the positions of items and of the slots that hold them, among the rows of a batch."""
    config, here = dynamic_items(Path(path)), joined(world)
    layout = BucketLayout.of(SLOTS)
    table = Table("item", layout.rows, 8, layout=layout, sampled=True)
    tables = shard_tables([table], config, here, here.transport, torch.float64)
    rows = RowOperations(tables)

    def prepared(ids: torch.Tensor, step: int) -> EmbeddingContext:
        context = EmbeddingContext({"item": deduplicate(ids, rows=None)}, step=step)
        for operation in (rows.send_ids, rows.assign_slots, rows.send_slots):
            operation(context, "urgent")
        return context

    items = torch.arange(1, 9) * 10**12
    prepared(items, 0)
    both = torch.cat([items, FIRST_SLOT - tables.identify("item", items)])
    context = prepared(both, 1)
    merged = context.merge(context.unique_ids)["item"].inverse.tolist()
    return merged[: len(items)], merged[len(items) :]


def test_a_negative_that_is_the_positive_has_its_position(groups: dict[int, Ranks], catalogue: Path) -> None:
    for count in (1, 2):
        for of_items, of_slots in groups[count].run(positions, str(catalogue)):
            assert of_items == of_slots
            assert len(set(of_items)) == len(of_items)
