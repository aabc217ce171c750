"""The c10d transport: torch.distributed collectives, by gloo between CPUs and NCCL between GPUs. Always available."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.transport.base import POLL_SECONDS, Peers, PendingWork, TracerFactory

_ReduceOp = dist.ReduceOp.RedOpType
_GLOO_ERRORS = ("gloo", "Application timeout caused pair closure")
"""Texts in errors of gloo: its source path, or that an earlier transfer timed out."""
_SLACK, _SLACK_SECONDS = 1.5, 5e-3
"""Time beyond what its bytes need after which a transfer counts as waiting for a late rank."""


class TransferWork(Protocol):
    """What is used of a `dist.Work`."""

    def is_completed(self) -> bool:
        """Return whether the transfer has ended."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Wait for the transfer, at most so long."""


class C10d:
    """Collectives of one process group. Each operation has a name, which errors quote."""

    is_pairwise = False
    """Whether only pairs of ranks with rows send messages."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, *, timeout: float = 600.0) -> None:
        self.peers = Peers(group.rank(), group.size(), store)
        self.timeout, self.group = timeout, group
        self.device = device_of(group)
        self._tracer_factory: TracerFactory | None = None
        self._in_flight: dict[TransferWork, tuple[float, int]] = {}
        """Start time and bytes on the link, by transfer."""

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Trace every transfer from now on; it replaces an earlier tracer."""
        self._tracer_factory = tracer

    def all_to_all(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        *,
        name: str,
        most: int | None = None,  # noqa: ARG002  a transfer is not cut
        out: Tensor | None = None,
    ) -> PendingWork[Tensor]:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receive likewise."""
        rows = rows.contiguous()
        out = rows.new_empty((sum(receive), *rows.shape[1:])) if out is None else out
        launch = partial(dist.all_to_all_single, out, rows, list(receive), list(send), group=self.group, async_op=True)
        # The rows must outlive the transfer, so the work references them.
        return self._start(launch, name, rows.nbytes, lambda _kept=rows: out)

    def all_gather(self, values: Tensor, *, name: str) -> PendingWork[Tensor]:
        """Gather equally shaped values of all ranks into [ranks, ...]."""
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(self.peers.world_size)]
        launch = partial(dist.all_gather, parts, values, group=self.group, async_op=True)
        return self._start(launch, name, values.nbytes, lambda _kept=values: torch.stack(parts))

    def all_reduce(self, values: Tensor, *, name: str, op: _ReduceOp = dist.ReduceOp.SUM) -> PendingWork[Tensor]:
        """Reduce values over all ranks, in place."""
        launch = partial(dist.all_reduce, values, op, group=self.group, async_op=True)
        return self._start(launch, name, values.nbytes, lambda: values)

    def reduce_values(self, values: Tensor, *, name: str, op: _ReduceOp = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a few values of the host, or of any device, over all ranks, and return them on the host."""
        return self.all_reduce(values.to(self.device), name=name, op=op).wait_on_host().cpu()

    def sum(self, number: int, *, name: str) -> int:
        """Return the sum of one integer over all ranks. Also serves as a barrier."""
        return int(self.reduce_values(torch.tensor(number), name=name))

    def max(self, number: int, *, name: str) -> int:
        """Return the maximum of one integer over all ranks."""
        return int(self.reduce_values(torch.tensor(number), name=name, op=dist.ReduceOp.MAX))

    def all_reduce_gradients(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum the gradients of a bucket over all ranks. A DDP communication hook."""
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        finish = self._track(work, 2 * bucket.buffer().nbytes)
        return work.get_future().then(lambda done: finish(done.value()[0]))

    def busy(self, rate: float = 0.0) -> bool:
        """Return whether a transfer of this rank may be moving bytes: see `Transport`."""
        self._drop_completed()
        transfers = list(self._in_flight.values())
        if not transfers or not rate:
            return bool(transfers)
        # They share the link, so together they get the time that all their bytes need.
        since, sizes = zip(*transfers, strict=True)
        return time.monotonic() - min(since) < _SLACK_SECONDS + _SLACK * sum(sizes) / rate

    def synchronize(self, name: str) -> None:
        """Wait on the host until every transfer of a device has completed, at most for the timeout."""
        if self.device.type != "cpu":
            with self.peers.guard(name):
                self.peers.wait_until(lambda: not self.busy(), self.timeout)

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Guard waits inside torch, such as DDP's: a communication error names the unresponsive ranks."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(text in str(error) for text in _GLOO_ERRORS):
                raise self.peers.transport_error(name, error) from error
            raise

    def _start(
        self, launch: Callable[[], TransferWork | None], name: str, size: int, result: Callable[[], Tensor]
    ) -> PendingWork[Tensor]:
        tracer = self._tracer_factory(name, size) if self._tracer_factory is not None else None
        with self.peers.guard(name):
            work = launch()
        assert work is not None  # this rank is in the group
        finish = self._track(work, size)
        return PendingWork(name, self, tracer, partial(self._wait, work), lambda: finish(result()), work.is_completed)

    def _track(self, work: TransferWork, size: int) -> Callable[[Tensor], Tensor]:
        """Count a transfer as in flight until it completes, at the latest on a CPU when its result is used."""
        self._drop_completed()
        self._in_flight[work] = time.monotonic(), size

        def finish(result: Tensor) -> Tensor:
            if self.device.type == "cpu":  # on a device only the stream has waited
                self._in_flight.pop(work, None)
            return result

        return finish

    def _drop_completed(self) -> None:
        for work in [work for work in list(self._in_flight) if work.is_completed()]:
            self._in_flight.pop(work, None)

    def _wait(self, work: TransferWork, seconds: float) -> None:
        """Wait for a transfer, checking for failed peers meanwhile."""
        if self.device.type != "cpu":
            work.wait()  # the stream waits, not the host
            return
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > POLL_SECONDS:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=POLL_SECONDS))
            if work.is_completed():
                break
            self.peers.raise_if_peer_failed()
        work.wait(timedelta(seconds=max(0.0, remaining)))  # raises the error, if any


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where the tensors of a group must be: on this rank's accelerator, unless gloo moves them."""
    accelerator = torch.accelerator.current_accelerator()
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if accelerator is None or backends.get(accelerator.type, "gloo") == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
