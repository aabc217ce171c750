"""The two-level exchange trains bitwise as the flat one does, and the serial step as the overlapped one."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.checkpoint import checkpoints
from freescale.checkpoint.run_folder import complete_checkpoints
from freescale.config import RunConfig
from tests.exact.test_dynamic_ids import dynamic, write_drifting
from tests.exact.test_dynamic_items import dynamic_items, write_catalogue
from tests.exact.test_overlap import autotuned, trained
from tests.exact.test_resume import train
from tests.support.feature_log import with_features, write_feature_log
from tests.support.in_process import ListHandler
from tests.support.lab import lab
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, apart, same, small, whole

STEPS = 4


def trained_on_hosts(world: World, config: RunConfig, folder: str, hosts: list[int]) -> tuple[list[float], Arrays]:
    """This rank's losses and what it holds in the end. `hosts`: of each rank, by name."""
    os.environ["FREESCALE_HOST"] = str(hosts[world.rank])
    try:
        return trained(world, config, folder, False)
    finally:
        del os.environ["FREESCALE_HOST"]


def outcome(ranks: Ranks, config: RunConfig, folder: Path, hosts: list[int]) -> tuple[list[list[float]], Arrays]:
    parts = ranks.run(trained_on_hosts, config, str(folder), hosts)
    return [losses for losses, _ in parts], whole([arrays for _, arrays in parts])


def variants(log: Path, **train: Any) -> dict[str, RunConfig]:
    return {
        f"{exchange}, overlap {overlap}": small(
            log,
            tables={"exchange": exchange, "overlap": overlap},
            train={"max_steps": STEPS, "epochs": 10, **train},
        )
        for exchange in ("flat", "two_level")
        for overlap in ("off", "on")
    }


_WHOLE = pytest.mark.whole


@pytest.mark.parametrize(
    ("hosts", "precision"),
    [
        ([0, 0, 1, 1], "fp32"),
        pytest.param([0, 0, 1, 1], "fp64", marks=_WHOLE),
        pytest.param([0, 1, 1, 1], "fp32", marks=_WHOLE),
        ([0, 1, 1, 1], "fp64"),
    ],
    ids=str,
)
def test_flat_two_level_and_serial_agree_bitwise(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, hosts: list[int], precision: str
) -> None:
    found = {
        name: outcome(groups[4], config, tmp_path / name, hosts)
        for name, config in variants(log, precision=precision).items()
    }
    (losses, arrays), *others = found.values()
    for name, (other_losses, other) in zip(list(found)[1:], others, strict=True):
        assert other_losses == losses, name
        assert same(other, arrays), name
    if precision == "fp64":
        config = small(log, train={"max_steps": STEPS, "epochs": 10})
        _, alone = outcome(groups[1], config, tmp_path / "alone", [0])
        assert apart(alone, arrays) < 1e-9


def autotuned_on_hosts(world: World, config: RunConfig, folder: str, hosts: list[int]) -> tuple[list[str], Arrays]:
    """The settings of the steps of a run, and what it holds."""
    os.environ["FREESCALE_HOST"] = str(hosts[world.rank])
    try:
        return autotuned(world, config, folder, 0)
    finally:
        del os.environ["FREESCALE_HOST"]


def test_a_run_that_tries_both_exchanges_is_bitwise_the_flat_one(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    found = []
    for exchange in ("auto", "flat"):
        config = small(log, tables={"exchange": exchange}, train={"max_steps": 36, "epochs": 10, "precision": "fp32"})
        used, arrays = zip(
            *groups[4].run(autotuned_on_hosts, config, str(tmp_path / exchange), [0, 0, 1, 1]), strict=True
        )
        assert set(map(tuple, used)) == {tuple(used[0])}, "all ranks use the same setting in every step"
        found.append((set(used[0][:30]), whole([*arrays])))
    assert found[0][0] == {"overlap on over c10d", "overlap on in two levels"}
    assert same(found[0][1], found[1][1])


def resumed_on_hosts(
    world: World, config: RunConfig, folder: str, resume: bool, stop_at: int, hosts: list[int]
) -> tuple[Arrays, list[str]]:
    """What a run holds that is stopped and resumed, and its warnings."""
    os.environ["FREESCALE_HOST"] = str(hosts[world.rank])
    handler = ListHandler()
    logging.getLogger("freescale").addHandler(handler)
    try:
        return train(world, config, folder, resume, stop_at), handler.messages
    finally:
        logging.getLogger("freescale").removeHandler(handler)
        del os.environ["FREESCALE_HOST"]


def test_a_checkpoint_knows_the_hosts_and_other_hosts_change_rounding_only(
    groups: dict[int, Ranks], log: Path, tmp_path: Path
) -> None:
    config, found = small(log, tables={"exchange": "two_level"}, train={"max_steps": 8, "epochs": 10}), {}
    for name, later in {"same": [0, 0, 1, 1], "other": [0, 0, 0, 1]}.items():
        groups[4].run(resumed_on_hosts, config, str(tmp_path / name), False, 4, [0, 0, 1, 1])
        (saved,) = complete_checkpoints(tmp_path / name / "checkpoints")
        assert checkpoints.read_facts(saved)["hosts"] == [0, 0, 1, 1]
        results = groups[4].run(resumed_on_hosts, config, str(tmp_path / name), True, 0, later)
        found[name] = whole([arrays for arrays, _ in results])
        assert any("resumed on other hosts" in text for text in results[0][1]) == (name == "other")
    _, once = outcome(groups[4], config, tmp_path / "once", [0, 0, 1, 1])
    assert same(once, found["same"])
    assert not same(once, found["other"])
    assert apart(once, found["other"]) < 1e-9


def every_kind(log: Path, folder: Path) -> dict[str, RunConfig]:
    """Runs with tables of several widths, with dynamic ids, and with dynamic items as negatives."""
    lengths = np.random.default_rng(0).choice([1, 2, 3, 5, 8, 20, 60], 96).tolist()
    write_feature_log(folder / "features", lengths, candidates=False)
    changes: dict[str, Any] = {"train": {"max_steps": STEPS, "epochs": 10, "precision": "fp32"}}
    return {
        "features": with_features(folder / "features", anchors="labeled", **changes),
        "dynamic ids": dynamic(write_drifting(folder / "drifting"), **changes),
        "dynamic items": dynamic_items(write_catalogue(folder / "catalogue"), **changes),
        "micro-batches": small(log, train={**changes["train"], "micro_batches": 3}),
    }


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["features", "dynamic ids", "dynamic items", "micro-batches"])
def test_every_kind_of_table_trains_bitwise_as_with_the_flat_exchange(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, kind: str
) -> None:
    config, found = every_kind(log, tmp_path)[kind], []
    for exchange, overlap in (("flat", "off"), ("two_level", "off"), ("two_level", "on")):
        changed = replace(config, tables=replace(config.tables, exchange=exchange, overlap=overlap))  # type: ignore[arg-type]
        found.append(outcome(groups[4], changed, tmp_path / f"{exchange} {overlap}", [0, 1, 1, 1]))
    for losses, arrays in found[1:]:
        assert losses == found[0][0]
        assert same(arrays, found[0][1])


@pytest.mark.whole
@pytest.mark.parametrize(("ranks", "hosts"), [(4, 2), (6, 3)])
def test_ranks_on_hosts_with_shaped_links_train_bitwise_alike(
    groups: dict[int, Ranks], log: Path, tmp_path: Path, ranks: int, hosts: int
) -> None:
    with lab(hosts) as place:
        place.shape(200)
        started = Ranks(ranks, place)
        try:
            for precision in ("fp32", "fp64"):
                found = {}
                for name, config in variants(log, precision=precision).items():
                    parts = started.run(trained, config, str(tmp_path / precision / name), False)
                    found[name] = [losses for losses, _ in parts], whole([arrays for _, arrays in parts])
                (losses, arrays), *others = found.values()
                for other_losses, other in others:
                    assert other_losses == losses
                    assert same(other, arrays)
        finally:
            started.close()
    _, alone = outcome(groups[1], small(log, train={"max_steps": STEPS, "epochs": 10}), tmp_path / "alone", [0])
    assert apart(alone, arrays) < 1e-9
