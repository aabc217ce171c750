"""The kernels of dynamic ids give slots, counts and rows of the CPU, bit for bit. Triton's interpreter runs them."""

import itertools
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from freescale.embedding.zero_collision_ids import DynamicIds, initial_rows
from freescale.embedding.zero_collision_layout import EMPTY, BucketLayout, EvictionPolicy


class Steps(NamedTuple):
    """A table, and the requests of some steps: with repeated ids, and with numbers below 0 that are no ids."""

    layout: BucketLayout
    owned: range
    policy: EvictionPolicy
    admit_after: int
    requests: list[Tensor]

    @staticmethod
    def random(layout: BucketLayout, policy: EvictionPolicy, admit_after: int, *, size: int, steps: int) -> "Steps":
        """Draw ids of which some return, all of the last buckets."""
        generator = torch.Generator().manual_seed(size + steps + admit_after)
        owned = range(layout.buckets // 2, layout.buckets)
        drawn = torch.randint(2**62, (16 * size,), generator=generator)
        ids = drawn[layout.bucket_of(drawn) >= owned.start][: 4 * size]
        requests = []
        for step in range(steps):
            recent = ids[: size * (step + 2)][-2 * size :]
            chosen = recent[torch.randint(len(recent), (size,), generator=generator)]
            requests.append(torch.cat([chosen, torch.tensor([-7, -3])]))
        return Steps(layout, owned, policy, admit_after, requests)

    def open(self) -> DynamicIds:
        """Return the table without ids."""
        return DynamicIds(self.layout, owned=self.owned, policy=self.policy, admit_after=self.admit_after)


def assigned_by_kernels(of: Steps) -> tuple[dict[str, Tensor], list[list[Tensor]], Tensor]:
    """Return the table, what each step gave, and the faults."""
    from freescale.embedding.zero_collision_launch import assign_masked

    torch.set_num_threads(1)
    table, faults, results = of.open(), torch.zeros(1, dtype=torch.int64), []
    for step, requests in enumerate(of.requests):
        ordered = requests.sort().values
        is_wanted = ordered >= 0
        is_wanted[1:] &= ordered[1:] != ordered[:-1]
        found = assign_masked(table, ordered, is_wanted, faults, step=step, time=100 * step)
        new = found.is_new
        counts = torch.stack([found.is_waiting.sum(), found.is_without_slot.sum()])
        results.append([found.rows[is_wanted], ordered[new], found.evicted[new], counts])
    return table.state_dict(), results, faults


POLICIES = {
    "none": EvictionPolicy(),
    "ttl": EvictionPolicy("ttl", ttl=200),
    "lru": EvictionPolicy("lru"),
    "lfu": EvictionPolicy("lfu"),
}


# The policies that give slots back; with and without admission.
IN_GATE = {("ttl", 1), ("lfu", 2)}


@pytest.mark.parametrize(
    ("policy", "admit_after"),
    [
        pytest.param(*case, marks=() if case in IN_GATE else pytest.mark.whole)
        for case in itertools.product(POLICIES, (1, 2))
    ],
)
def test_kernels_assign_the_slots_of_the_cpu(interpreter: ProcessPoolExecutor, policy: str, admit_after: int) -> None:
    steps = Steps.random(BucketLayout(4, 6), POLICIES[policy], admit_after, size=14, steps=7)
    table, results, faults = interpreter.submit(assigned_by_kernels, steps).result()
    evicted = _compare(steps, table, results)
    assert (evicted > 0) == (policy != "none")
    assert not faults.any()


def test_kernels_look_through_whole_windows(interpreter: ProcessPoolExecutor) -> None:
    steps = Steps.random(BucketLayout(2, 300), POLICIES["lru"], 1, size=40, steps=2)
    _compare(steps, *interpreter.submit(assigned_by_kernels, steps).result()[:2])


def _compare(steps: Steps, table: dict[str, Tensor], results: list[list[Tensor]]) -> int:
    """Compare a table and the results of its steps with those of the CPU; return how many ids lost their slot."""
    expected, evicted = steps.open(), 0
    for step, (requests, (rows, new, lost, counts)) in enumerate(zip(steps.requests, results, strict=True)):
        ids = requests[requests >= 0].unique()
        found = expected.assign(ids, step=step, time=100 * step)
        assert torch.equal(rows, found.rows)
        assert torch.equal(new, ids[found.new])
        assert torch.equal(lost, found.evicted)
        assert counts.tolist() == [found.waiting, found.without_slot]
        evicted += int((lost != EMPTY).sum())
    for name, array in expected.state_dict().items():
        assert torch.equal(table[name], array), name
    return evicted


def test_an_id_of_another_owner_is_a_fault(interpreter: ProcessPoolExecutor) -> None:
    steps = Steps.random(BucketLayout(4, 6), POLICIES["none"], 1, size=4, steps=1)
    others = torch.arange(100)
    foreign = others[steps.layout.bucket_of(others) < steps.owned.start][:1]
    faulty = steps._replace(requests=[torch.cat([steps.requests[0], foreign])])
    assert interpreter.submit(assigned_by_kernels, faulty).result()[2].all()


def rows_by_kernel(ids: Tensor, dtype: torch.dtype, columns: int) -> tuple[Tensor, Tensor | None]:
    """Initialize every second row."""
    from freescale.embedding.zero_collision_launch import initialize_rows

    weights = torch.ones(len(ids), 6, dtype=dtype)
    sums = torch.ones(len(ids), columns, dtype=dtype) if columns else None
    rows, is_new = torch.arange(len(ids)), torch.arange(len(ids)) % 2 == 0
    initialize_rows(weights, sums, rows, ids, is_new, table="item", seed=3, deviation=0.05)
    return weights, sums


@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 1), (torch.float64, 6), (torch.float32, 0)])
def test_initial_rows_by_the_kernel_have_the_bits_of_the_cpu(
    interpreter: ProcessPoolExecutor, dtype: torch.dtype, columns: int
) -> None:
    ids = torch.tensor([0, 5, -(2**62), 2**62 + 1, 977])
    weights, sums = interpreter.submit(rows_by_kernel, ids, dtype, columns).result()
    expected = initial_rows(ids, 6, table="item", seed=3, deviation=0.05).to(dtype)
    assert torch.equal(weights[::2], expected[::2])
    assert weights[1::2].eq(1).all()
    assert sums is None or (not sums[::2].any() and sums[1::2].eq(1).all())
