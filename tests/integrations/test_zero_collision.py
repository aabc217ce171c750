"""Raw ids go into any model, and the same events give the same rows in any run and on any number of ranks."""

import copy
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import freescale as fs
from freescale.embedding.zero_collision_layout import EMPTY
from freescale.errors import UsageError
from tests.support.ranks import Ranks, World
from tests.support.training import joined
from tests.support.vgpu.checks import reports_of

STEPS = 16


def batches(rank: int = 0) -> Iterator[Tensor]:
    """Raw ids [20, 10] with repetitions. Catalogue and ranks overlap, and a part is new in every step."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        yield 100 * step + torch.randint(0, 300, (20, 10), generator=generator)


def small_table() -> fs.ZeroCollisionTable:
    return fs.ZeroCollisionTable(512, eviction="lru", admit_after=2, name="item", seed=3)


def states(table: fs.ZeroCollisionTable) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in table.state_dict().items()}


def require_same(one: fs.ZeroCollisionTable, other: fs.ZeroCollisionTable) -> None:
    for name, value in states(one).items():
        assert torch.equal(value, states(other)[name]), name


def train(table: fs.ZeroCollisionTable, ids: Iterator[Tensor]) -> list[Tensor]:
    return [table(batch) for batch in ids]


def test_equal_ids_have_equal_rows_and_different_ids_different_slots() -> None:
    table = fs.ZeroCollisionTable(65_536)
    ids = next(batches())
    rows = table(ids)
    assert rows.shape == ids.shape
    assert len(rows.unique()) == len(ids.unique()) == len(table.new_ids)
    assert torch.equal(table.table.arrays.ids.view(-1)[rows], ids)


def test_evaluation_assigns_no_slot() -> None:
    table = small_table()
    trained = train(table, batches())
    before = {name: value.clone() for name, value in states(table).items()}
    table.eval()
    last = list(batches())[-1]
    assert torch.equal(table(last), trained[-1])
    assert not table.table.is_slot(table(torch.tensor([10**12]))).any()
    assert all(torch.equal(value, before[name]) for name, value in states(table).items())


def test_a_new_id_starts_from_its_own_row_without_optimizer_state_of_the_evicted_id() -> None:
    table = small_table()
    embedding = nn.Embedding(table.rows, 8)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    first: dict[int, Tensor] = {}
    evicted = 0
    for ids in batches():
        rows = table(ids)
        table.initialize_(embedding.weight, optimizer)
        for key, row in zip(table.new_ids.tolist(), table.new_rows.tolist(), strict=True):
            value = embedding.weight[row].detach().clone()
            assert torch.equal(first.setdefault(key, value), value), "an id that returns starts as before"
            if optimizer.state:
                assert not optimizer.state[embedding.weight]["exp_avg"][row].any()
        evicted += table.evicted
        optimizer.zero_grad()
        embedding(rows).square().sum().backward()
        optimizer.step()
    assert evicted > 20
    assert optimizer.state[embedding.weight]["exp_avg"].any()


def test_shards_of_rows_are_initialized_as_the_whole() -> None:
    table = fs.ZeroCollisionTable(65_536)
    table(next(batches()))
    whole = torch.zeros(table.rows, 4)
    shards = [part.clone() for part in whole.split(30_000)]
    table.initialize_(whole)
    for number, shard in enumerate(shards):
        table.initialize_(shard, first_row=30_000 * number)
    assert torch.equal(torch.cat(shards), whole)
    assert whole.any()


def test_a_loaded_table_continues_as_the_uninterrupted_one() -> None:
    table, resumed = small_table(), small_table()
    half = STEPS // 2
    train(table, (ids for step, ids in enumerate(batches()) if step < half))
    resumed(torch.arange(50))  # what it held before must be gone
    resumed.load_state_dict(states(table))
    copied = copy.deepcopy(table)
    rest = [ids for step, ids in enumerate(batches()) if step >= half]
    for rows, again, third in zip(*(train(one, iter(rest)) for one in (table, resumed, copied)), strict=True):
        assert torch.equal(rows, again)
        assert torch.equal(rows, third)
    require_same(table, resumed)
    require_same(table, copied)


def test_a_grown_table_keeps_ids_and_says_where_rows_go() -> None:
    table = small_table()
    rows = train(table, batches())[-1]
    weight = torch.arange(table.rows)
    moves = table.grow(4000)
    grown = torch.full((table.rows,), -1)
    grown[moves.after] = weight[moves.before]
    assert moves.lost == 0
    table.eval()
    last = list(batches())[-1]
    assert torch.equal(grown[table(last)], rows)
    assert table.state_dict()["ids"].shape == (64, 64)


def jagged() -> KeyedJaggedTensor:
    lengths, values = torch.tensor([2, 0, 1, 3, 1, 1]), torch.tensor([7, 8, 7, 10**15, 8, 7, 1, 2])
    return KeyedJaggedTensor(["item", "seen", "user"], values, weights=torch.arange(8.0), lengths=lengths)


def test_a_keyed_jagged_tensor_keeps_its_form() -> None:
    table = fs.ZeroCollisionTable(65_536, features=["item", "seen"])
    mapped = table(jagged())
    assert mapped.keys() == ["item", "seen", "user"]
    assert torch.equal(mapped.lengths(), jagged().lengths())
    assert torch.equal(mapped.weights(), torch.arange(8.0))
    assert mapped["user"].values().tolist() == [1, 2], "it has another table"
    items, seen = mapped["item"].values(), mapped["seen"].values()
    assert torch.equal(torch.cat([items, seen]), table(torch.tensor([7, 8, 7, 10**15, 8, 7])))
    assert (fs.ZeroCollisionTable(65_536)(jagged()).values() >= 0).all()
    with pytest.raises(UsageError, match="no feature shop"):
        fs.ZeroCollisionTable(1000, features=["shop"])(jagged())


def test_a_time_to_live_needs_event_times() -> None:
    table = fs.ZeroCollisionTable(1, eviction="ttl", ttl=60)
    with pytest.raises(UsageError, match="event time of every step"):
        table(torch.tensor([5]))
    same_bucket = [key for key in range(999) if int(table.layout.bucket_of(torch.tensor([key]))) == 0][:2]
    first, second = (torch.tensor([key]) for key in same_bucket)
    assert table.table.is_slot(table(first, time=1000)).all()
    for time in (1000, 1010, 1020, 1060):
        assert not table.table.is_slot(table(second, time=time)).any()
    assert table.table.is_slot(table(second, time=1061)).all()
    assert table.table.arrays.ids.flatten()[0] == second != EMPTY


def trained_on_ranks(world: World, steps: int) -> tuple[list[Tensor], dict[str, Tensor], list[str]]:
    device = joined(world).device
    with reports_of(world) as found:
        table = small_table().to(device)
        rows = train(table, (ids.to(device) for ids in islice(batches(world.rank), steps)))
        result = [row.cpu() for row in rows], states(table)
    return *result, found


def require_as_in_one_process(ranks: Ranks, steps: int) -> None:
    alone = small_table()
    rows = train(alone, (torch.cat(both) for both in islice(zip(batches(0), batches(1), strict=True), steps)))
    results = ranks.run(trained_on_ranks, steps)
    for step, both in enumerate(rows):
        assert torch.equal(both, torch.cat([result[0][step] for result in results]))
    for _, state, found in results:
        assert found == []
        for name, value in states(alone).items():
            assert torch.equal(value, state[name]), name


def test_ranks_hold_the_table_of_one_process(groups: dict[int, Ranks]) -> None:
    require_as_in_one_process(groups[2], STEPS)
