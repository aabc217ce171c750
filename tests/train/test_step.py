"""Every operation of a schedule stands in the operation table, in the order in which the schedule issues it."""

from unittest.mock import Mock

import pytest
import torch

from freescale.overlap.schedule import Operation, Schedule, overlapped, serial
from freescale.train.schedule_runner import ScheduleRunner
from freescale.train.step import operation_table
from freescale.transport.selection import TransportSelection

_SCHEDULES = {"replicated": serial(sharded=False), "serial": serial(sharded=True), "overlapped": overlapped()}


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
            TransportSelection(Mock(), None, []),
            None,
            torch.device("cpu"),
        )
