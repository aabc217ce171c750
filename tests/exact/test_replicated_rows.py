"""Popular rows on every rank change where bytes travel, not what is trained: to 1e-9 in fp64."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from freescale.config import RunConfig
from freescale.embedding.exchange import AllToAllPlan
from freescale.embedding.prioritized import require
from freescale.train.build import build
from freescale.train.metrics_logger import MetricsLogger
from freescale.train.sharded_model import _AUTO
from tests.exact.test_overlap import trained
from tests.exact.test_resume import train
from tests.exact.test_two_level import trained_on_hosts
from tests.faults import test_nonfinite as nonfinite
from tests.support.datasets import histories, write_dataset
from tests.support.feature_log import with_features, write_feature_log
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, apart, held, joined, same, small, whole

ROWS = 15
"""Of 40 items, and of all rows of the small tables of features."""
FEW: dict[str, Any] = {"max_steps": 8, "epochs": 10}
_WHOLE = pytest.mark.whole


def replicating(config: RunConfig, rows: int | Literal["auto"] = ROWS, **tables: Any) -> RunConfig:
    return replace(config, tables=replace(config.tables, replicated_rows=rows, **tables))


def outcome(ranks: Ranks, config: RunConfig, folder: Path) -> Arrays:
    return whole([arrays for _, arrays in ranks.run(trained, config, str(folder), False)])


def kinds(log: Path, folder: Path) -> dict[str, RunConfig]:
    """Runs with negatives, with tables of several widths, in micro-batches, and with the other optimizers."""
    lengths = np.random.default_rng(0).choice([1, 2, 3, 5, 8, 20, 60], 96).tolist()
    write_feature_log(folder / "data", lengths, candidates=True)
    return {
        "retrieval": small(log, train=FEW),
        "ranking with features": with_features(folder / "data", train=FEW),
        "micro-batches": small(log, train={**FEW, "micro_batches": 3}),
        "without balance": small(log, train=FEW, balance={"mode": "off"}),
        "adagrad": small(log, train=FEW, tables={"optimizer": "adagrad"}),
        "sgd": small(log, train=FEW, tables={"optimizer": "sgd", "lr": 0.01}),
        "owners of blocks": small(log, train=FEW, tables={"owners": "block"}),
    }


def cases() -> list[Any]:
    short = ("retrieval", 2, "on"), ("ranking with features", 4, "on"), ("micro-batches", 2, "off")
    more = "without balance", "adagrad", "sgd", "owners of blocks"
    every = [
        (kind, ranks, overlap)
        for kind in ("retrieval", "ranking with features", "micro-batches", *more)
        for ranks in (1, 2, 4)
        for overlap in ("off", "on")
    ]
    return [pytest.param(*case, marks=() if case in short else _WHOLE) for case in every]


@pytest.mark.parametrize(("kind", "count", "overlap"), cases())
def test_a_run_with_replicated_rows_equals_the_run_without(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, kind: str, count: int, overlap: str
) -> None:
    config = kinds(log, tmp_path)[kind]
    without = outcome(groups[count], config, tmp_path / "without")
    found = outcome(groups[count], replicating(config, overlap=overlap), tmp_path / "with")
    assert apart(without, found) < 1e-9


@pytest.mark.whole
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_overlap_and_the_exchange_change_no_bit(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, precision: str
) -> None:
    found = []
    for exchange, overlap in (("flat", "off"), ("flat", "on"), ("two_level", "off"), ("two_level", "on")):
        config = small(log, tables={"exchange": exchange, "overlap": overlap}, train={**FEW, "precision": precision})
        words = replicating(config), str(tmp_path / f"{exchange} {overlap}"), [0, 0, 1, 1]
        found.append(whole([arrays for _, arrays in groups[4].run(trained_on_hosts, *words)]))
    assert all(same(found[0], other) for other in found[1:])


def observed(world: World, config: RunConfig, folder: str) -> tuple[list[int], list[int], list[str]]:
    """The rows of items that were looked up on owners, those of batches, and what differs from the owners in the end.

    A row without a request has to keep its bits, and those of its optimizer state.
    """
    trainer = build(config, joined(world), Path(folder))
    tables, step = trainer.components.tables, trainer.components.step
    assert tables is not None
    assert tables.replicated is not None
    (item,), began = tables.tables, held(trainer)
    owned = item.order.rows_at(np.array(item.owned(world.rank, world.ranks), dtype=np.int64))
    looked_up, requested = set[int](), set[int]()
    look_up, run = tables.look_up, step.run

    def noting(plan: AllToAllPlan) -> dict[str, Tensor]:
        looked_up.update(owned[plan.local_rows["item"].numpy()].tolist())
        return look_up(plan)

    def batches(*words: Any, **more: Any) -> Any:
        state = run(*words, **more)
        requested.update(state.unique_ids[0]["item"].unique.tolist())
        return state

    with patch.object(tables, "look_up", noting), patch.object(step, "run", batches):
        trainer.fit()
    ended = held(trainer)
    every: list[Any] = [None] * world.ranks
    torch.distributed.all_gather_object(every, requested)
    idle = ~np.isin(owned, sorted(set().union(*every)))
    wrong = [f"changed {name}" for name in ("item", "item.sum") if (began[name] != ended[name])[idle].any()]
    copies = {name: values.clone() for name, values in tables.replicated._state.items()}
    tables.replicated.gather()
    wrong += [name for name, values in tables.replicated._state.items() if not torch.equal(values, copies[name])]
    trainer.close()
    return sorted(looked_up), sorted(requested), wrong


def test_replicated_rows_are_not_exchanged_and_rows_without_a_request_do_not_change(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    data = {"global_batch": 4, "split": "none"}  # evaluation would read all rows
    config = small(log, train={"max_steps": 2}, task={"negatives": 1}, data=data)
    for looked_up, requested, wrong in groups[2].run(observed, replicating(config), str(tmp_path)):
        assert not wrong
        assert min(looked_up) >= ROWS > min(requested)
        assert len(set(range(ROWS)) - set(requested)) > 0, "some replicated rows are not requested"


@pytest.mark.parametrize("count", [pytest.param(1, marks=_WHOLE), 2])
def test_rollback_gives_the_result_of_training_without_the_sample(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, count: int
) -> None:
    for where in ("rows",) if count == 2 else ("loss", "gradient", "rows"):
        config = replicating(nonfinite.one_epoch(log, on_fault="rollback"))
        clean = str(tmp_path / f"without {where}"), "nowhere", (nonfinite.BAD,)
        without = groups[count].run(nonfinite.trained, config, *clean)
        rolled_back = groups[count].run(nonfinite.trained, config, str(tmp_path / where), where)
        assert same(whole(without), whole(rolled_back))
        assert f'"samples": [{nonfinite.BAD}]' in (tmp_path / where / "metrics.jsonl").read_text()


@pytest.mark.whole
def test_a_skipped_step_changes_nothing(groups: dict[int, Ranks], log: Path, tmp_path: Path) -> None:
    skipping = replicating(nonfinite.one_epoch(log, on_fault="skip"))
    batches = nonfinite.Loader(skipping.data, seed=skipping.seed)
    bad = 1 + next(i for i, batch in enumerate(batches) if nonfinite.BAD in batch.sample_id)
    found = []
    for steps in (bad - 1, bad):
        config = replace(skipping, train=replace(skipping.train, max_steps=steps))
        found.append(whole(groups[2].run(nonfinite.trained, config, str(tmp_path / str(steps)), "loss")))
    assert same(*found)


def test_a_run_resumes_bitwise_and_with_other_numbers_of_rows_and_ranks_to_rounding(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    config = small(log, train={"max_steps": 9, "epochs": 10, "warmup_steps": 3, "decay": "cosine"})
    without = whole(groups[2].run(train, config, str(tmp_path / "without"), False, 0))
    once = whole(groups[2].run(train, replicating(config), str(tmp_path / "once"), False, 0))
    assert apart(without, once) < 1e-9
    for stop, ranks, rows, resume in ((3, 2, ROWS, False), (0, 2, ROWS, True)):
        found = groups[ranks].run(train, replicating(config, rows), str(tmp_path / "same"), resume, stop)
    assert same(once, whole(found))
    for stop, ranks, rows, resume in ((3, 2, ROWS, False), (6, 4, 0, True), (0, 2, 56, True)):
        found = groups[ranks].run(train, replicating(config, rows), str(tmp_path / "other"), resume, stop)
    assert apart(without, whole(found)) < 1e-9


def replicated_on_hosts(world: World, config: RunConfig, folder: str, hosts: list[int]) -> tuple[dict[str, int], str]:
    """How many rows `auto` replicates, and what the run says about it."""
    said: list[str] = []
    with (
        patch.dict("os.environ", FREESCALE_HOST=str(hosts[world.rank])),
        patch.object(MetricsLogger, "print_line", lambda _, text: said.append(text)),
    ):
        trainer = build(config, joined(world), Path(folder))
        trainer.close()
    replicated = require(trainer.components.tables).replicated
    return ({} if replicated is None else replicated.counts), " ".join(line for line in said if "auto" in line)


def with_counts(folder: Path) -> Path:
    """A data set whose items are numbered by popularity, with their counts."""
    lengths = np.random.default_rng(0).choice([8, 20, 60], 64).tolist()
    write_dataset(folder, histories(lengths, items=40), rows_per_group=4, items=40)
    counts = np.sort(np.random.default_rng(0).zipf(1.2, 40).clip(max=500))[::-1]
    pq.write_table(pa.table({"key": np.arange(40), "count": counts}), folder / "vocabulary.parquet")
    return folder


def test_auto_follows_the_counts_of_the_vocabulary_and_says_why(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    counted = small(with_counts(tmp_path / "data"), task={"negatives": 1}, data={"max_history": 8})
    hosts = [0, 0, 1, 1]

    def auto(config: RunConfig, hosts: list[int]) -> tuple[dict[str, int], str]:
        found, *others = groups[4].run(replicated_on_hosts, replicating(config, "auto"), str(tmp_path / "run"), hosts)
        assert all(rows == found[0] for rows, _ in others)
        return found

    rows, said = auto(counted, hosts)
    assert 0 < rows["item"] < 40
    assert f"{rows['item']} rows of table item" in said
    assert auto(small(log), hosts) == (
        {},
        f"{_AUTO}: no rows are replicated, since the data has no vocabulary with counts",
    )
    assert auto(counted, [0, 0, 0, 0]) == ({}, f"{_AUTO}: no rows are replicated, since all ranks are on one host")
    rows, said = auto(small(tmp_path / "data", tables={"exchange": "two_level"}), hosts)
    assert not rows
    assert "a host may request each row once" in said
