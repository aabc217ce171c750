"""Popular rows on every rank change where bytes travel, not what is trained: to 1e-9 in fp64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.config import RunConfig
from tests.exact.test_overlap import trained
from tests.support.feature_log import with_features, write_feature_log
from tests.support.ranks import Ranks
from tests.support.training import Arrays, apart, small, whole

ROWS = 15
"""Of 40 items, and of all rows of the small tables of features."""
_WHOLE = pytest.mark.whole


def replicating(config: RunConfig, rows: int | str = ROWS, **tables: Any) -> RunConfig:
    return replace(config, tables=replace(config.tables, replicated_rows=rows, **tables))  # type: ignore[arg-type]


def outcome(ranks: Ranks, config: RunConfig, folder: Path) -> Arrays:
    return whole([arrays for _, arrays in ranks.run(trained, config, str(folder), False)])


def kinds(log: Path, folder: Path) -> dict[str, RunConfig]:
    """Runs with negatives, with tables of several widths, in micro-batches, and with the other optimizers."""
    lengths = np.random.default_rng(0).choice([1, 2, 3, 5, 8, 20, 60], 96).tolist()
    write_feature_log(folder / "data", lengths, candidates=True)
    few: dict[str, Any] = {"max_steps": 8, "epochs": 10}
    return {
        "retrieval": small(log, train=few),
        "ranking with features": with_features(folder / "data", train=few),
        "micro-batches": small(log, train={**few, "micro_batches": 3}),
        "without balance": small(log, train=few, balance={"mode": "off"}),
        "adagrad": small(log, train=few, tables={"optimizer": "adagrad"}),
        "sgd": small(log, train=few, tables={"optimizer": "sgd", "lr": 0.01}),
        "owners of blocks": small(log, train=few, tables={"owners": "block"}),
    }


def cases() -> list[Any]:
    short = {("retrieval", 2, "on"), ("retrieval", 4, "off"), ("ranking with features", 4, "on")}
    short |= {("micro-batches", 2, "on")}
    names = ("retrieval", "ranking with features", "micro-batches", "without balance", "adagrad", "sgd")
    every = [(kind, ranks, overlap) for kind in (*names, "owners of blocks") for ranks in (1, 2, 4) for overlap in ("off", "on")]
    return [pytest.param(*case, marks=() if case in short else _WHOLE) for case in every]


@pytest.mark.parametrize(("kind", "count", "overlap"), cases())
def test_a_run_with_replicated_rows_equals_the_run_without(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, kind: str, count: int, overlap: str
) -> None:
    config = kinds(log, tmp_path)[kind]
    without = outcome(groups[count], config, tmp_path / "without")
    found = outcome(groups[count], replicating(config, overlap=overlap), tmp_path / "with")
    assert apart(without, found) < 1e-9
