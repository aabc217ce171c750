"""Transfers by torch.distributed: gloo between CPUs, NCCL between GPUs. The baseline that is there everywhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.transport.base import POLL_SECONDS, Peers, PendingWork, TracerFactory

_How = dist.ReduceOp.RedOpType
_GLOO_SAYS = ("gloo", "Application timeout caused pair closure")
"""In its errors: where it was, or that another transfer gave up before."""
_SLACK, _SLACK_SECONDS = 1.5, 5e-3
"""What a transfer may take beyond the time that its bytes need, before it is taken to wait for a rank."""


class C10d:
    """Collectives of one process group. Operations are named, because errors name them."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, *, timeout: float = 600.0) -> None:
        self.peers = Peers(group.rank(), group.size(), store)
        self.timeout, self.group = timeout, group
        self.device = torch.device("cuda" if "nccl" in group.name() else "cpu")
        self._tracer_factory: TracerFactory | None = None
        self._under_way: dict[dist.Work, tuple[float, int]] = {}
        """Since when, and the bytes that a link carries for it."""

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Tell somebody of every transfer that begins."""
        self._tracer_factory = tracer

    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str, out: Tensor | None = None
    ) -> PendingWork[Tensor]:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receive likewise."""
        rows = rows.contiguous()
        out = rows.new_empty((sum(receive), *rows.shape[1:])) if out is None else out
        begin = partial(dist.all_to_all_single, out, rows, list(receive), list(send), group=self.group, async_op=True)
        # The rows must outlive the transfer, so the handle holds them.
        return self._start(begin, name, rows.nbytes, lambda _kept=rows: out)

    def all_gather(self, values: Tensor, *, name: str) -> PendingWork[Tensor]:
        """Gather equally shaped values of all ranks into [ranks, ...]."""
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(self.peers.world_size)]
        begin = partial(dist.all_gather, parts, values, group=self.group, async_op=True)
        return self._start(begin, name, values.nbytes, lambda _kept=values: torch.stack(parts))

    def all_reduce(self, values: Tensor, *, name: str, op: _How = dist.ReduceOp.SUM) -> PendingWork[Tensor]:
        """Add up values over all ranks, in place; or do with them what `how` says."""
        begin = partial(dist.all_reduce, values, op, group=self.group, async_op=True)
        return self._start(begin, name, values.nbytes, lambda: values)

    def sum(self, number: int, *, name: str) -> int:
        """Add up one number over all ranks. All must come here, so it is also a place to meet."""
        return int(self.all_reduce(torch.tensor([number], device=self.device), name=name).wait()[0])

    def max(self, number: int, *, name: str) -> int:
        """The largest of one number of each rank."""
        values = torch.tensor([number], device=self.device)
        return int(self.all_reduce(values, name=name, op=dist.ReduceOp.MAX).wait()[0])

    def all_reduce_gradients(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum the gradients of a bucket over all ranks, as a communication hook of DDP does."""
        work = dist.all_reduce(bucket.buffer(), group=self.group, async_op=True)
        on_complete = self._note(work, 2 * bucket.buffer().nbytes)
        return work.get_future().then(lambda done: on_complete(done.value()[0]))

    def busy(self, rate: float = 0.0) -> bool:
        """Whether a transfer that began here may be moving: see `Transport`."""
        begun = [begun for work, begun in list(self._under_way.items()) if not work.is_completed()]
        if not begun or not rate:
            return bool(begun)
        # They go one behind another, so all of them together are given the time that all of their bytes need.
        since, sizes = zip(*begun, strict=True)
        return time.monotonic() - min(since) < _SLACK_SECONDS + _SLACK * sum(sizes) / rate

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Guard waits that torch does by itself, such as DDP's: if one fails because of a rank, that rank is named."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(words in str(error) for words in _GLOO_SAYS):
                raise self.peers.failure(name, error) from error
            raise

    def _start(
        self, begin: Callable[[], dist.Work | None], name: str, size: int, finish: Callable[[], Tensor]
    ) -> PendingWork[Tensor]:
        tracer = self._tracer_factory(name, size) if self._tracer_factory is not None else None
        with self.peers.during(name):
            work = begin()
        assert work is not None  # this rank is in the group
        on_complete = self._note(work, size)
        return PendingWork(name, self, tracer, partial(self._wait, work), lambda: on_complete(finish()))

    def _note(self, work: dist.Work, size: int) -> Callable[[Tensor], Tensor]:
        """A transfer is under way until its result is passed through what this gives."""
        self._under_way[work] = time.monotonic(), size

        def on_complete(result: Tensor) -> Tensor:
            self._under_way.pop(work, None)
            return result

        return on_complete

    def _wait(self, work: dist.Work, seconds: float) -> None:
        """For a transfer of a group that may lose a rank."""
        if self.device.type != "cpu":
            work.wait()  # a stream does, no host; NCCL's own watchdog ends what takes too long
            return
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > POLL_SECONDS:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=POLL_SECONDS))
            if work.is_completed():
                break
            self.peers.raise_if_peer_failed()
        work.wait(timedelta(seconds=max(0.0, left)))  # raises what went wrong, if anything did
