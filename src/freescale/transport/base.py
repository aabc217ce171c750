"""The interface of all transports, and the error that names unresponsive ranks when a transfer fails.

Waits of the host have a timeout. GPU streams wait without one, so the host waits for completion before it reads what a
transfer wrote.
Finding unresponsive ranks costs nothing until a wait fails: the rank then sets its key in the store, and the first
one writes what failed. Ranks that still wait poll the store, fail as well and set theirs. After a grace period, the
first rank that failed looks up which ranks have no key and writes that into the store, so that the others ask for a
few keys instead of those of all ranks.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from freescale.errors import TransportError, reason

T = TypeVar("T")
Out = TypeVar("Out", covariant=True)
_GRACE_SECONDS = 2.5
POLL_SECONDS = 1.0
"""How often a waiting rank checks whether another has failed; less than the grace period."""
_STORE_SECONDS = 5.0
DEVICE_SLACK_SECONDS = 60.0
"""How much longer a device waits than the host. Its own timeouts end the process and name no rank."""
_DEVICE_POLL_SECONDS = 5e-5
_FAILED = "freescale/failed"
_ASKED, _MISSING = f"{_FAILED}/asked", f"{_FAILED}/missing"
_ASK_SECONDS, _ANSWER_SECONDS = 0.05, 3.0


@dataclass(frozen=True)
class Peers:
    """The ranks of a transport, and the store that they report failures to."""

    rank: int
    world_size: int
    store: dist.Store

    def raise_if_peer_failed(self) -> None:
        """Raise if a wait of another rank failed, with what failed first."""
        first = call_with_timeout(lambda: self.store.get(_FAILED) if self.store.check([_FAILED]) else b"", POLL_SECONDS)
        if first:
            raise RuntimeError(f"given up because of {first.decode()}")

    def wait_until(self, is_completed: Callable[[], bool], seconds: float) -> None:
        """Poll a transfer of a device until it has completed; raise after so many seconds or if a peer failed."""
        began = polled = time.monotonic()
        while not is_completed():
            now = time.monotonic()
            if now - began > seconds:
                raise RuntimeError(f"not completed after {seconds:.0f} s")
            if now - polled > POLL_SECONDS:
                self.raise_if_peer_failed()
                polled = now
            time.sleep(_DEVICE_POLL_SECONDS)

    def unresponsive_ranks(self, failure: str) -> list[int]:
        """Report a failure of this rank and return the ranks that report none within the grace period."""
        if not self.store.check([_FAILED]):
            self.store.set(_FAILED, f"rank {self.rank}: {failure}")
        self.store.set(_keys([self.rank])[0], "1")
        until, ranks = time.monotonic() + _GRACE_SECONDS, list(range(self.world_size))
        if self.store.add(_ASKED, 1) == 1:
            self._wait_for_reports(ranks, until)
            missing = self._missing(ranks)
            self.store.set(_MISSING, json.dumps(missing))
            return missing
        while time.monotonic() < until + _ANSWER_SECONDS and not self.store.check([_MISSING]):
            time.sleep(_ASK_SECONDS)
        if self.store.check([_MISSING]):  # else the rank that asked is lost too
            ranks = json.loads(self.store.get(_MISSING))
        self._wait_for_reports(ranks, until)
        return self._missing(ranks)

    def _wait_for_reports(self, ranks: Sequence[int], until: float) -> None:
        while time.monotonic() < until and not self.store.check(_keys(ranks)):
            time.sleep(_ASK_SECONDS)

    def _missing(self, ranks: list[int]) -> list[int]:
        """Return which of some ranks have reported no failure, by halves: a check answers for all its keys."""
        if not ranks or self.store.check(_keys(ranks)):
            return []
        half = len(ranks) // 2
        return ranks if not half else self._missing(ranks[:half]) + self._missing(ranks[half:])

    @contextmanager
    def guard(self, operation: str) -> Iterator[None]:
        """Convert errors inside to a TransportError that names unresponsive ranks."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise self.transport_error(operation, error) from error

    def transport_error(self, operation: str, error: Exception) -> TransportError:
        """Build the error of an operation that failed on this rank, with the ranks that do not respond."""
        try:
            ask = partial(self.unresponsive_ranks, f"{operation}, {reason(error)}")
            ranks = call_with_timeout(ask, _GRACE_SECONDS + _STORE_SECONDS)
            if ranks is None:
                raise RuntimeError("the store does not answer")
            cause = f"ranks that do not answer: {', '.join(map(str, ranks))}" if ranks else "every rank answers"
        except RuntimeError:
            cause = "the store does not answer, so its host is probably gone"
        what = f"{operation} failed on rank {self.rank} of {self.world_size}: {cause}"
        remedy = "look at the logs of those ranks; the run can be resumed from its newest checkpoint"
        return TransportError(what, where=reason(error), remedy=remedy)


def _keys(ranks: Sequence[int]) -> list[str]:
    return [f"{_FAILED}/{rank}" for rank in ranks]


def call_with_timeout(function: Callable[[], T], seconds: float) -> T | None:
    """Return the result of a store call, or None on timeout. Over a cut link, a call to the store never returns."""
    results: list[T | Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    result = results[0] if results else None
    if isinstance(result, Exception):
        raise result
    return result


class TransferTracer(Protocol):
    """Observes one transfer. It is created when the transfer begins."""

    def on_wait(self) -> None:
        """The rank blocks on the transfer from now on."""

    def on_complete(self) -> None:
        """The transfer is complete."""


TracerFactory = Callable[[str, int], TransferTracer]
"""Called when a transfer begins, with its name and the bytes that this rank sends."""


class Work(Protocol[Out]):
    """The pending result of a transfer, like `torch.distributed.Work`."""

    def wait(self) -> Out:
        """Wait for the transfer and return its result. On a GPU only the current stream waits."""

    def wait_on_host(self) -> Out:
        """Wait on the host until the transfer has completed, at most for the timeout. For values that it reads."""


class Transport(Protocol):
    """Moves rows between ranks."""

    peers: Peers
    timeout: float

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Trace every transfer from now on; it replaces an earlier tracer."""

    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str, most: int | None = None
    ) -> Work[Tensor]:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receive likewise.

        `most`: no rank sends more rows to another one, the same number on all ranks. A transport that cuts transfers
        into chunks then knows their number without asking the other ranks, for which the host would have to wait.
        """

    def all_gather(self, values: Tensor, *, name: str) -> Work[Tensor]:
        """Gather equally shaped values of all ranks into [ranks, ...]."""
        once = [1] * self.peers.world_size
        return self.all_to_all(values.expand(self.peers.world_size, *values.shape), once, once, name=name)

    def all_reduce(self, values: Tensor, *, name: str) -> Work[Tensor]:
        """Sum values over all ranks, in place."""

    def busy(self, rate: float = 0.0) -> bool:
        """Return whether a transfer of this rank may be moving bytes.

        `rate`: measured bytes per second of the link, if any. A transfer that takes longer than its bytes need waits
        for a late rank. Until that rank arrives, holding other transfers back gains nothing.
        """


@dataclass(frozen=True)
class CompletedWork(Generic[T]):
    """The result of a transfer that has completed."""

    value: T

    def wait(self) -> T:
        """Return the result."""
        return self.value

    wait_on_host = wait


@dataclass(frozen=True)
class PendingWork(Generic[T]):
    """A transfer in flight. `wait` returns its result, or raises after the transport's timeout."""

    operation: str
    transport: Transport
    tracer: TransferTracer | None
    block: Callable[[float], None]
    """Blocks until the transfer completes; raises RuntimeError on failure or after so many seconds."""
    result: Callable[[], T]
    is_completed: Callable[[], bool] = lambda: True
    """Whether the bytes have arrived, asked after `block` has returned."""

    def wait_on_host(self) -> T:
        """Wait until the transfer has completed; a device has no timeout of its own that names ranks."""
        result = self.wait()
        with self.transport.peers.guard(self.operation):
            self.transport.peers.wait_until(self.is_completed, self.transport.timeout)
        return result

    def wait(self) -> T:
        """Wait for the transfer and return its result."""
        if self.tracer is not None:
            self.tracer.on_wait()
        with self.transport.peers.guard(self.operation):
            self.block(self.transport.timeout)
        if self.tracer is not None:
            self.tracer.on_complete()
        return self.result()
