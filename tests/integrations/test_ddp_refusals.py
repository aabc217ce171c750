"""BalancedLoader refuses what it cannot balance, and says why."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import freescale as fs
from freescale.errors import DataError, UsageError
from tests.support.ddp_training import BATCH, COST, LENGTHS, Histories, balanced, padded
from tests.support.ranks import Ranks, World


def of_another_rank(world: World) -> str:
    sampler = DistributedSampler(Histories(), 3, 0)
    with pytest.raises(UsageError, match="rank 0 of 3, but this is rank") as caught:
        balanced(DataLoader(Histories(), BATCH, sampler=sampler, collate_fn=padded), "placed", False)
    return str(caught.value)


def test_a_sampler_of_other_ranks_is_refused(groups: dict[int, Ranks]) -> None:
    assert all("remedy" in said for said in groups[2].run(of_another_rank))


def test_a_loader_made_before_the_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group"):
        fs.BalancedLoader([], lengths=lambda b: b["length"], cost=COST)


def refused(world: World, kind: str) -> str:
    data = Histories()
    batch: Any = padded([data[number] for number in (world.rank, world.rank + 2)])
    given: dict[str, Any] = {"lengths": lambda b: b["length"], "pad_values": {"item": 0}}
    if kind == "not named as padded":
        given["pad_values"] = {}
    if kind == "a tuple":
        batch = tuple(batch.values())
        given |= {"lengths": lambda b: b[2], "pad_values": {"1": 0}}
    if kind == "a tuple of padded tensors":
        batch = tuple(batch.values())
        given |= {"lengths": lambda b: b[2], "pad_values": {}}
    if kind == "nested":
        item = torch.nested.nested_tensor([data[n]["item"] for n in (world.rank, world.rank + 2)], layout=torch.jagged)
        batch["features"] = {"item": item}
    if kind == "two lengths per sample":
        given["lengths"] = lambda b: b["length"][:, None]
    if kind == "shorter than its length":
        given["lengths"] = lambda b: b["length"] + 100
    if kind == "no row per sample":
        batch["temperature"] = torch.tensor([1.0, 2.0, 3.0])
    if kind == "padded on the left":
        batch["item"] = batch["item"].flip(1)
    if kind == "words of each sample":
        batch["user"] = ["anna", "bert"]
    if kind == "an array":
        batch["user"] = np.arange(2)
    if kind == "no such tensor":
        given["pad_values"] = {"itme": 0}
    if kind == "a weight of its own":
        batch["loss_weight"] = torch.ones(2)
    if kind == "no order":
        given["lengths"] = LENGTHS
    try:
        list(fs.BalancedLoader([batch], cost=COST, **given))
    except (DataError, UsageError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("not named as padded", "/sample.item: int64["),
        ("a tuple", "a dict, or a dataclass"),
        ("a tuple of padded tensors", "a batch of type tuple has no place for its loss weight"),
        ("nested", "events_from_nested({'item': tensor})"),
        ("two lengths per sample", "one integer per sample"),
        ("shorter than its length", "leave it out of pad_values"),
        ("no row per sample", "'temperature' of a batch of 2 samples has the shape [3]"),
        ("padded on the left", "leave it out of pad_values: whole rows move then"),
        ("words of each sample", "'user' of a batch is of type list, which cannot move"),
        ("an array", "'user' of a batch is of type ndarray"),
        ("no such tensor", "itme"),
        ("a weight of its own", "has a 'loss_weight' already"),
        ("no order", "DistributedSampler"),
    ],
)
def test_what_cannot_be_balanced_is_refused_with_the_reason(groups: dict[int, Ranks], kind: str, said: str) -> None:
    for message in groups[2].run(refused, kind):
        assert said in message
        assert "remedy" in message


@pytest.mark.parametrize("cost", [fs.Cost(), fs.Cost(sample=-1.0, token=1.0)])
def test_a_cost_that_balances_nothing_is_refused(cost: fs.Cost) -> None:
    with pytest.raises(UsageError, match="not all are 0") as caught:
        fs.BalancedLoader([], lengths=lambda b: b["length"], cost=cost)
    assert "fs.Cost(token=1.0)" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"compute": "padded", "equal_counts": True}, "leave out equal_counts"),
        ({"compute": "dense"}, "use 'padded' for a model that pads"),
    ],
)
def test_a_compute_model_that_does_not_fit_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        fs.BalancedLoader([], lengths=lambda b: b["length"], cost=COST, **wrong)
    assert said in str(caught.value)
