"""The simulator knows the two-level exchange, groups of ranks, busy owners, replicated rows, and what candidates and
features cost.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from freescale.balance.cost import Cost
from freescale.config import BalanceConfig
from freescale.data.dataset import Dataset, ValueCounts, compute_stats
from freescale.embedding.row_order import RowOrder, bit_reversal
from freescale.overlap.schedule import overlapped
from freescale.simulate.lookups import Popularity, RowOwners, sample_data
from freescale.simulate.network import Topology
from freescale.simulate.operations import BALANCE, OperationCosts
from freescale.simulate.whatif import Scenario, Techniques, simulate
from freescale.simulate.workload import ModelCost, SampledStep, StepLoad, TableCost, plan_step
from tests.simulate.test_engine import DEVICE, MODEL, hosts
from tests.support.feature_log import with_features, write_feature_log

RANKS, LOCAL, EVENTS = 16, 4, 500
HOSTS = np.arange(RANKS) // LOCAL
COUNTS = np.sort(np.random.default_rng(0).zipf(1.3, 20_000).clip(max=5000))[::-1].astype(np.int64)


def drawn_rows(seed: int) -> list[NDArray[np.int64]]:
    """The distinct items of each rank in a step."""
    share, rng = np.cumsum(COUNTS) / COUNTS.sum(), np.random.default_rng(seed)
    return [np.unique(np.searchsorted(share, rng.random(EVENTS))) for _ in range(RANKS)]


def popular(**changes: Any) -> ModelCost:
    ids = ValueCounts(np.arange(len(COUNTS)), COUNTS)
    table = TableCost(
        dim=8, popularity=Popularity.from_counts(COUNTS), looked_up=1, owners=RowOwners.from_counts(ids, "zigzag")
    )
    return replace(MODEL, tables=(replace(table, **changes),))


def planned(model: ModelCost | None = None, *, two_level: bool) -> StepLoad:
    step = SampledStep(np.full(RANKS, EVENTS), np.arange(RANKS))
    return plan_step(step, model or popular(), world_size=RANKS, rules=None, hosts=HOSTS, two_level=two_level)


def test_a_host_requests_each_row_once() -> None:
    steps = [drawn_rows(seed) for seed in range(4)]
    of_hosts = [np.unique(np.concatenate(rows[first : first + LOCAL])) for rows in steps for first in (0, 4, 8, 12)]
    load = planned(two_level=True)
    assert load.merged is not None
    assert load.merged.rows.sum() / 4 == pytest.approx(np.mean([len(one) for one in of_hosts]), rel=0.02)
    assert load.merged.rows.sum() < 0.8 * load.requests.rows.sum()
    before = [np.unique(np.concatenate(drawn_rows(seed + 10))) for seed in range(4)]
    shared = [np.isin(one, before[n // 4]).sum() for n, one in enumerate(of_hosts)]
    assert load.merged.shared.sum() / 4 == pytest.approx(np.mean(shared), rel=0.03)
    assert planned(two_level=False).merged is None


@pytest.mark.parametrize("kind", ["zigzag", "block"])
@pytest.mark.parametrize("two_level", [False, True])
def test_owners_are_as_busy_as_drawn_requests_make_them(kind: str, two_level: bool) -> None:
    owners = RowOwners.from_counts(ValueCounts(np.arange(len(COUNTS)), COUNTS), kind)  # type: ignore[arg-type]
    order, busiest = RowOrder.of(len(COUNTS), kind), []  # type: ignore[arg-type]
    for seed in range(6):
        rows = drawn_rows(seed)
        asked = [np.unique(np.concatenate(rows[n : n + LOCAL])) for n in range(0, RANKS, LOCAL)] if two_level else rows
        at = order.position(np.concatenate(asked), bit_reversal(order.shards)) / order.positions
        busiest.append(np.sort(np.bincount((at * RANKS).astype(int), minlength=RANKS) / (len(at) / RANKS)))
    found = planned(popular(owners=owners), two_level=two_level)
    served = (found.merged or found.requests).served
    assert np.sort(served) == pytest.approx(np.mean(busiest, axis=0), abs=0.06)
    assert (served.max() > 2.0) == (kind == "block")


def test_hosts_exchange_one_message_each_sent_by_leaders_that_take_turns() -> None:
    where = hosts(ranks_per_host=8, message=1e-6, latency=1e-5)
    rows = np.full(1024, 1e6)
    flat = Topology(where, 1024, np.random.default_rng(0)).all_to_all(rows)
    level = Topology(where, 1024, np.random.default_rng(0)).two_level(rows / 4, passed=rows, rounds=1)
    assert flat.latency == pytest.approx(1e-5 + 1023e-6)
    inside = 4 * (1e-5 + 7e-6) + (1e6 + 2 * 2.5e5) * 7 / 8 / where.near
    assert level.latency == pytest.approx(1e-5 + 16e-6 + inside), "127 other hosts, led by eight ranks"
    assert level.levels[1] == pytest.approx(flat.levels[1] / 4)
    widths = Topology(where, 1024, np.random.default_rng(0)).two_level(0 * rows, passed=0 * rows, rounds=3)
    assert widths.latency == pytest.approx(3 * (1e-5 + 16e-6 + 4 * (1e-5 + 7e-6)))


def test_one_host_exchanges_nothing_with_others_and_a_rank_per_host_passes_nothing_on() -> None:
    rows = np.full(8, 1e6)
    one = Topology(hosts(ranks_per_host=8), 8, np.random.default_rng(0)).two_level(rows, passed=rows, rounds=1)
    assert one.levels[1] == 0.0
    apart = Topology(hosts(latency=1e-5), 8, np.random.default_rng(0))
    level, flat = apart.two_level(rows, passed=rows, rounds=1), apart.all_to_all(rows)
    assert (level.latency, level.levels) == (flat.latency, flat.levels)


def test_a_two_level_exchange_exposes_less_row_traffic_where_hosts_share_rows() -> None:
    where, lengths = hosts(ranks_per_host=LOCAL, near=1e12), np.array([EVENTS])
    model = popular(dim=256, popularity=Popularity.from_counts(np.ones(600, dtype=np.int64)), owners=None)
    flat = Scenario(model, lengths, np.array([1]), 1, where, lambda _: replace(DEVICE, work=1e-3), steps=6)
    bubbles = []
    for scenario in (flat, replace(flat, two_level=True)):
        (result,) = simulate(scenario, RANKS, [Techniques(balance=False)])
        bubbles.append(sum(line.ms for line in result.summary.lines if line.cause in ("urgent rows", "row gradients")))
    each, together = (1 - np.exp(-n * EVENTS / 600) for n in (1, LOCAL))
    assert bubbles[1] / bubbles[0] == pytest.approx(together / each / LOCAL, rel=0.05)


def test_planning_in_groups_takes_a_part_of_the_time_and_balances_as_well() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 64 * 64)
    step, at = SampledStep(lengths, np.repeat(np.arange(64), 64)), np.arange(64) // 4
    rules = BalanceConfig(group_ranks=8)
    flat, grouped = (plan_step(step, MODEL, world_size=64, rules=used, hosts=at) for used in (BalanceConfig(), rules))
    assert (flat.groups, grouped.groups) == (1, 8)
    assert grouped.work.sum() == flat.work.sum()
    assert grouped.work.max() < 1.006 * grouped.work.mean()
    assert 0 < grouped.moved.sum() < 1.6 * flat.moved.sum()
    assert grouped.planning < flat.planning
    where = hosts(message=1e-6, latency=1e-5)
    costs = OperationCosts(where, DEVICE, MODEL, world_size=64, sm_free=False, rng=np.random.default_rng(0))
    gather = next(operation for operation in BALANCE if operation.name == "gather_lengths")
    waits = [costs.cost(gather, load).transfer for load in (flat, grouped)]
    assert [wait.latency for wait in waits if wait] == pytest.approx([2 * (1e-5 + 63e-6), 4e-5 + (3 * 7 + 7) * 1e-6])


def test_replicated_rows_are_not_requested_and_their_gradients_are_all_reduced() -> None:
    model = popular().replicate(1_000)
    every, rare = (planned(of, two_level=False) for of in (popular(), model))
    drawn = [(rows >= 1_000).sum() for seed in range(4) for rows in drawn_rows(seed)]
    assert rare.requests.rows.mean() == pytest.approx(np.mean(drawn), rel=0.03)
    assert rare.requests.rows.mean() < 0.9 * every.requests.rows.mean()
    assert rare.requests.collisions < every.requests.collisions
    where = hosts(ranks_per_host=LOCAL, near=1e12)
    costs = OperationCosts(where, DEVICE, model, world_size=RANKS, sm_free=False, rng=np.random.default_rng(0))
    operations = {operation.name: operation for operation in overlapped(replicates=True).operations}
    ring = Topology(where, RANKS, np.random.default_rng(0)).all_reduce(4.0 * 1_000 * 8)
    assert costs.cost(operations["reduce_replicated"], rare).transfer == ring
    assert costs.cost(operations["update_replicated"], rare).seconds == pytest.approx(1_000 * DEVICE.update)


def test_rows_that_all_ranks_request_expose_less_traffic_if_they_are_replicated() -> None:
    where, lengths = hosts(ranks_per_host=LOCAL, near=1e12), np.array([EVENTS])
    few = Popularity.from_counts(np.ones(50, dtype=np.int64))
    model = popular(dim=256, popularity=few, owners=None)
    exposed = []
    for of in (model, model.replicate(50)):
        device = replace(DEVICE, work=1e-3)
        scenario = Scenario(of, lengths, np.array([1]), 1, where, lambda _, device=device: device, steps=6)
        (result,) = simulate(scenario, RANKS, [Techniques(balance=False)])
        exposed.append(sum(one.ms for one in result.summary.lines if one.cause in ("urgent rows", "row gradients")))
    out_of_host = 2 * LOCAL * (1 - LOCAL / RANKS), 2 * (RANKS - 1) / RANKS
    assert exposed[1] / exposed[0] == pytest.approx(out_of_host[1] / out_of_host[0], rel=0.1)


@pytest.fixture(scope="module", params=["candidates", "anchors"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("log") / request.param
    write_feature_log(path, [1, 2, 3, 5, 8, 20, 60] * 12, candidates=request.param == "candidates")
    return request.param, path


def test_candidates_and_the_tables_of_features_are_counted_in_the_data(run: tuple[str, Path]) -> None:
    kind, path = run
    config = with_features(path, anchors="every" if kind == "anchors" else "none")
    sample = sample_data(config, Dataset(str(path)))
    events = 12 * (1 + 2 + 3 + 5 + 8 + 20 + 60)
    targets = events if kind == "anchors" else 84 * 2
    assert sample.anchors == (1.0 if kind == "anchors" else 0.0)
    assert sample.candidates.values.tolist() == ([0] if kind == "anchors" else [1, 2, 3])
    tables = {(table.dim, len(table.ids.values)): table.per_token * (events + targets) for table in sample.tables}
    tokens = events if kind == "anchors" else events + targets
    artist, tags, price, region, devices, hour = tables.values()
    assert artist == pytest.approx(0.8 * tokens, rel=0.1), "a fifth is missing"
    assert tags == pytest.approx(1.5 * tokens, rel=0.1)
    assert price == tokens
    assert region == pytest.approx(0.8 * 84, rel=0.2)
    assert devices == pytest.approx(1.5 * 84, rel=0.2)
    assert hour == targets
    assert [dim for dim, _ in tables] == [8, 4, 4, 12, 8, 8]


def test_candidates_and_features_cost_work_rows_and_bytes(run: tuple[str, Path]) -> None:
    kind, path = run
    config = with_features(path, anchors="every" if kind == "anchors" else "none")
    dataset = Dataset(str(path))
    sample, stats = sample_data(config, dataset), compute_stats(dataset)
    model = ModelCost.from_config(config, stats, sample)
    assert model.widths == 3
    assert model.token_bytes > 16 + 8
    step = SampledStep(np.full(4, 20), np.arange(4), np.full(4, 20))
    alone = replace(model, tables=model.tables[:1])
    less, more = (plan_step(one, of, world_size=4, rules=None) for one, of in ((step, alone), (step, model)))
    assert more.requests.rows.sum() > 1.3 * less.requests.rows.sum()
    assert 4 < more.requests.width < 12
    assert less.requests.width == 8
    none = plan_step(step._replace(candidates=None), model, world_size=4, rules=None)
    cost = Cost.of_model(config.model)
    seen = 10 if kind == "anchors" else 20
    assert none.work == pytest.approx(cost.of(np.full(4, 20)))
    assert more.work == pytest.approx(cost.of(np.full(4, 20), np.full(4, 20), np.full(4, 20 * seen)))
    assert more.events.sum() == 2 * none.events.sum()


def test_tables_of_several_widths_are_several_transfers() -> None:
    table = popular().tables[0]
    model = replace(popular(), tables=(table, replace(table, dim=16), replace(table, dim=16)))
    where = hosts(ranks_per_host=LOCAL, message=1e-6, near=1e15)
    schedule = {operation.name: operation for operation in overlapped().operations}
    for two_level in (False, True):
        loads = [planned(of, two_level=two_level) for of in (popular(), model)]
        costs = [
            OperationCosts(where, DEVICE, of, world_size=RANKS, sm_free=False, rng=np.random.default_rng(0))
            for of in (popular(), model)
        ]
        for name, times in (("send_collision_rows", 2), ("send_ids", 1)):
            one, three = (of.cost(schedule[name], load).transfer for of, load in zip(costs, loads, strict=True))
            assert one is not None
            assert three is not None
            assert three.latency == pytest.approx(times * one.latency, rel=1e-3)
            assert three.levels[1] == pytest.approx(
                (5 if name == "send_collision_rows" else 3) * one.levels[1], rel=0.05
            )
