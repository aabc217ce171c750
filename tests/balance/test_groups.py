"""Placement in groups of ranks: little moves between them, and the training result stays the same."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freescale.balance.assign import assign
from freescale.balance.cost import Cost
from freescale.balance.group_exchange import open_grouped_exchange
from freescale.balance.group_planner import GroupPlanner
from freescale.balance.rank_groups import (
    RankGroups,
    above_level,
    give_between_groups,
    samples_to_give,
    tolerance_between,
    tolerance_inside,
    transfers_between,
)
from freescale.config import BalanceConfig
from freescale.data import synthetic
from tests.balance.test_exchange import contents, made_up
from tests.support.ranks import Ranks, World
from tests.support.training import joined

COST = Cost.hstu(dim=64)
Ints = NDArray[np.int64]


@pytest.mark.parametrize("seed", range(6))
def test_groups_are_whole_hosts_of_about_equal_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hosts = rng.permutation(40)[np.repeat(np.arange(40), rng.integers(1, 9, 40))]
    groups = RankGroups.of_hosts(hosts, 30)
    assert all(len(set(groups.group[hosts == host])) == 1 for host in range(40))
    assert len(groups.sizes) == -(-len(hosts) // 30)
    assert abs(groups.sizes - len(hosts) / len(groups.sizes)).max() <= 8
    assert (np.diff(groups.group) >= 0).all(), "hosts of a group are neighbours"


def test_16_384_ranks_form_64_groups_of_256_and_few_ranks_one() -> None:
    assert (RankGroups.of_hosts(np.arange(16_384) // 8, 256).sizes == 256).all()
    assert RankGroups.of_hosts(np.arange(256) // 8, 256).sizes.tolist() == [256]
    assert RankGroups.of_hosts(np.repeat([0, 1], [3, 12]), 4).sizes.tolist() == [3, 12], "a host is kept whole"


@pytest.mark.parametrize("sizes", [[4, 4, 4], [2, 3, 5], [1, 7], [6]])
def test_the_partners_of_a_rank_are_in_its_column_and_take_their_turns(sizes: list[int]) -> None:
    groups = RankGroups(np.repeat(np.arange(len(sizes)), sizes))
    taken = np.zeros((len(sizes), sum(sizes)), dtype=int)
    for rank, own in enumerate(groups.group.tolist()):
        partners = groups.partners(rank)
        assert groups.group[partners].tolist() == list(range(len(sizes)))
        assert set(partners) <= set(groups.column(rank))
        assert rank in groups.column(int(partners[0]))
        taken[own, partners] += 1
    for own, size in enumerate(sizes):
        for of, other in enumerate(sizes):
            assert taken[own, groups.group == of].max() <= -(-size // min(sizes)) * max(1, -(-min(sizes) // other))


def test_groups_within_the_tolerance_give_nothing() -> None:
    assert not transfers_between(np.array([100.4, 99.6, 100.0]), np.ones(3), 0.005).any()
    assert not transfers_between(np.zeros(3), np.ones(3), 0.005).any()
    assert not transfers_between(np.array([200.0, 100.0]), np.array([2.0, 1.0]), 0.0).any(), "a group of twice the size"


@pytest.mark.parametrize("seed", range(8))
def test_groups_above_the_tolerance_give_their_excess_to_the_least_loaded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = rng.integers(1, 5, 12).astype(float)
    work = rng.gamma(4.0, 1.0, 12) * capacity
    limit = 1.05 * work.sum() / capacity.sum() * capacity
    given = transfers_between(work, capacity, 0.05)
    assert given.sum(axis=1) == pytest.approx(np.maximum(work - limit, 0))
    after = work - given.sum(axis=1) + given.sum(axis=0)
    assert (after <= limit * (1 + 1e-9)).all()
    takes = given.sum(axis=0) > 0
    assert np.ptp((after / capacity)[takes]) < 1e-9, "those that take end alike"
    assert (after / capacity)[takes].max() <= (after / capacity)[~takes].min() + 1e-9, "the others had more anyway"
    assert np.count_nonzero(given) < 2 * len(work)


def test_a_group_with_less_work_may_be_less_even_and_one_with_more_has_most_of_the_tolerance() -> None:
    assert (1 + tolerance_inside(0.01, 100.0, 90.0)) * 90 == pytest.approx(101.0)
    assert tolerance_inside(0.01, 100.0, 100.0) == pytest.approx(0.01)
    assert tolerance_inside(0.01, 100.0, 100.9) == pytest.approx(0.0075)
    assert tolerance_inside(0.01, 0.0, 0.0) == 0.01


def test_what_is_above_a_level_adds_up() -> None:
    above = above_level(np.array([5.0, 3.0, 1.0, 9.0]), np.ones(4), 6.0)
    assert above.tolist() == [1.0, 0.0, 0.0, 5.0]


def test_the_most_loaded_ranks_give_their_largest_samples() -> None:
    costs, work = np.array([10.0, 30.0, 20.0, 1.0]), np.array([61.0, 20.0, 10.0])
    samples, to = samples_to_give(costs, work, place=0, given=np.array([0.0, 30.0, 11.0]))
    assert (samples.tolist(), to.tolist()) == ([1, 0, 3], [1, 2, 2])
    assert not len(samples_to_give(costs, work, place=2, given=np.array([0.0, 30.0, 11.0]))[0])


def kuairand(ranks: int, batch: int, seed: int) -> tuple[Ints, Ints]:
    lengths = synthetic.draw_lengths("kuairand", ranks * batch, np.random.default_rng(seed))
    return lengths, np.repeat(np.arange(ranks), batch)


def placed_in_groups(lengths: Ints, source: Ints, groups: RankGroups) -> tuple[float, float]:
    """Slowest rank over the mean, and the share of tokens that move, each way counted that a sample goes."""
    costs, ranks = Cost.hstu(dim=256).of(lengths), len(groups.group)
    held = give_between_groups(costs, source, groups, tolerance_between(0.005))
    load, moved = np.zeros(ranks), int(lengths[held != source].sum())
    for number in range(len(groups.sizes)):
        members, own = groups.members(number), np.flatnonzero(groups.group[held] == number)
        tolerance = tolerance_inside(0.005, costs.sum() / ranks, costs[own].sum() / len(members))
        options: dict[str, Any] = {"world_size": len(members), "tokens": lengths[own], "tolerance": tolerance}
        rank = members[assign(costs[own], np.searchsorted(members, held[own]), **options).rank]
        load += np.bincount(rank, weights=costs[own], minlength=ranks)
        moved += int(lengths[own][rank != held[own]].sum())
    return float(load.max() / load.mean()), moved / int(lengths.sum())


@pytest.mark.parametrize("batch", [8, 128])
def test_groups_are_balanced_nearly_as_well_as_all_ranks_and_move_little_more(batch: int) -> None:
    lengths, source = kuairand(128, batch, seed=batch)
    slowest, moved = placed_in_groups(lengths, source, RankGroups.of_hosts(np.arange(128) // 8, 32))
    flat = assign(Cost.hstu(dim=256).of(lengths), source, world_size=128, tokens=lengths)
    assert slowest <= 1.012
    assert moved <= 1.3 * flat.moved_tokens
    alone = np.bincount(source // 32, weights=Cost.hstu(dim=256).of(lengths))
    assert batch == 128 or alone.max() / alone.mean() > 1.02, "these need moves between groups"


HOSTS = {"of 2": np.array([0, 0, 1, 1]), "of 1 and 3": np.array([0, 1, 1, 1]), "of 1": np.array([0, 1, 2, 3])}


def exchanged(world: World, hosts: Ints, most: int, samples: list[int], rules: BalanceConfig, memory: bool) -> Any:
    """Three steps of one exchange."""
    groups = RankGroups.of_hosts(hosts, most)
    plan = GroupPlanner(COST, rules, groups=groups, rank=world.rank, hosts=hosts)
    exchange = open_grouped_exchange(joined(world).transport, plan, shared_memory=memory, timeout=60.0)
    steps = []
    for seed in (5, 6, 7):
        before = made_up(world.rank, samples[world.rank], 40, seed)
        after = before.with_groups(exchange.exchange(before.groups())[0])
        histories, candidates = after.history, after.candidates
        assert candidates is not None
        work = float(COST.of(histories.lengths.numpy(), candidates.lengths.numpy()).sum())
        steps.append((contents(before), contents(after), work))
    return steps, plan.sums.tolist()


def numbered(rank: int, samples: int) -> tuple[Ints, NDArray[np.float64]]:
    """The numbers and costs of a rank's samples in the first step."""
    batch = made_up(rank, samples, 40, 5)
    assert batch.candidates is not None
    return batch.sample_id.numpy(), COST.of(batch.history.lengths.numpy(), batch.candidates.lengths.numpy())


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("samples", [[40, 40, 1, 2], [3, 50, 9, 0], [16, 16, 16, 16], [0, 0, 0, 0]])
@pytest.mark.parametrize("counts", ["free", "equal"])
def test_in_groups_every_sample_arrives_whole_and_once(
    groups: dict[int, Ranks], hosts: str, samples: list[int], counts: str
) -> None:
    rules = BalanceConfig(counts=counts)  # type: ignore[arg-type]
    results = groups[4].run(exchanged, HOSTS[hosts], 2, samples, rules, samples[0] == 3)
    for step in range(3):
        before, after = ({k: v for of, _ in results for k, v in of[step][i].items()} for i in (0, 1))
        assert sum(len(of[step][1]) for of, _ in results) == sum(samples)
        assert before == after
    assert len({str(sums) for _, sums in results}) == 1, "every rank reports the same balance of all groups"
    divided, tolerance = RankGroups.of_hosts(HOSTS[hosts], 2), tolerance_between(0.005) if counts == "free" else np.inf
    numbers, costs = map(np.concatenate, zip(*(numbered(*one) for one in enumerate(samples)), strict=True))
    held = give_between_groups(costs, np.repeat(np.arange(4), samples), divided, tolerance)
    for group in range(len(divided.sizes)):
        found = {number for rank in divided.members(group) for number in results[rank][0][0][1]}
        assert found == set(numbers[divided.group[held] == group].tolist()), "the ranks decide what one decides for all"


def test_groups_of_ranks_report_what_they_reached(groups: dict[int, Ranks]) -> None:
    results = groups[4].run(exchanged, HOSTS["of 2"], 2, [60, 60, 20, 20], BalanceConfig(), False)
    work = np.array([[step[2] for step in of] for of, _ in results])
    steps, slowest_before, slowest, moved = results[0][1]
    assert steps == 2, "a step is reported with the next one"
    assert slowest == pytest.approx((work.max(axis=0) / work.mean(axis=0))[:2].sum(), rel=1e-9)
    assert slowest / 2 < 1.03 < 1.3 < slowest_before / 2
    assert 0.2 < moved / 2 < 0.5
