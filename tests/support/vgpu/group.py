"""A process group between virtual GPUs: gloo moves the bytes, and NCCL's rules hold.

It refuses CPU tensors. A communicator has one stream: its transfers run one after another, after the work that the
caller's stream had when it started them. `wait` makes the current stream wait and returns at once. A transfer is
completed when its bytes have arrived, and not when it is enqueued.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from tests.support.vgpu import device

BACKEND = "vccl"
_c10d: Any = _distributed_c10d  # its type stubs lack what a process group in Python needs


@dataclass
class Options:
    """The options of `ProcessGroupNCCL` that FreeScale sets."""

    is_high_priority_stream: bool = False
    config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(min_ctas=0, max_ctas=0))


class VirtualNccl:
    """Takes the place of `torch.distributed.ProcessGroupNCCL`, which a CPU build does not have."""

    Options = Options


groups: list["Group"] = []
"""All groups of this process that are in use."""


def release_destroyed_groups() -> None:
    """Let the threads of destroyed groups end."""
    groups[:] = [group for group in groups if group in dist.distributed_c10d._world.pg_map]


def install() -> None:
    """Register the backend for the device."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[device.NAME])
    dist.ProcessGroupNCCL = VirtualNccl  # type: ignore[attr-defined, misc]
    dist.all_to_all_single = _keeping_the_work(dist.all_to_all_single)


def _keeping_the_work(all_to_all_single: Callable[..., Any]) -> Callable[..., Any]:
    """Return the work itself: torch's holder of a Python work does not ask it whether it is completed."""

    def launch(
        output: Tensor,
        input: Tensor,  # noqa: A002  torch's name
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = output_split_sizes, input_split_sizes
        if async_op and isinstance(group, Group):
            return group.alltoall_base(output, input, *(list(of_rank or []) for of_rank in sizes))
        device.gpu.memory.host_use(input, "all_to_all", is_write=False)
        device.gpu.memory.host_use(output, "all_to_all", is_write=True)
        return all_to_all_single(output, input, *sizes, group=group, async_op=async_op)

    return launch


def _create(given: Any, options: Options | None) -> "Group":
    groups.append(Group(given, options or Options()))
    return groups[-1]


class Group(_c10d.ProcessGroup):
    """One communicator."""

    def __init__(self, given: Any, options: Options) -> None:
        super().__init__(given.group_rank, given.group_size)
        gloo = _c10d.ProcessGroupGloo._Options()
        gloo._devices = [_c10d.ProcessGroupGloo.create_default_device()]
        gloo._threads, gloo._timeout = 1, given.timeout
        self._name, self.timeout_seconds = given.group_id, given.timeout.total_seconds()
        self.options = options
        self._gloo = _c10d.ProcessGroupGloo(given.store, given.group_rank, given.group_size, gloo)
        self.stream = torch.Stream(device=device.NAME, priority=-1 if options.is_high_priority_stream else 0)

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> "Work":
        options = opts or _c10d.AllreduceOptions()
        return self._start("all_reduce", [], tensors, lambda into: self._gloo.allreduce(into, options))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> "Work":
        return self._start("broadcast", [], tensors, lambda into: self._gloo.broadcast(into, opts))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> "Work":
        options, (values,) = opts or _c10d.AllgatherOptions(), inputs
        sent = device.on_cpu(values) if device.is_ours(values) else values
        launch = lambda into: self._gloo.allgather([into], [sent], options)  # noqa: E731
        return self._start("all_gather", inputs, outputs[0], launch)

    def _allgather_base(self, output: Tensor, values: Tensor, opts: Any = None) -> "Work":
        options, sent = opts or _c10d.AllgatherOptions(), device.on_cpu(values) if device.is_ours(values) else values
        launch = lambda into: self._gloo._allgather_base(into[0], sent, options)  # noqa: E731
        return self._start("all_gather", [values], [output], launch)

    def alltoall_base(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int], opts: Any = None
    ) -> "Work":
        options, sent = opts or _c10d.AllToAllOptions(), device.on_cpu(rows) if device.is_ours(rows) else rows
        launch = lambda into: self._gloo.alltoall_base(into[0], sent, receive, send, options)  # noqa: E731
        return self._start("all_to_all", [rows], [output], launch)

    def barrier(self, opts: Any = None) -> "Work":
        work = self._gloo.barrier(opts or _c10d.BarrierOptions())
        work.wait()
        device.count_wait("barrier")
        return Work(work, [], self)

    def _start(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        launch: Callable[[list[Tensor]], Any],
    ) -> "Work":
        for tensor in (*reads, *writes):
            if not device.is_ours(tensor):
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type} (in {name})")
            if not tensor.is_contiguous():
                raise ValueError(f"Tensors must be contiguous (in {name})")
        self.stream.wait_stream(torch.accelerator.current_stream())
        device.launches[device.thread_name(), device.source_line(), name] += 1
        with self.stream:
            device.gpu.memory.kernel(name, list(reads), list(writes), [], of_group=True)
        work = launch([device.on_cpu(tensor) for tensor in writes])
        device.progress.add(self.stream.stream_id, work)
        for tensor in (*reads, *writes):
            device.add_transfer(tensor, work)
        return Work(work, list(writes), self)


class Work(dist._Work):
    """A transfer on the stream of its communicator."""

    def __init__(self, work: Any, tensors: list[Tensor], group: Group) -> None:
        super().__init__()
        self._work, self._tensors, self._group = work, tensors, group
        self._event = group.stream.record_event()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002  torch's signature
        torch.accelerator.current_stream().wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(
            devices=[torch.device(device.NAME, device.gpu.own_index)]
        )
        with self._group.stream:
            future.set_result(self._tensors)
        return future
