"""A transfer under way, and what is said when it does not arrive.

Nothing in FreeScale waits without a timeout. A wait that fails says which operation, on which rank, and which peers
did not answer when asked. Asking costs nothing until something has failed: every rank whose wait failed signs a list in
the store; who still waits looks there now and then, gives up too and signs; and after a moment of grace whoever has not
signed is named.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from freescale.errors import TransportError, reason

T = TypeVar("T")
Out = TypeVar("Out", covariant=True)
_GRACE_SECONDS = 2.5
POLL_SECONDS = 1.0
"""How long a rank waits before it looks whether another has given up; less than the grace."""
_STORE_SECONDS = 5.0
_FAILED = "freescale/failed"


@dataclass(frozen=True)
class Peers:
    """Who takes part in a transfer, and how to ask who is still there."""

    rank: int
    world_size: int
    store: dist.Store

    def raise_if_peer_failed(self) -> None:
        """Fail if the wait of another rank has failed."""
        if _answered(lambda: self.store.check([_FAILED]), POLL_SECONDS):
            raise RuntimeError("another rank has given up")

    def unresponsive_ranks(self) -> list[int]:
        """Sign the list of those whose wait failed, give the others a moment, and name who did not sign."""
        keys = [f"{_FAILED}/{rank}" for rank in range(self.world_size)]
        for key in (_FAILED, keys[self.rank]):
            self.store.set(key, "1")
        until = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < until and not self.store.check(keys):
            time.sleep(0.05)
        return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """Whatever fails inside is said with the ranks that do not answer."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise self.failure(operation, error) from error

    def failure(self, operation: str, error: Exception) -> TransportError:
        """Say what failed on this rank, and who is not there any more."""
        try:
            silent = _answered(self.unresponsive_ranks, _GRACE_SECONDS + _STORE_SECONDS)
            if silent is None:
                raise RuntimeError("the store does not answer")
            who = f"ranks that do not answer: {', '.join(map(str, silent))}" if silent else "every rank answers"
        except RuntimeError:
            who = "the store does not answer, so its host is probably gone"
        what = f"{operation} failed on rank {self.rank} of {self.world_size}: {who}"
        remedy = "look at the logs of those ranks; the run can be resumed from its newest checkpoint"
        return TransportError(what, where=reason(error), remedy=remedy)


def _answered(ask: Callable[[], T], seconds: float) -> T | None:
    """What the store answers; None if it does not in time. Behind a link that was cut, a call to it never returns."""
    answers: list[T | Exception] = []

    def listen() -> None:
        try:
            answers.append(ask())
        except RuntimeError as error:
            answers.append(error)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(seconds)
    answer = answers[0] if answers else None
    if isinstance(answer, Exception):
        raise answer
    return answer


class TransferTracer(Protocol):
    """A transfer as somebody who measures sees it; it began when this was made."""

    def on_wait(self) -> None:
        """From here on this rank can do nothing but wait for it."""

    def on_complete(self) -> None:
        """It is done."""


TracerFactory = Callable[[str, int], TransferTracer]
"""Is told of every transfer that begins: its name, and the bytes that this rank gives to it."""


class Work(Protocol[Out]):
    """What a transfer will give."""

    def wait(self) -> Out:
        """Give it once it is there."""


class Transport(Protocol):
    """What moves rows between ranks, whichever way."""

    peers: Peers
    timeout: float

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Tell somebody of every transfer that begins."""

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str) -> Work[Tensor]:
        """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receive likewise."""

    def all_gather(self, values: Tensor, *, name: str) -> Work[Tensor]:
        """Gather equally shaped values of all ranks into [ranks, ...]."""
        once = [1] * self.peers.world_size
        return self.all_to_all(values.expand(self.peers.world_size, *values.shape), once, once, name=name)

    def all_reduce(self, values: Tensor, *, name: str) -> Work[Tensor]:
        """Add up values over all ranks, in place."""

    def busy(self, rate: float = 0.0) -> bool:
        """Whether a transfer that began here may be moving.

        `rate`: bytes per second that the wire has shown, if it has. What has not ended in the time that its bytes need
        waits for a rank that is late; until that comes, nothing is gained by holding others back.
        """


@dataclass(frozen=True)
class CompletedWork(Generic[T]):
    """The result of a transfer that has ended."""

    value: T

    def wait(self) -> T:
        """Give it."""
        return self.value


@dataclass(frozen=True)
class PendingWork(Generic[T]):
    """What a transfer will give. `wait` returns it, or fails by the timeout of what moves it."""

    operation: str
    transport: Transport
    tracer: TransferTracer | None
    ends: Callable[[float], None]
    """Returns when the transfer is done; raises RuntimeError if it fails or takes more than so many seconds."""
    finish: Callable[[], T]

    def wait(self) -> T:
        """Wait for the transfer to end and give its result."""
        if self.tracer is not None:
            self.tracer.on_wait()
        with self.transport.peers.during(self.operation):
            self.ends(self.transport.timeout)
        if self.tracer is not None:
            self.tracer.on_complete()
        return self.finish()
