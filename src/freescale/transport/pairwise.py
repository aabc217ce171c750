"""Transfers of a gloo group in which only pairs of ranks that exchange rows send messages.

gloo's all-to-all sends a message to every rank of the group, also without rows. Here each pair with rows has one.
"""

import queue
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from freescale.connections import connects_on_demand
from freescale.transport.base import PendingWork
from freescale.transport.c10d import C10d
from freescale.transport.world import exit_on_hang


class PairwiseC10d(C10d):
    """The transport of a gloo group, with an all-to-all of single messages."""

    is_pairwise = True

    def __init__(self, transport: C10d) -> None:
        super().__init__(transport.group, transport.peers.store, timeout=transport.timeout)
        self._in_flight, self._waiter = transport._in_flight, _Waiter()
        self._connected: set[int] = set()

    def connect(self, ranks: Sequence[int]) -> None:
        """Connect to some ranks, which connect to this one, before they send.

        A first message of gloo blocks until its receiver takes part, beyond all timeouts, so a hang ends the process.
        """
        missing = sorted(set(ranks) - self._connected - {self.peers.rank})
        if not missing or not connects_on_demand(self.peers.world_size):
            return
        with exit_on_hang(self.peers, "connecting pairs of ranks", self.timeout):
            works = [dist.irecv(torch.empty(1), group=self.group, group_src=rank) for rank in missing]
            works += [dist.isend(torch.zeros(1), group=self.group, group_dst=rank) for rank in missing]
            for work in works:
                assert work is not None
                work.wait()
        self._connected.update(missing)

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
        own = self.peers.rank
        outgoing, incoming = _parts(rows, send), _parts(out, receive)
        if own in incoming:
            incoming.pop(own).copy_(outgoing.pop(own))

        def launch() -> JointWork:
            works = [dist.irecv(part, group=self.group, group_src=rank) for rank, part in incoming.items()]
            works += [dist.isend(part, group=self.group, group_dst=rank) for rank, part in outgoing.items()]
            return JointWork([work for work in works if work is not None], self._waiter)

        sent = sum(part.nbytes for part in outgoing.values())
        return self._start(launch, name, sent, lambda _kept=rows: out)


def _parts(rows: Tensor, counts: Sequence[int]) -> dict[int, Tensor]:
    """Return the rows of each rank that has any."""
    ranks = [rank for rank, count in enumerate(counts) if count]
    return dict(zip(ranks, rows.split([counts[rank] for rank in ranks]), strict=True)) if ranks else {}


class JointWork:
    """Several messages as one transfer, like `dist.Work`.

    A wait of gloo for a message that ends early closes all connections, so a thread waits, and the caller for it.
    """

    def __init__(self, works: Sequence[dist.Work], waiter: "_Waiter") -> None:
        self._works, self._ended = works, threading.Event()
        self._error: Exception | None = None
        if works:
            waiter.submit(self)
        else:
            self._ended.set()

    def is_completed(self) -> bool:
        """Return whether all messages are sent and received, or have failed."""
        return self._ended.is_set()

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """Wait for all messages; raise if they fail or take longer."""
        if not self._ended.wait(min(timeout.total_seconds(), threading.TIMEOUT_MAX)):
            raise RuntimeError(f"not completed after {timeout.total_seconds():.0f} s")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return True

    def finish(self) -> None:
        """Wait for the messages on the thread of the waiter."""
        try:
            for work in self._works:
                work.wait()
        except Exception as error:  # raised again where the transfer is waited for
            self._error = error
        self._works = ()
        self._ended.set()


class _Waiter:
    """A daemon thread that waits for transfers in the order in which they began. It ends with this object."""

    def __init__(self) -> None:
        self._begun: queue.SimpleQueue[JointWork | None] = queue.SimpleQueue()
        threading.Thread(target=_finish_all, args=(self._begun,), name="freescale-pairwise", daemon=True).start()
        weakref.finalize(self, self._begun.put, None)

    def submit(self, work: JointWork) -> None:
        self._begun.put(work)


def _finish_all(begun: "queue.SimpleQueue[JointWork | None]") -> None:
    while (work := begun.get()) is not None:
        work.finish()
        del work
