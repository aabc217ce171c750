"""Every operation of a schedule stands in the operation table, in the order in which the schedule issues it.

And micro-batches have about equal cost.
"""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from freescale.balance.cost import Cost
from freescale.data.batch import Batch, Events
from freescale.data.synthetic import draw_lengths
from freescale.overlap.schedule import Operation, Schedule, overlapped, serial
from freescale.train.schedule_runner import ScheduleRunner
from freescale.train.step import operation_table, split_by_cost
from freescale.transport.selection import TransportSelection

_SCHEDULES = {
    "replicated": serial(sharded=False),
    "serial": serial(sharded=True),
    "overlapped": overlapped(),
    "serial with replicated rows": serial(sharded=True, replicates=True),
    "overlapped with replicated rows": overlapped(replicates=True),
    "serial with dynamic ids": serial(sharded=True, assigns=True, samples=True),
    "overlapped with dynamic ids": overlapped(assigns=True, samples=True),
}


@pytest.mark.parametrize("schedule", _SCHEDULES.values(), ids=_SCHEDULES)
def test_the_table_holds_the_operations_of_a_schedule_in_its_order(schedule: Schedule) -> None:
    names = [operation.name for operation in schedule.operations]
    assert [name for name in operation_table(Mock(), None) if name in names] == names


def test_every_operation_of_the_table_is_part_of_a_schedule() -> None:
    names = {operation.name for schedule in _SCHEDULES.values() for operation in schedule.operations}
    assert operation_table(Mock(), None).keys() == names


def test_a_schedule_with_an_operation_that_the_table_lacks_is_refused() -> None:
    schedule = Schedule((Operation("prepare", "host", "host"), Operation("invent", "host", "host")))
    with pytest.raises(ValueError, match="the operation table lacks invent"):
        ScheduleRunner(
            schedule,
            operation_table(Mock(), None),
            None,
            TransportSelection.of_one(Mock()),
            None,
            torch.device("cpu"),
        )


def batch_of(lengths: list[int], candidates: list[int] | None = None) -> Batch:
    """Samples whose every event and candidate carries the sample's id."""

    def events(counts: list[int]) -> Events:
        count = torch.tensor(counts, dtype=torch.int64)
        offsets = torch.cat([count.new_zeros(1), count.cumsum(0)])
        return Events(offsets, {"sample": torch.arange(len(counts)).repeat_interleave(count)})

    return Batch(
        0, 0, torch.arange(len(lengths)), {}, events(lengths), events(candidates) if candidates else None, None
    )


COSTS = {"hstu": Cost.hstu(dim=256, layers=8), "attention alone": Cost(pair=1.0), "tokens": Cost(token=1.0)}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_four_micro_batches_of_64_samples_have_equal_cost_to_five_percent(cost: Cost) -> None:
    for seed in range(100):
        lengths = draw_lengths("kuairand", 64, np.random.default_rng(seed))
        whole = batch_of(np.maximum(1, lengths // 64).tolist())
        costs = [cost.of(part.history.lengths).sum() for part in split_by_cost(whole, 4, cost)]
        assert max(costs) <= 1.05 * np.mean(costs)


def test_every_sample_is_in_one_micro_batch_and_keeps_its_order_and_its_features() -> None:
    whole = batch_of([3, 50, 0, 7, 7, 200, 1, 9], [1, 2, 3, 4, 5, 6, 7, 8])
    parts = split_by_cost(whole, 3, Cost(token=1.0))
    assert sorted(i for part in parts for i in part.sample_id.tolist()) == list(range(8))
    for part in parts:
        ids = part.sample_id
        assert ids.tolist() == sorted(ids.tolist())
        for events, whole_events in ((part.history, whole.history), (part.candidates, whole.candidates)):
            assert events is not None
            assert whole_events is not None
            assert torch.equal(events.lengths, whole_events.lengths[ids])
            assert torch.equal(events["sample"], ids.repeat_interleave(events.lengths))


def test_the_split_follows_from_lengths_alone_and_counts_candidates() -> None:
    cost, lengths, candidates = Cost(token=1.0), [10, 10, 10, 10], [90, 0, 45, 45]
    first, second = (split_by_cost(batch_of(lengths, candidates), 2, cost) for _ in range(2))
    assert [part.sample_id.tolist() for part in first] == [part.sample_id.tolist() for part in second]
    assert [part.sample_id.tolist() for part in first] == [[0, 1], [2, 3]]


def test_fewer_samples_than_micro_batches_leave_some_empty() -> None:
    parts = split_by_cost(batch_of([5, 2]), 4, Cost(token=1.0))
    assert sorted(map(len, parts)) == [0, 0, 1, 1]
    assert [len(part) for part in split_by_cost(batch_of([]), 2, Cost(token=1.0))] == [0, 0]
