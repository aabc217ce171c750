"""What the code does on a GPU that it need not do on a CPU: devices, communicators, priorities, timeouts, memory."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from freescale.checkpoint import tensor_files
from freescale.checkpoint.tensor_files import LocalRows, copy_to_host
from freescale.config import TransportConfig
from freescale.embedding.fused import _topology
from freescale.errors import TransportError
from freescale.train.build import build
from freescale.train.schedule_runner import SideStream
from freescale.transport import selection
from freescale.transport.base import PendingWork
from freescale.transport.host_staged import StreamCopier
from freescale.transport.selection import ProbeCompute, TransportFactory, probe, select_transports
from freescale.transport.world import clone_group
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small
from tests.support.vgpu.checks import reports_of


def tables_on(world: World, data: str, folder: str) -> set[str]:
    trainer = build(small(data, train={"precision": "fp64"}), joined(world), Path(folder))
    assert trainer.components.tables is not None
    return {str(rows.device) for rows in trainer.components.tables.shard.state().values()}


def test_sharded_tables_in_fp64_are_on_the_device_of_their_rank(gpus: Ranks, log: Path, tmp_path: Path) -> None:
    assert gpus.run(tables_on, str(log), str(tmp_path)) == [{"vgpu:0"}, {"vgpu:1"}]


def lanes(world: World) -> list[tuple[bool, int]]:
    from tests.support.vgpu import group

    here, before = joined(world), len(group.groups)
    factory = TransportFactory(here)
    factory.create("c10d", urgent=factory.create("c10d"))
    return [(made.options.is_high_priority_stream, made.options.config.max_ctas) for made in group.groups[before:]]


def test_urgent_rows_have_a_communicator_of_high_priority_and_deferred_ones_few_ctas(gpus: Ranks) -> None:
    assert gpus.run(lanes) == [[(True, 0), (False, 4)]] * 2


def busy_after_wait(world: World) -> tuple[bool, float, bool]:
    """Rank 1 starts a transfer half a second later than rank 0."""
    transport = joined(world).transport
    transport.sum(0, name="together")
    rows = torch.ones(2, 4, device=transport.device)
    if world.rank == 1:
        time.sleep(0.5)
    began = time.monotonic()
    work = transport.all_to_all(rows, [1, 1], [1, 1], name="rows")
    work.wait()
    waited, busy = time.monotonic() - began, transport.busy()
    work.wait_on_host()
    return busy, waited, transport.busy()


def test_a_transfer_is_in_flight_until_its_bytes_arrive_and_not_until_it_is_enqueued(gpus: Ranks) -> None:
    busy, waited, afterwards = gpus.run(busy_after_wait)[0]
    assert busy, "a stream waits, the bytes have not arrived"
    assert waited < 0.25
    assert not afterwards


def waits_alone(world: World) -> str:
    group = clone_group(joined(world, timeout=3.0).transport)
    if world.rank == 1:
        time.sleep(4.0)
        return ""
    try:
        group.sum(1, name="a sum")
    except TransportError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_named_before_the_watchdog_ends_the_process() -> None:
    ranks = Ranks(2, on_virtual_gpus=True)  # its groups are unusable afterwards
    try:
        assert "a sum failed on rank 0 of 2: ranks that do not answer: 1" in ranks.run(waits_alone)[0]
    finally:
        ranks.close()


def watchdog_seconds(world: World) -> float:
    from tests.support.vgpu import group

    clone_group(joined(world, timeout=3.0).transport)
    return group.groups[-1].timeout_seconds


def test_the_watchdog_of_a_communicator_comes_after_the_timeout_of_the_transport(gpus: Ranks) -> None:
    assert min(gpus.run(watchdog_seconds)) > 3.0 + 30.0


def priority_of_side_stream(world: World) -> int:
    from tests.support.vgpu import device

    return device.gpu.priorities[SideStream(joined(world).device)._side.stream_id]


def test_kernels_of_the_deferred_lane_have_high_priority(gpus: Ranks) -> None:
    assert max(gpus.run(priority_of_side_stream)) < 0


def planned_bytes(world: World) -> int:
    here = joined(world)
    return _topology(here.group, here.device).devices[0].storage.hbm


def test_the_planner_takes_the_memory_of_the_device(gpus: Ranks) -> None:
    assert gpus.run(planned_bytes) == [80 << 30] * 2


def probed(world: World) -> tuple[list[str], set[str]]:
    """Probe a transport; return reports, and what the host waited for while it computed."""
    from tests.support.vgpu import device

    here = joined(world)
    factory = TransportFactory(here)
    device.waits.clear()
    with reports_of(world) as found:
        probe({"c10d": factory.create("c10d")}, here.transport, here.device, sizes=[1 << 12], rounds=1)
        causes = {cause for _, line, cause in device.waits if line.startswith("transport/selection.py")}
    return found, causes


def test_the_probe_waits_for_its_own_stream_on_its_own_device(gpus: Ranks) -> None:
    for found, causes in gpus.run(probed):
        assert found == []
        assert "device" not in causes


def probed_size(world: World) -> int:
    return ProbeCompute(joined(world).device)._matrix.shape[0]


def test_the_compute_of_the_probe_fills_the_sms(gpus: Ranks) -> None:
    assert min(gpus.run(probed_size)) >= 2048


def freed_while_copied(world: World) -> list[str]:
    """Copy to the host by a copier that was given the device without an index, and drop the rows at once."""
    from tests.support.vgpu import device

    copier = StreamCopier(torch.device(device.NAME))
    with reports_of(world) as found:
        rows, host = torch.ones(100, device=device.NAME), torch.empty(100, pin_memory=True)
        copier.begin()
        copier.copy(host, rows)
        del rows
        torch.zeros(100, device=device.NAME)
    return found


def test_rows_may_be_freed_while_they_are_copied_to_the_host(gpus: Ranks) -> None:
    assert gpus.run(freed_while_copied) == [[], []]


def launches_of_a_transfer(world: World) -> dict[str, int]:
    from tests.support.vgpu import device

    here = joined(world)
    transport = TransportFactory(here).create("copy_engine")
    rows = torch.ones(4, 2, device=here.device)
    device.launches.clear()
    transport.all_to_all(rows, [2, 2], [2, 2], name="rows").wait()
    counted: dict[str, int] = {}
    for (_, line, name), count in device.launches.items():
        if line.startswith("transport/copy_engine.py"):
            counted[name] = counted.get(name, 0) + count
    return counted


def test_a_transfer_by_copy_engines_launches_two_barriers_and_a_copy_per_rank(gpus: Ranks) -> None:
    assert gpus.run(launches_of_a_transfer) == [{"barrier": 2, "copy": 2}] * 2


def threads_of_updates(world: World, data: str, folder: str) -> set[str]:
    from tests.support.vgpu import device

    config = small(data, train={"precision": "fp32", "max_steps": 3}, tables={"overlap": "on"})
    trainer = build(config, joined(world), Path(folder))
    device.launches.clear()
    trainer.fit()
    return {thread for thread, line, _ in device.launches if line.startswith("embedding/sharded.py")}


def test_rows_are_updated_without_waiting_in_the_queue_of_autograd(gpus: Ranks, log: Path, tmp_path: Path) -> None:
    for threads in gpus.run(threads_of_updates, str(log), str(tmp_path)):
        assert threads == {"MainThread", "freescale-deferred"}


def waits_of_a_copy(world: World) -> int:
    from tests.support.vgpu import device

    tensors = {
        str(rows): LocalRows.whole(torch.ones(rows, 2, device=joined(world).device), replicated=True)
        for rows in (1, 2, 3)
    }
    device.waits.clear()
    copies = copy_to_host(tensors)
    assert all(int(copy.local.sum()) == 2 * int(name) for name, copy in copies.items())
    return sum(device.waits.values())


def test_the_host_waits_once_for_all_tensors_of_a_checkpoint(gpus: Ranks) -> None:
    assert gpus.run(waits_of_a_copy) == [1, 1]


def copied_through_small_buffers(world: World) -> list[str]:
    """Copy tensors that take many turns of the buffers."""
    device = joined(world).device
    values = {str(rows): torch.arange(rows * 3.0).view(rows, 3) for rows in (0, 1, 2, 40, 41, 42, 100)}
    allocate, pinned = torch.empty, []

    def noting(*size: Any, **options: Any) -> torch.Tensor:
        made = allocate(*size, **options)
        pinned.extend([made.nbytes] if options.get("pin_memory") else [])
        return made

    with reports_of(world) as found, patch.object(tensor_files, "_PINNED_BYTES", 512):
        on_device = {name: LocalRows.whole(value.to(device), replicated=True) for name, value in values.items()}
        with patch.object(torch, "empty", noting):
            copies = copy_to_host(on_device)
        assert all(torch.equal(copies[name].local, value) for name, value in values.items())
        assert pinned == [512, 512]
    return found


def test_a_checkpoint_is_copied_to_the_host_through_small_pinned_buffers(gpus: Ranks) -> None:
    assert gpus.run(copied_through_small_buffers) == [[], []]


def seconds_of_a_deferred_sum(world: World) -> tuple[float, bool]:
    """Rank 1 comes half a second later than rank 0."""
    here = joined(world)
    factory = TransportFactory(here)
    transport = factory.create("c10d", urgent=factory.create("c10d"))
    here.transport.sum(0, name="together")
    if world.rank == 1:
        time.sleep(0.5)
    began = time.monotonic()
    work = transport.all_reduce(torch.ones(1, device=here.device), name="a sum")
    seconds, busy = time.monotonic() - began, transport.busy()
    assert work.wait_on_host().tolist() == [2.0]
    return seconds, busy


def test_a_sum_of_the_deferred_lane_has_arrived_when_it_returns(gpus: Ranks) -> None:
    (seconds, _), _ = results = gpus.run(seconds_of_a_deferred_sum)
    assert seconds > 0.25
    assert not any(busy for _, busy in results)


def waits_for_copies(world: World) -> tuple[float, float, bool, bool]:
    """Rank 1 offers memory, and lets its device take part only later. Return what rank 0 waits, and for what."""
    from tests.support.vgpu import symmetric

    here = joined(world)
    transport = TransportFactory(here).create("copy_engine")
    timeouts: list[float] = []
    barrier = symmetric.SharedHandle.barrier

    def recorded(self: Any, channel: int, timeout_ms: int) -> None:
        timeouts.append(timeout_ms / 1e3)
        barrier(self, channel, timeout_ms)

    rows = torch.full((4, 2), float(world.rank), device=here.device)
    here.transport.sum(0, name="together")
    with patch.object(symmetric.SharedHandle, "barrier", recorded):
        time.sleep(0.0 if world.rank == 1 else 0.3)
        work: Any = transport.all_to_all(rows, [2, 2], [2, 2], name="rows")
        assert isinstance(work, PendingWork)
        time.sleep(0.0 if world.rank == 0 else 1.0)
        work.wait()
        was_completed, began = work.is_completed(), time.monotonic()
        received = work.wait_on_host()
    seconds = time.monotonic() - began
    assert received[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    return seconds, min(timeouts) - transport.timeout, was_completed, work.is_completed()


def test_the_host_waits_until_the_copies_of_peers_have_arrived(gpus: Ranks) -> None:
    seconds, slack, was_completed, is_completed = gpus.run(waits_for_copies)[0]
    assert slack > 30.0, "the device may not fail before the host has named the ranks"
    assert not was_completed, "a stream waits, the bytes have not arrived"
    assert seconds > 0.2
    assert is_completed


def events_of_a_transfer(world: World) -> tuple[list[bool], float]:
    """Rank 1 starts a transfer half a second later than rank 0. Return whether an event had passed, and a time."""
    transport = joined(world).transport
    transport.sum(0, name="together")
    stream, rows = torch.accelerator.current_stream(), torch.ones(2, 4, device=transport.device)
    begin = torch.Event(transport.device, enable_timing=True)
    begin.record(stream)
    if world.rank == 1:
        time.sleep(0.5)
    work = transport.all_to_all(rows, [1, 1], [1, 1], name="rows")
    before = stream.record_event()
    work.wait()
    after, was_idle = stream.record_event(), stream.query()
    passed = [before.query(), after.query(), was_idle]
    work.wait_on_host()
    end = torch.Event(transport.device, enable_timing=True)
    end.record(stream)
    return [*passed, after.query(), stream.query()], begin.elapsed_time(end)


def test_an_event_passes_when_the_transfers_before_it_have_arrived(gpus: Ranks) -> None:
    passed, milliseconds = gpus.run(events_of_a_transfer)[0]
    assert passed == [True, False, False, True, True]
    assert 250.0 < milliseconds < 30e3


def priority_of_staged_copies(world: World) -> int:
    from tests.support.vgpu import device

    return device.gpu.priorities[StreamCopier(joined(world).device)._stream.stream_id]


def test_staged_copies_have_a_stream_outside_of_the_pool_of_futures(gpus: Ranks) -> None:
    assert max(gpus.run(priority_of_staged_copies)) < 0


def reasons_against_copy_engines(world: World) -> tuple[list[str], str]:
    """Select transports for transfers that are large for the reserved memory; then with one visible GPU."""
    from freescale.transport.copy_engine import ARENA_BYTES

    here = joined(world)
    with patch.object(selection, "probe", lambda *_, **__: []):
        reasons = select_transports(here, TransportConfig(), deferred=False, sent_bytes=ARENA_BYTES // 3).reasons
    assert "copy_engine" in TransportFactory(here, sent_bytes=ARENA_BYTES // 5).available
    with patch.object(torch.accelerator, "device_count", lambda: 1):
        return reasons, TransportFactory(here).unavailable["copy_engine"]


def test_copy_engines_are_left_out_with_the_reason_where_large_batches_do_not_fit(gpus: Ranks) -> None:
    for reasons, hidden in gpus.run(reasons_against_copy_engines):
        assert reasons[0] == "transport: urgent by c10d"
        assert "copy_engine is not possible: transfers of 5,592,405 bytes need more than the 16,777,216" in reasons[1]
        assert hidden == "a rank sees 1 of the GPUs of 2 ranks; a GPU per task hides the others"
