"""A schedule that issues an operation before its dependencies is refused."""

import subprocess
import sys
from unittest.mock import Mock

import pytest

from freescale.overlap.schedule import Operation, Schedule, serial
from freescale.train.step import operation_table


def test_an_operation_before_its_dependency_is_refused_and_both_are_named() -> None:
    with pytest.raises(ValueError, match="'rows' is issued before what it waits for: ids"):
        Schedule((Operation("rows", "urgent", "urgent rows", ("ids",)), Operation("ids", "urgent", "ids")))
    with pytest.raises(ValueError, match="'ids' is issued twice"):
        Schedule((Operation("ids", "urgent", "ids"), Operation("ids", "urgent", "ids")))


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_every_operation_of_the_serial_step_is_implemented(sharded: bool, parts: int) -> None:
    schedule = serial(sharded=sharded, micro_batches=parts)
    names = [operation.name for operation in schedule.operations]
    assert operation_table(Mock(), None).keys() >= set(names)
    assert names.count("forward") == names.count("backward") == parts
    assert ("send_ids" in names) == sharded


def test_a_schedule_can_be_read_without_torch() -> None:
    code = "import sys, freescale.overlap.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
