"""Sharded tables give the rows and updates of one whole table."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given
from hypothesis import strategies as st

from freescale import log
from freescale.config import RunConfig, TablesConfig
from freescale.embedding.exchange import AllToAllPlan, EmbeddingExchange
from freescale.embedding.fused import fused_shard, require_exact
from freescale.embedding.ids import UniqueIds, deduplicate, deduplicate_together, split
from freescale.embedding.sharded import Shard, describe_sharded_tables, plain_shard, shard_tables
from freescale.embedding.tables import RowKeys, Table
from freescale.errors import ConfigError
from tests.support.in_process import ListHandler
from tests.support.ranks import Ranks, World
from tests.support.training import joined

TABLES = [Table("item", 103, 8, "zigzag"), Table("user", 57, 4), Table("shop", 5, 8)]


@given(ids=st.lists(st.integers(0, 30), max_size=60), rows=st.sampled_from([31, 10_000]))
def test_each_id_is_once_and_every_place_finds_its_own(ids: list[int], rows: int) -> None:
    asked = torch.tensor(ids, dtype=torch.int64)
    wanted = deduplicate(asked, rows=rows)
    assert wanted.unique.tolist() == sorted(set(ids))
    assert wanted.unique[wanted.inverse].tolist() == ids


@given(ids=st.lists(st.one_of(st.integers(-90, -1), st.integers(0, 30), st.integers(2**61, 2**62)), max_size=60))
def test_slots_among_ids_are_once_too(ids: list[int]) -> None:
    asked = torch.tensor(ids, dtype=torch.int64)
    wanted = deduplicate(asked, rows=None)
    assert wanted.unique.tolist() == sorted(set(ids))
    assert wanted.unique[wanted.inverse].tolist() == ids


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=12), st.sampled_from([31, 40, None])), min_size=1))
def test_tables_together_have_the_unique_ids_of_each(tables: list[tuple[list[int], int | None]]) -> None:
    tables.sort(key=lambda table: table[1] is None)  # as devices get them
    ids = [torch.tensor(of_table, dtype=torch.int64) for of_table, _ in tables]
    ids = [of_table if rows else of_table * (1 << 57) - 3 for of_table, (_, rows) in zip(ids, tables, strict=True)]
    for asked, (unique, inverse) in zip(ids, deduplicate_together(ids, [rows for _, rows in tables]), strict=True):
        assert torch.equal(unique, asked.unique())
        assert torch.equal(unique[inverse], asked)


@given(rows=st.integers(1, 200), ranks=st.integers(1, 9), ids=st.sets(st.integers(0, 199)))
def test_every_row_has_one_owner(rows: int, ranks: int, ids: set[int]) -> None:
    table = Table("item", rows, 4)
    assert [row for rank in range(ranks) for row in table.owned(rank, ranks)] == list(range(rows))
    keys = RowKeys([Table("user", 7, 4), table], ranks)
    unique = torch.tensor(sorted(i for i in ids if i < rows), dtype=torch.int64)
    counts = keys.count(keys.sort([torch.arange(0), unique])[0])[1].tolist()
    for rank, of_rank in enumerate(unique.split(counts)):
        assert all(row in table.owned(rank, ranks) for row in of_rank.tolist())


def test_rows_begin_the_same_whoever_owns_them_and_spread_as_asked() -> None:
    table = Table("item", 50_000, 8)
    whole, piece = torch.empty(50_000, 8, dtype=torch.float64), torch.empty(1000, 8, dtype=torch.float64)
    table.fill(whole, 0, seed=5, deviation=0.02)
    table.fill(piece, 33_000, seed=5, deviation=0.02)
    assert torch.equal(whole[33_000:34_000], piece)
    assert whole.std().item() == pytest.approx(0.02, rel=0.01)
    assert whole.mean().item() == pytest.approx(0.0, abs=1e-4)
    other = torch.empty_like(piece)
    Table("user", 50_000, 8).fill(other, 33_000, seed=5, deviation=0.02)
    assert not torch.equal(other, piece)


def wanted_of(rank: int, seed: int) -> dict[str, UniqueIds]:
    """Some ids of each table; none at all for some ranks and tables."""
    rng = np.random.default_rng([seed, rank])
    found = {}
    for table in TABLES:
        ids = torch.from_numpy(rng.integers(0, table.rows, rng.integers(0, 40) * rng.integers(0, 2)))
        found[table.name] = deduplicate(ids, rows=table.rows)
    return found


def value_of(table: Table, ids: torch.Tensor) -> torch.Tensor:
    """A row that tells its table and its number."""
    return ids[:, None] * 100.0 + torch.arange(table.dim) + table.rows


def served(world: World, plan: AllToAllPlan) -> dict[str, torch.Tensor]:
    """The rows that a rank sends as their owner."""
    rows = {}
    for table in TABLES:
        positions = plan.local_rows[table.name] + table.owned(world.rank, world.ranks).start
        rows[table.name] = value_of(table, torch.from_numpy(table.order.rows_at(positions.numpy())))
    return rows


def divided(world: World, seed: int) -> dict[str, object]:
    """Ask for the rows of two batches part by part; gives what this rank asked for, and which of it is shared."""
    exchange = EmbeddingExchange(TABLES, joined(world).transport)
    wanted = [wanted_of(world.rank, seed), wanted_of(world.rank, seed + 1)]
    this, following = (exchange.send_ids(one) for one in wanted)
    splits = exchange.send_split(this, following, split(this.keys, following.keys))
    for parts, ids in zip(splits, wanted, strict=True):
        for plan in parts:
            rows = served(world, plan)
            got = exchange.send_rows(plan, rows).wait()
            for table in TABLES:
                requested = ids[table.name].unique[plan.index_by_table[table.name]]
                assert torch.equal(got[table.name], value_of(table, requested))
            back = exchange.send_gradients(plan, got).wait()
            assert all(torch.equal(back[name], rows[name]) for name in rows)
    return {
        t.name: [
            (w[t.name].unique.tolist(), *(w[t.name].unique[plan.index_by_table[t.name]].tolist() for plan in parts))
            for w, parts in zip(wanted, splits, strict=True)
        ]
        for t in TABLES
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(0, 20, 2))
def test_rows_travel_part_by_part_and_everyone_knows_which_are_shared(
    groups: dict[int, Ranks], ranks: int, seed: int
) -> None:
    results = groups[ranks].run(divided, seed)
    for table in TABLES:
        this, following = ({one for rank in results for one in rank[table.name][batch][0]} for batch in (0, 1))
        for rank in results:
            for ids, common, exclusive in rank[table.name]:
                assert set(common) == set(ids) & this & following
                assert sorted(common + exclusive) == ids


def fetch(world: World, seed: int) -> bool:
    """Ask for rows of several tables and widths; owners answer with rows that tell who they are."""
    exchange = EmbeddingExchange(TABLES, joined(world).transport)
    wanted = wanted_of(world.rank, seed)
    plan = exchange.send_ids(wanted)
    rows = served(world, plan)
    got = plan.in_order_of_ids(exchange.send_rows(plan, rows).wait())
    back = exchange.send_gradients(plan, plan.by_owner(got)).wait()
    there = all(torch.equal(got[table.name], value_of(table, wanted[table.name].unique)) for table in TABLES)
    return there and all(torch.equal(back[name], rows[name]) for name in rows)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_of_several_tables_and_widths_arrive_in_order_and_their_gradients_go_back(
    groups: dict[int, Ranks], count: int
) -> None:
    for seed in range(10):
        assert all(groups[count].run(fetch, seed))


def compare(world: World, optimizer: str) -> float:
    """Train the same rows in FBGEMM and in plain torch; the largest difference."""
    config = TablesConfig(optimizer=optimizer, lr=0.1)  # type: ignore[arg-type]
    assert dist.group.WORLD is not None
    fused = fused_shard(TABLES, config, dist.group.WORLD, torch.device("cpu"))
    plain = plain_shard(TABLES, config, joined(world), torch.float32)
    for shard in (fused, plain):
        for table in TABLES:
            table.fill(shard.state()[table.name], 0, seed=1, deviation=1.0)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(5):
        owned = {table.name: len(table.owned(world.rank, world.ranks)) for table in TABLES}
        local = {
            n: torch.randint(0, max(rows, 1), (30 if rows else 0,), generator=generator) for n, rows in owned.items()
        }
        gradients = {t.name: torch.randn(len(local[t.name]), t.dim, generator=generator) for t in TABLES}
        for shard in (fused, plain):
            read = shard.look_up(local)
            assert all(torch.equal(read[name], shard.state()[name][rows]) for name, rows in local.items())
            shard.update(local, gradients, lr=dict.fromkeys(local, 0.1 / (step + 1)))
    ours, theirs = plain.state(), fused.state()
    assert ours.keys() == theirs.keys()
    apart = [(theirs[n].view_as(ours[n]) - ours[n]).abs() / (1 + ours[n].abs()) for n in ours if len(ours[n])]
    return max(float(difference.max()) for difference in apart)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
def test_fbgemm_updates_rows_as_plain_torch_does_with_duplicates_and_the_rate_of_their_own_step(
    groups: dict[int, Ranks], optimizer: str
) -> None:
    assert max(groups[2].run(compare, optimizer)) < 1e-5


def in_parts(world: World, optimizer: str, fused: bool) -> bool:
    """Change rows at once and, in a copy, first those that some mask means and then the others."""
    config, group = TablesConfig(optimizer=optimizer, lr=0.1), dist.group.WORLD  # type: ignore[arg-type]
    assert group is not None
    shards: list[Shard] = [
        fused_shard(TABLES, config, group, torch.device("cpu"))
        if fused
        else plain_shard(TABLES, config, joined(world), torch.float64)
        for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(world.rank)
    for shard in shards:
        for table in TABLES:
            table.fill(shard.state()[table.name], 0, seed=1, deviation=1.0)
    for step in range(20):
        owned = {table.name: len(table.owned(world.rank, world.ranks)) for table in TABLES}
        local = {
            n: torch.randint(0, max(1, rows), (60 if rows else 0,), generator=generator) for n, rows in owned.items()
        }
        dtype = torch.float32 if fused else torch.float64
        gradients = {t.name: torch.randn(len(local[t.name]), t.dim, generator=generator, dtype=dtype) for t in TABLES}
        shards[0].update(local, gradients, lr=dict.fromkeys(local, 0.1 / (step + 1)))
        for part in (0, 1):
            meant = {name: (rows * 7919 + step) % 3 % 2 == part for name, rows in local.items()}
            some = {name: rows[meant[name]] for name, rows in local.items()}
            shards[1].update(
                some, {name: g[meant[name]] for name, g in gradients.items()}, lr=dict.fromkeys(local, 0.1 / (step + 1))
            )
    one, other = (shard.state() for shard in shards)
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fused", [True, False], ids=["fbgemm", "plain"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
def test_rows_that_are_changed_in_two_parts_are_bitwise_those_that_are_changed_at_once(
    groups: dict[int, Ranks], optimizer: str, fused: bool
) -> None:
    assert all(groups[2].run(in_parts, optimizer, fused))


def told(world: World) -> list[str]:
    one = joined(world)
    tables = shard_tables([Table("item", 1_000_000, 64)], RunConfig(), one, one.transport, torch.float32)
    return describe_sharded_tables(tables, world.ranks)


def test_the_plan_says_where_rows_live_and_what_they_cost(groups: dict[int, Ranks]) -> None:
    for (line,) in groups[2].run(told):
        assert "1,000,000 x 64 row-wise over 2 ranks, up to 500,000 rows each" in line
        assert "128.00 MB of weights and 2.00 MB of optimizer state per rank" in line


def logged(world: World, dtype: torch.dtype) -> list[str]:
    one, handler = joined(world), ListHandler()
    log._logged.clear()  # a rank logs the same text once
    with log.handled_by(handler):
        shard_tables([Table("item", 10, 4)], RunConfig(), one, one.transport, dtype)
    return handler.messages


def test_tables_that_are_not_in_fbgemm_are_logged(groups: dict[int, Ranks]) -> None:
    assert groups[1].run(logged, torch.float64) == [["tables are plain torch: FBGEMM keeps none in float64"]]
    assert groups[1].run(logged, torch.float32) == [[]]


def test_only_optimizers_that_update_each_row_by_itself_are_accepted() -> None:
    exact = {EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    for optimizer in exact:
        require_exact(optimizer, "here")
    for optimizer in set(EmbOptimType) - exact:
        with pytest.raises(ConfigError, match="would not be exact"):
            require_exact(optimizer, "here")
