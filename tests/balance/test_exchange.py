"""Balanced batches hold the same samples, each with all of its features, on exactly one rank."""

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freescale.balance.cost import Cost
from freescale.balance.placement import Ints, Placement
from freescale.balance.planner import Planner
from freescale.balance.sample_exchange import BalancedBatches, SampleExchange
from freescale.config import BalanceConfig, DataConfig
from freescale.data.batch import Batch, Events
from freescale.data.loader import Loader
from tests.support.ranks import RankError, Ranks, World
from tests.support.training import joined

COST = Cost.hstu(dim=64)


def made_up(rank: int, samples: int, longest: int, seed: int) -> Batch:
    """Samples with features of several types and widths; what each holds follows from its number alone."""
    number = torch.arange(samples) + 1000 * rank

    def events(kind: int, most: int) -> Events:
        lengths = torch.tensor([(int(n) * 7919 + kind * seed) % (most + 1) for n in number], dtype=torch.int64)
        each = number.repeat_interleave(lengths)
        place = torch.cat([torch.arange(int(n)) for n in lengths] or [torch.empty(0, dtype=torch.int64)])
        features = {
            "whole": each * 100 + place,
            "small": (each % 7).to(torch.int8),
            "real": (each + place).float() / 3,
            "wide": torch.stack([each, place], dim=1).double(),
        }
        return Events(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), features)

    scalars = {"user_id": number * 3, "weight": number.half() / 2}
    return Batch(0, 0, number, scalars, events(1, longest), events(2, 3), None)


def contents(batch: Batch) -> dict[int, Any]:
    """Everything of each sample, by its number."""
    found = {}
    for place, number in enumerate(batch.sample_id.tolist()):
        parts: dict[str, Any] = {name: values[place].tolist() for name, values in batch.scalars.items()}
        for group, events in (("history", batch.history), ("candidates", batch.candidates)):
            assert events is not None
            begin, end = int(events.offsets[place]), int(events.offsets[place + 1])
            parts |= {f"{group}.{name}": values[begin:end].tolist() for name, values in events.features.items()}
        found[number] = parts
    return found


def moved(world: World, samples: list[int], longest: int, counts: str, seed: int) -> tuple[Any, ...]:
    planner = Planner(COST, BalanceConfig(counts=counts), world_size=world.ranks)  # type: ignore[arg-type]
    before = made_up(world.rank, samples[world.rank], longest, seed)
    groups, placement = SampleExchange(joined(world).transport, planner).exchange(before.groups())
    after = before.with_groups(groups)
    work = float(COST.of(after.history.lengths.numpy(), after.candidates.lengths.numpy()).sum())  # type: ignore
    return contents(before), contents(after), work, placement.max_over_mean, placement.moved_tokens


@pytest.mark.parametrize("counts", ["free", "equal"])
@pytest.mark.parametrize(
    ("ranks", "samples"), [(2, [16, 16]), (2, [0, 9]), (4, [16, 16, 16, 16]), (4, [30, 0, 1, 5]), (4, [0, 0, 0, 0])]
)
def test_every_sample_arrives_whole_and_once(
    groups: dict[int, Ranks], ranks: int, samples: list[int], counts: str
) -> None:
    results = groups[ranks].run(moved, samples, 40, counts, 5)
    before, after = ({k: v for rank in results for k, v in rank[i].items()} for i in (0, 1))
    assert sum(len(rank[1]) for rank in results) == sum(samples)
    assert before == after
    loads = [rank[2] for rank in results]
    assert (results[0][4] > 0) == (sum(samples) > 0)
    if sum(samples) and counts == "free":
        assert max(loads) / (sum(loads) / ranks) == pytest.approx(results[0][3], rel=1e-6)
    if counts == "equal":
        assert max(len(rank[1]) for rank in results) - min(len(rank[1]) for rank in results) <= 1


class DeviatingPlanner(Planner):
    """Places one sample of ranks 0 and 1 on the other of the two."""

    def __call__(self, lengths: Mapping[str, Ints], source_rank: Ints) -> Placement:
        placement = super().__call__(lengths, source_rank)
        rank = placement.rank.copy()
        sample = np.flatnonzero((source_rank < 2) & (rank < 2))[0]
        rank[sample] = 1 - rank[sample]
        return placement._replace(rank=rank)


def planned_differently(world: World) -> None:
    """Two steps. Rank 3 deviates from the others in a sample that it neither sends nor receives."""
    kind = DeviatingPlanner if world.rank == 3 else Planner
    exchange = SampleExchange(joined(world).transport, kind(COST, BalanceConfig(), world_size=world.ranks))
    for seed in (5, 6):
        exchange.exchange(made_up(world.rank, 8, 40, seed).groups())


def test_ranks_that_plan_a_step_differently_all_raise(groups: dict[int, Ranks]) -> None:
    with pytest.raises(RankError) as raised:
        groups[4].run(planned_differently)
    assert str(raised.value).count("TransportError: ranks planned a step differently") == 4


def batches(world: World, path: str, mode: str, steps: int) -> list[list[int]]:
    """Samples of each step on this rank."""
    config = DataConfig(path=path, global_batch=12, shards=8, max_history=30, workers=0)
    loader: Any = Loader(config, seed=1, rank=world.rank, world_size=world.ranks)
    if mode == "on":
        loader = BalancedBatches(
            loader, SampleExchange(joined(world).transport, Planner(COST, BalanceConfig(), world_size=world.ranks))
        )
    found, states = [], []
    for batch in loader:
        found.append(batch.sample_id.tolist())
        states.append(loader.state_dict())
        if len(found) == steps:
            break
    assert [state["step"] for state in states] == [(i + 1) % len(loader) for i in range(len(states))]
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_holds_the_samples_that_it_would_hold_anyway(groups: dict[int, Ranks], log: Path, ranks: int) -> None:
    plain, dealt = (groups[ranks].run(batches, str(log), mode, 100) for mode in ("off", "on"))
    assert len(plain[0]) == 12
    for of_step in zip(*plain, *dealt, strict=True):
        assert sorted(np.concatenate(of_step[:ranks])) == sorted(np.concatenate(of_step[ranks:]))


def test_ranks_that_stop_early_leave_nobody_waiting(groups: dict[int, Ranks], log: Path) -> None:
    began = time.monotonic()
    for steps in (1, 3, 5):
        assert len(groups[4].run(batches, str(log), "on", steps)[0]) == steps
    assert time.monotonic() - began < 30  # a rank that waits in vain does so for 60 seconds


def ended_early(world: World, path: str) -> list[int]:
    """Steps that are given when iteration goes on after it was broken off, and after a jump."""
    config = DataConfig(path=path, global_batch=12, shards=8, max_history=30, workers=0)
    loader = Loader(config, seed=1, rank=world.rank, world_size=world.ranks)
    balanced = BalancedBatches(
        loader, SampleExchange(joined(world).transport, Planner(COST, BalanceConfig(), world_size=world.ranks))
    )
    found = [batch.step for batch in itertools.islice(balanced, 3)]
    found.append(next(iter(balanced)).step)
    balanced.load_state_dict(balanced.state_dict() | {"step": 7})
    return [*found, next(iter(balanced)).step]


def test_batches_that_were_balanced_and_not_used_come_again(groups: dict[int, Ranks], log: Path) -> None:
    assert groups[2].run(ended_early, str(log)) == [[0, 1, 2, 3, 7]] * 2
