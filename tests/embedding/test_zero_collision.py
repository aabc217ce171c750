"""No two ids share a slot, and slots depend on nothing but the ids, steps and event times of a bucket."""

import random
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import fbgemm_gpu  # noqa: F401  registers its operators
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from freescale import log
from freescale.embedding import zero_collision_ids
from freescale.embedding.zero_collision_ids import (
    Assignment,
    DynamicIds,
    fbgemm_arguments,
    initial_rows,
    open_slots,
)
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy, event_time
from freescale.embedding.zero_collision_native import NativeSlots, load_library
from freescale.embedding.zero_collision_torch import TorchSlots
from freescale.errors import ConfigError, DataError
from tests.support.naive_slots import NaiveIds

LAYOUT = BucketLayout(buckets=64, slots=1024)
Kind = Literal["none", "ttl", "lru", "lfu"]
KINDS: list[Kind] = ["none", "ttl", "lru", "lfu"]


class Case(NamedTuple):
    """A table and the ids and event times of some steps."""

    layout: BucketLayout
    policy: EvictionPolicy
    admit_after: int
    steps: list[tuple[int, int, list[int]]]


def random_steps(ids: list[int], most: int, seed: int) -> list[tuple[int, int, list[int]]]:
    numbers, steps, step, time = random.Random(seed), [], 0, 0
    for _ in range(numbers.randrange(1, 9)):
        steps.append((step, time, sorted(numbers.sample(ids, numbers.randrange(most + 2)))))
        step, time = step + numbers.randrange(1, 4), max(0, time + numbers.randrange(-2, 10))
    return steps


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(KINDS))
    layout = BucketLayout(draw(st.sampled_from([1, 4])), draw(st.integers(1, 12)))
    policy = EvictionPolicy(kind, ttl=draw(st.integers(1, 20)) if kind == "ttl" else 0)
    size = layout.buckets * layout.slots
    few = [-(2**63), 2**63 - 1, 2**62, -2, *range(2 * size)]
    return Case(layout, policy, draw(st.integers(1, 3)), random_steps(few, size, draw(st.integers(0, 999))))


def on_torch(table: DynamicIds) -> DynamicIds:
    """The same arrays, searched by torch operators."""
    table._slots = TorchSlots(table.arrays, table.layout, table.owned.start)
    if table.candidates is not None:
        table.candidates._slots = TorchSlots(table.candidates.arrays, table.candidates.layout, table.owned.start)
    return table


def require_equal(table: DynamicIds, naive: NaiveIds) -> None:
    pairs = [(table.arrays, naive.table)]
    if table.candidates is not None:
        pairs.append((table.candidates.arrays, naive.candidates))
    for arrays, reference in pairs:
        used = torch.tensor(reference.columns()[0]) != EMPTY
        assert not (arrays.ids[:, -1] != EMPTY).any(), "a shared row has no id"
        columns = [arrays.ids, arrays.last_step, event_time(arrays.time), arrays.count]
        for mine, theirs in zip(columns, reference.columns(), strict=True):
            assert torch.equal(mine[:, :-1][used].long(), torch.tensor(theirs)[used])
        assert torch.equal(arrays.ids[:, :-1] != EMPTY, used)


@settings(max_examples=60)
@given(case=cases())
def test_c_torch_and_a_naive_table_hold_the_same_ids_in_the_same_slots_after_every_step(case: Case) -> None:
    require_same_slots(case)


def require_same_slots(case: Case) -> None:
    options: Any = {"policy": case.policy, "admit_after": case.admit_after}
    assert not isinstance(load_library(), str)
    native, plain = DynamicIds(case.layout, **options), on_torch(DynamicIds(case.layout, **options))
    naive = NaiveIds(case.layout, case.policy, case.admit_after)
    for step, time, chosen in case.steps:
        ids = torch.tensor(chosen, dtype=torch.int64)
        ours, theirs = (table.assign(ids, step=step, time=time) for table in (native, plain))
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))
        new, evicted, waiting, without_slot = naive.assign(chosen, step, time)
        assert ids[ours.new].tolist() == new
        assert ours.evicted.tolist() == evicted
        assert (ours.waiting, ours.without_slot) == (waiting, without_slot)
        size = case.layout.buckets * case.layout.slots
        numbers = random.Random(step).sample(range(size), size // 4)
        negatives, others = (table.sample(torch.tensor(numbers).long()) for table in (native, plain))
        assert negatives.tolist() == others.tolist() == [naive.table.sample(number) for number in numbers]
        for name, array in native.state_dict().items():
            assert torch.equal(array, plain.state_dict()[name]), name
        require_equal(native, naive)
        require_one_id_per_slot(native, ids, ours)


def test_they_do_so_where_windows_are_shorter_than_buckets() -> None:
    steps = random_steps(list(range(200)), 70, seed=1)
    require_same_slots(Case(BucketLayout(1, 140), EvictionPolicy("lru"), 1, steps))


def require_one_id_per_slot(table: DynamicIds, ids: Tensor, assigned: Assignment) -> None:
    has_slot = table.is_slot(assigned.rows)
    assert torch.equal(table.arrays.ids.view(-1)[assigned.rows[has_slot]], ids[has_slot])
    shared = table.layout.bucket_of(ids[~has_slot]) * table.layout.stride + table.layout.slots
    assert torch.equal(assigned.rows[~has_slot], shared)
    assert int((~has_slot).sum()) == assigned.waiting + assigned.without_slot
    assert torch.equal(table.lookup(ids.flip(0)), assigned.rows.flip(0))


def distinct(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count + 1000,), generator=generator).unique()[:count]


def drifting(steps: int, per_step: int, seed: int = 0) -> Iterator[Tensor]:
    """Steps in which a tenth of the ids is new."""
    generator = torch.Generator().manual_seed(seed)
    known = distinct(per_step, generator)
    for _ in range(steps):
        kept = known[torch.randperm(len(known), generator=generator)[: per_step * 9 // 10]]
        known = torch.cat([kept, distinct(per_step - len(kept), generator)]).unique()
        yield known


def joined_state(owners: list[DynamicIds]) -> dict[str, Tensor]:
    return {name: torch.cat([owner.state_dict()[name] for owner in owners]) for name in owners[0].state_dict()}


@pytest.mark.parametrize("kind", ["lru", "ttl"])
def test_the_number_of_owners_changes_nothing(kind: Kind) -> None:
    layout, policy = BucketLayout(64, 16), EvictionPolicy(kind, ttl=30 if kind == "ttl" else 0)
    groups = [
        [DynamicIds(layout, owned=layout.owned(rank, count), policy=policy, admit_after=2) for rank in range(count)]
        for count in (1, 2, 3, 4, 8)
    ]
    evicted = 0
    for step, ids in enumerate(drifting(30, 600)):
        assigned = [assign_all(owners, ids, step=step, time=10 * step) for owners in groups]
        evicted += assigned[0][1]
        for rows, count in assigned:
            assert torch.equal(rows, assigned[0][0])
            assert count == assigned[0][1]
    assert evicted > 300
    for owners in groups:
        for name, array in joined_state(owners).items():
            assert torch.equal(array, groups[0][0].state_dict()[name])


def test_200_steps_with_new_ids_and_evictions_in_each_give_the_same_slots_on_any_number_of_owners() -> None:
    layout, policy, generator = BucketLayout(64, 32), EvictionPolicy("lru"), torch.Generator().manual_seed(5)
    groups = [
        [DynamicIds(layout, owned=layout.owned(rank, count), policy=policy) for rank in range(count)]
        for count in (1, 2, 3, 4, 8)
    ]
    live = distinct(2000, generator)
    for step in range(200):
        new = distinct(200, generator)
        ids = torch.cat([live[torch.randperm(len(live), generator=generator)[:300]], new[:34]]).unique()  # 10% new
        live = torch.cat([live, new[:34]])[-2000:]
        assigned = [assign_all(owners, ids, step=step, time=0) for owners in groups]
        assert step < 60 or assigned[0][1] > 0, f"step {step} evicts none"
        for rows, evicted in assigned:
            assert torch.equal(rows, assigned[0][0])
            assert evicted == assigned[0][1]
    for owners in groups:
        for name, array in joined_state(owners).items():
            assert torch.equal(array, groups[0][0].state_dict()[name])


def assign_all(owners: list[DynamicIds], ids: Tensor, *, step: int, time: int) -> tuple[Tensor, int]:
    """Return the rows of ids, and how many ids were evicted."""
    rows, evicted = torch.empty_like(ids), 0
    for owner in owners:
        bucket = owner.layout.bucket_of(ids)
        mine = (bucket >= owner.owned.start) & (bucket < owner.owned.stop)
        assigned = owner.assign(ids[mine], step=step, time=time)
        rows[mine] = assigned.rows
        evicted += int((assigned.evicted != EMPTY).sum())
    return rows, evicted


def test_another_number_of_owners_resumes_from_the_state_of_buckets() -> None:
    layout, policy = BucketLayout(64, 20), EvictionPolicy("lfu")
    whole = DynamicIds(layout, policy=policy, admit_after=2)
    saved: dict[str, Tensor] = {}
    owners: list[DynamicIds] = []
    for step, ids in enumerate(drifting(24, 400)):
        if step % 6 == 0:  # 4 -> 2 -> 3 -> 4 owners
            count = (4, 2, 3, 4)[step // 6]
            saved = {name: array.clone() for name, array in joined_state(owners).items()} if owners else {}
            owners = []
            for rank in range(count):
                buckets = layout.owned(rank, count)
                state = {name: array[buckets.start : buckets.stop].clone() for name, array in saved.items()}
                owners.append(DynamicIds(layout, owned=buckets, policy=policy, admit_after=2, state=state))
        whole.assign(ids, step=step, time=0)
        assign_all(owners, ids, step=step, time=0)
    for name, array in joined_state(owners).items():
        assert torch.equal(array, whole.state_dict()[name])


@pytest.mark.parametrize(("load", "most_without_slot"), [(0.75, 1e-4), (0.9, 5e-3)])
def test_nearly_all_ids_have_a_slot_of_their_own(load: float, most_without_slot: float) -> None:
    table, layout = DynamicIds(LAYOUT), LAYOUT
    ids = distinct(int(load * layout.buckets * layout.slots), torch.Generator().manual_seed(1))
    without_slot = table.assign(ids, step=0, time=0).without_slot
    assert without_slot <= most_without_slot * len(ids)
    rows = table.lookup(ids)
    own = rows[table.is_slot(rows)]
    assert len(own.unique()) == len(own) == len(ids) - without_slot


def test_with_eviction_every_id_of_a_step_has_a_slot_in_a_table_for_three_quarters_of_the_ids() -> None:
    table = DynamicIds(LAYOUT, policy=EvictionPolicy("lru"))
    ids = distinct(LAYOUT.buckets * LAYOUT.slots * 4 // 3, torch.Generator().manual_seed(1))
    for step in range(24):
        assigned = table.assign(ids[step % 12 :: 12], step=step, time=0)
        assert assigned.without_slot == 0


def fbgemm_lookup(table: DynamicIds, ids: Tensor) -> Tensor:
    sizes, offsets = fbgemm_arguments(ids, table.layout)
    identities, window = table.identities(), table.layout.window
    found, _ = torch.ops.fbgemm.zero_collision_hash(
        ids, identities, window, True, -1, True, sizes, offsets, None, False, True
    )
    return found


@pytest.mark.parametrize("slots", [1024, 100, 5])
def test_fbgemm_finds_the_same_slots_also_after_evictions_that_left_holes(slots: int) -> None:
    layout = BucketLayout(64, slots)
    table = DynamicIds(layout, policy=EvictionPolicy("ttl", ttl=100))
    ids = distinct(64 * slots, torch.Generator().manual_seed(2))
    for step in range(8):
        table.assign(ids[step::8], step=step, time=30 * step)
    assert table.expire(step=20, time=260) > 64 * slots // 8
    queried = torch.cat([ids, distinct(100_000, torch.Generator().manual_seed(3))])
    rows = table.lookup(queried)
    assert torch.equal(fbgemm_lookup(table, queried), torch.where(table.is_slot(rows), rows, -1))
    assert table.is_slot(rows).sum() == (table.arrays.ids != EMPTY).sum() > 0


def test_expired_ids_leave_and_recent_steps_are_protected() -> None:
    table = DynamicIds(LAYOUT, policy=EvictionPolicy("ttl", ttl=100))
    old, used, young = distinct(3000, torch.Generator().manual_seed(4)).split(1000)
    table.assign(torch.cat([old, used]).unique(), step=0, time=0)
    table.assign(young, step=1, time=500)
    assert table.expire(step=3, time=500) == 0, "steps 0 and 1 are among the last three"
    assert table.expire(step=4, time=100) == 0, "nothing is older than 100 seconds"
    table.assign(used, step=4, time=450)
    assert table.expire(step=9, time=551) == 2000
    assert table.is_slot(table.lookup(young)).all()


def test_a_grown_table_holds_the_same_ids_and_says_where_their_rows_went() -> None:
    layout = BucketLayout(64, 16)
    table = DynamicIds(layout, policy=EvictionPolicy("lru"), admit_after=2)
    for step, ids in enumerate(drifting(20, 600)):
        table.assign(ids, step=step, time=step)
    weight = torch.arange(layout.rows)
    grown, moves = table.grow(40)
    assert moves.lost == 0
    moved = torch.full((grown.layout.rows,), -1)
    moved[moves.after] = weight[moves.before]
    used = table.arrays.ids[table.arrays.ids != EMPTY]
    assert torch.equal(moved[grown.lookup(used)], table.lookup(used))
    absent = distinct(1000, torch.Generator().manual_seed(9))
    assert torch.equal(moved[grown.lookup(absent)], table.lookup(absent)), "shared rows move too"
    for name in ("last_step", "time", "count"):
        before, after = (getattr(t.arrays, name).view(-1)[t.lookup(used)] for t in (table, grown))
        assert torch.equal(before, after)
    assert grown.candidates is not None
    assert table.candidates is not None
    counting = table.candidates.arrays.ids[table.candidates.arrays.ids != EMPTY].unique()
    assert torch.isin(counting, grown.candidates.arrays.ids).all()
    assert grown.assign(counting, step=30, time=30).waiting == 0
    with pytest.raises(ConfigError, match="16 slots per bucket cannot shrink to 8"):
        table.grow(8)


def test_a_slot_takes_at_most_24_bytes() -> None:
    table = DynamicIds(LAYOUT, policy=EvictionPolicy("lru"), admit_after=2)
    assert isinstance(table._slots, NativeSlots)
    assert table.candidates is not None
    assert isinstance(table.candidates._slots, NativeSlots)
    held = [*table.state_dict().values(), table._slots._tags, table.candidates._slots._tags]
    assert sum(x.numel() * x.element_size() for x in held) <= 24 * LAYOUT.buckets * LAYOUT.slots


def test_initial_rows_depend_on_seed_table_and_id_only() -> None:
    ids = torch.tensor([5, -7, 2**62, 5 + 2**58])
    rows = initial_rows(ids, 64, table="item", seed=3, deviation=0.5)
    assert torch.equal(rows[[2, 0]], initial_rows(ids[[2, 0]], 64, table="item", seed=3, deviation=0.5))
    for other in ({"table": "user", "seed": 3}, {"table": "item", "seed": 4}):
        assert not (rows == initial_rows(ids, 64, deviation=0.5, **other)).any()  # type: ignore[arg-type]
    many = initial_rows(torch.arange(2000), 64, table="item", seed=3, deviation=0.5)
    assert many.std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(many.mean().item()) < 0.01
    assert len(many.unique()) == many.numel()


def test_c_and_torch_make_the_same_initial_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(-(2**62), 2**62, (500,), generator=torch.Generator().manual_seed(0))
    by_c = initial_rows(ids, 48, table="item", seed=3, deviation=0.3)
    monkeypatch.setattr(zero_collision_ids, "load_library", lambda: "no compiler")
    assert torch.equal(by_c, initial_rows(ids, 48, table="item", seed=3, deviation=0.3))


def test_ids_that_a_rank_does_not_own_and_the_id_of_free_slots_are_refused() -> None:
    layout = BucketLayout(64, 4)
    mine, other = ([key for key in range(99) if int(layout.bucket_of(torch.tensor([key]))) // 32 == r] for r in (0, 1))
    for table in (DynamicIds(layout, owned=range(32)), on_torch(DynamicIds(layout, owned=range(32)))):
        with pytest.raises(DataError, match=f"id {other[0]} is in bucket .*this rank owns"):
            table.lookup(torch.tensor([mine[0], other[0]]))
        with pytest.raises(DataError, match="-1 cannot be an id"):
            table.assign(torch.tensor([-1, mine[0]]), step=0, time=0)
    with pytest.raises(DataError, match="not in the years 1970 to 2106"):
        DynamicIds(layout).assign(torch.tensor([1]), step=0, time=1_700_000_000_000)


@pytest.mark.parametrize(
    ("slots", "buckets"), [(1, 64), (65_536, 64), (200_000, 128), (4 << 20, 4096), (100_000_000, 65_536)]
)
def test_the_number_of_buckets_follows_the_slots(slots: int, buckets: int) -> None:
    layout = BucketLayout.of(slots)
    assert layout.buckets == buckets
    assert slots <= layout.buckets * layout.slots < slots + buckets
    assert [bucket for rank in range(7) for bucket in layout.owned(rank, 7)] == list(range(buckets))
    with pytest.raises(ConfigError, match=f"cannot own the {buckets} buckets"):
        layout.owned(0, buckets + 1)


@pytest.mark.parametrize(("kind", "ttl"), [("ttl", 0), ("lru", 5), ("oldest", 0)])
def test_a_policy_that_cannot_be_meant_is_refused(kind: Any, ttl: int) -> None:
    with pytest.raises(ConfigError):
        DynamicIds(LAYOUT, policy=EvictionPolicy(kind, ttl=ttl))


def test_torch_operators_are_used_without_a_compiler_and_the_reason_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setattr(zero_collision_ids, "load_library", lambda: "no C compiler was found")
    table = DynamicIds(BucketLayout(2, 4))
    assert isinstance(open_slots(table.arrays, table.layout, 0), TorchSlots)
    assert "torch operators because no C compiler was found" in caplog.text
