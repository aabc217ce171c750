"""Reports and counters of the virtual GPU of this process, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.support.ranks import World


@contextmanager
def reports_of(_: World) -> Iterator[list[str]]:
    """Yield a list that holds the reports of what runs inside, afterwards; empty on a CPU."""
    found: list[str] = []
    if torch.accelerator.current_accelerator() is None:
        yield found
        return
    from tests.support.vgpu import device

    device.gpu.memory.reports.clear()
    yield found
    torch.accelerator.synchronize()
    found += sorted(device.gpu.memory.reports)
