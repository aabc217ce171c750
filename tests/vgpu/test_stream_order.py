"""The virtual GPU reports every fault of stream order that a GPU would turn into wrong results, crashes or hangs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from freescale.embedding.ids import deduplicate_tables
from freescale.transport import chunked
from freescale.transport.selection import TransportFactory
from tests.support.ranks import Ranks, World
from tests.support.training import joined
from tests.support.vgpu.checks import reports_of
from tests.vgpu.test_training import trained


class Fault(NamedTuple):
    """A fault, planted by replacing a function."""

    target: str
    """Module, class and name."""
    name: str
    replacement: Callable[..., Any]
    transport: str = "c10d"
    report: str = "race"
    """Kind of the report, or text of the error."""
    in_training: bool = True
    """Whether it shows in training; else several transfers at once show it."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _no_fence(*_: Any) -> Callable[[], None]:
    return _nothing


def _run_without_a_fence_at_the_end(self: Any, operation: Any, batch: Any, wait_for_issuer: Any) -> Any:
    wait_for_issuer()
    completion = self._run_operation(operation, batch)
    if completion is not None:
        completion()
    return _nothing


def _wait_only_on_a_cpu(self: Any, work: Any, seconds: float) -> None:
    if self.device.type == "cpu":
        _wait(self, work, seconds)


def _send_before_the_copy(self: Any, staged: Any, sent: Any, received: Any, name: str) -> Any:
    out = self._staging.receive_buffer(received.flat)
    return self._transport.all_to_all(staged[0], sent.sizes, received.sizes, name=name, out=out)


def _launch_at_once(self: Any, transfer: Any) -> None:
    transfer.begun = self._stream.record_event()
    _launch(self, transfer)


def _allocate_without_events(self: Any, like: Any, rows: int) -> Any:
    return _allocate(self, like, rows)[0], []


def _finish_without_waiting(self: Any, transfer: Any, seconds: float) -> None:
    with torch.Stream(self._device):  # another stream waits
        _finish(self, transfer, seconds)


def _signal_per_transfer(self: Any, channel: int, seconds: float) -> None:
    """The receiver consumes a signal only when it waits for the transfer: with two in flight the second put hangs."""
    if channel == 0:
        for peer in range(self._shared.world_size):
            if peer != self._shared.rank:
                self._shared.put_signal(peer, 0, int(min(seconds, 2.0) * 1e3))
    else:
        _barrier(self, channel, seconds)


def _own_values(self: Any, values: torch.Tensor, *, name: str, op: Any = None) -> torch.Tensor:
    return self.all_reduce(values, name=name, op=torch.distributed.ReduceOp.SUM if op is None else op).wait_on_host()


def _deduplicate_on_the_host(ids: list[torch.Tensor], *, rows: list[int]) -> Any:
    return deduplicate_tables([of_table.cpu() for of_table in ids], rows=rows)


def _update_by_atomics(
    weights: torch.Tensor, _sums: Any, rows: torch.Tensor, gradient: torch.Tensor, *, lr: float, **_: Any
) -> None:
    weights.index_add_(0, rows, gradient, alpha=-lr)


from freescale.transport.c10d import C10d  # noqa: E402
from freescale.transport.copy_engine import Arena, CopyEngine  # noqa: E402

_wait = C10d._wait
_launch, _allocate, _finish, _barrier = CopyEngine._launch, Arena.allocate, CopyEngine._finish, Arena.barrier
EXECUTOR, RUNNER = "freescale.overlap.executor.Executor", "freescale.train.schedule_runner.SideStream"
ENGINE, ARENA = "freescale.transport.copy_engine.CopyEngine", "freescale.transport.copy_engine.Arena"
COPIER = "freescale.transport.host_staged.StreamCopier"
FAULTS = {
    "no fences between the lanes": Fault(RUNNER, "fence", _no_fence),
    "the step does not wait for the deferred lane": Fault(EXECUTOR, "_run_deferred", _run_without_a_fence_at_the_end),
    "a deferred operation on the compute stream": Fault(
        RUNNER, "deferred", lambda self: torch.accelerator.device_index(self._device.index), report="shared stream"
    ),
    "a transfer that no stream waits for": Fault("freescale.transport.c10d.C10d", "_wait", _wait_only_on_a_cpu),
    "a CPU tensor in a collective": Fault(
        "freescale.transport.c10d.C10d", "reduce_values", _own_values, report="No backend type associated"
    ),
    "float additions in any order": Fault(
        "freescale.embedding.row_update", "update_rows", _update_by_atomics, report="float atomics"
    ),
    "staged copies do not wait for compute": Fault(COPIER, "begin", _nothing, "host_staged"),
    "compute does not wait for staged copies": Fault(COPIER, "wait_for_copies", _nothing, "host_staged"),
    "a chunk is sent before it is copied": Fault(
        "freescale.transport.chunked.ChunkedTransport", "_send", _send_before_the_copy, "host_staged", "host"
    ),
    "copies to peers do not wait for compute": Fault(ENGINE, "_launch", _launch_at_once, "copy_engine"),
    "compute does not wait for the copies of peers": Fault(
        ENGINE, "_finish", _finish_without_waiting, "copy_engine", in_training=False
    ),
    "rows for peers without record_stream": Fault(
        "torch.Tensor", "record_stream", _nothing, "copy_engine", "freed early", in_training=False
    ),
    "staged rows without record_stream": Fault(
        "torch.Tensor", "record_stream", _nothing, "host_staged", "freed early", in_training=False
    ),
    "ids on the host": Fault(
        "freescale.train.sharded_model", "deduplicate_tables", _deduplicate_on_the_host, report="on the same device"
    ),
    "symmetric memory is reused while it is read": Fault(
        ARENA, "allocate", _allocate_without_events, "copy_engine", "freed early", in_training=False
    ),
    "a second transfer with one signal": Fault(
        ARENA, "barrier", _signal_per_transfer, "copy_engine", "did not become", in_training=False
    ),
}


def exchanged(world: World, name: str) -> list[torch.Tensor]:
    """Start several transfers of rows that nobody keeps, compute meanwhile, and use what arrives on another stream."""
    here = joined(world, timeout=20.0)
    factory = TransportFactory(here)
    transport, results = factory.create(name, urgent=factory.create("c10d")), []
    compute, side = torch.accelerator.current_stream(), torch.Stream(here.device)
    for step in range(3):
        works = []
        for width in (2, 3, 5):
            rows = torch.full((400, width), float(world.rank + step), device=here.device) + 1.0
            works.append(
                transport.all_to_all(rows, [150, 250], [150, 250][world.rank : world.rank + 1] * 2, name="rows")
            )
            del rows
            torch.zeros(400, width, device=here.device)
        results = []
        while works:
            received = works.pop(0).wait()
            received.record_stream(side)
            side.wait_stream(compute)
            with side:
                results.append(received + 1.0)
                del received
    compute.wait_stream(side)
    return [result.cpu() for result in results]


def reports(world: World, data: str, folder: str, name: str) -> list[str]:
    """Plant a fault; return the reports, or the error."""
    fault = FAULTS[name]
    module, _, owner = fault.target.rpartition(".")
    target = import_module(fault.target) if owner.islower() else getattr(import_module(module), owner)
    with reports_of(world) as found, patch.object(target, fault.name, fault.replacement), small_chunks():
        try:
            if fault.in_training:
                trained(world, data, folder, "fp32", fault.transport, 4, two_tables=True)
            else:
                exchanged(world, fault.transport)
        except Exception as error:
            return [*found, f"{error} {error.__cause__}"]
    return found


@contextmanager
def small_chunks() -> Iterator[None]:
    """Cut transfers into many chunks, so that buffers are used again."""
    with patch.dict(chunked.CHUNK_BYTES, gpu=512):
        yield


def exchanged_without_fault(world: World, name: str) -> tuple[list[list[float]], list[str]]:
    with reports_of(world) as found, small_chunks():
        results = exchanged(world, name)
    return [result.flatten().tolist() for result in results], found


@pytest.mark.parametrize("name", ["c10d", "host_staged", "copy_engine"])
def test_several_transfers_at_once_bring_the_right_rows_without_a_report(gpus: Ranks, name: str) -> None:
    for rank, (results, found) in enumerate(gpus.run(exchanged_without_fault, name)):
        assert found == []
        count = [150, 250][rank]
        for values, width in zip(results, (2, 3, 5), strict=True):
            assert values == [4.0] * (count * width) + [5.0] * (count * width)  # rank + 2 + 1 + 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_stream_order_is_reported(gpus: Ranks, log: Path, tmp_path: Path, name: str) -> None:
    found = [text for of_rank in gpus.run(reports, str(log), str(tmp_path), name) for text in of_rank]
    assert any(FAULTS[name].report in text for text in found), found


def _select(table: torch.Tensor, index: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, index)


def _put(table: torch.Tensor, index: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    table.index_put_((index,), torch.ones_like(table[:2]))
    return index


def _stage(_: torch.Tensor, __: torch.Tensor, pageable: torch.Tensor) -> torch.Tensor:
    """Write memory, then copy other memory from the host without blocking: the host has not waited for the stream."""
    written = torch.ones(2, 4, device=torch.accelerator.current_accelerator())
    written.add_(1.0)
    pageable.to(written.device, non_blocking=True)
    return written


def used_by_two_streams(world: World, number: int) -> tuple[list[str], list[str]]:
    """Use what a stream reads or writes on another stream, in order and unordered; return the reports of both."""
    device = joined(world).device
    table, pageable = torch.zeros(1000, 4, device=device), torch.ones(3)
    index, first_two = torch.tensor([100, 200], device=device), torch.arange(2, device=device)
    zeros = {dtype: torch.zeros((), dtype=dtype, device=device) for dtype in (table.dtype, index.dtype)}
    torch.accelerator.synchronize()
    found: list[list[str]] = []
    for is_ordered in (True, False):
        one, other = torch.Stream(device), torch.Stream(device)
        with reports_of(world) as reports:
            with one:
                used = (_select, _put, _stage)[number](table, index, pageable)
            if is_ordered:
                other.wait_stream(one)
            with other:
                used.index_put_((first_two,), zeros[used.dtype])
        found.append(reports)
    return found[0], found[1]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["selected rows", "an index", "a staged copy"])
def test_use_by_another_stream_is_reported_unless_it_is_ordered(gpus: Ranks, number: int) -> None:
    for ordered, unordered in gpus.run(used_by_two_streams, number):
        assert ordered == []
        assert any("race" in report for report in unordered), unordered


def host_reads(world: World, method: str) -> tuple[list[str], list[str]]:
    """Read pinned memory on the host, after and before it is copied; return the reports of both."""
    device = joined(world).device
    rows, found = torch.ones(100, device=device), []
    for waits in (True, False):
        pinned = torch.empty(100, pin_memory=True)
        with reports_of(world) as reports:
            pinned.copy_(rows, non_blocking=True)
            if waits:
                torch.accelerator.current_stream().synchronize()
            if method == "copy_":
                torch.empty(100).copy_(pinned)
            else:
                getattr(pinned[:1], method)()
        found.append(reports)
    return found[0], found[1]


@pytest.mark.parametrize("method", ["numpy", "tolist", "item", "clone", "copy_"])
def test_host_reads_of_pinned_memory_are_reported_unless_it_has_waited(gpus: Ranks, method: str) -> None:
    for waited, unordered in gpus.run(host_reads, method):
        assert waited == []
        assert any("host" in report for report in unordered), unordered
