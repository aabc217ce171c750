"""Chunked transfers: one chunk is copied out while another is sent and a third is copied in; urgent traffic goes first.

Chunks serve two purposes. Rows on a GPU can take the paper's path: by copy engine to pinned host memory, over the CPU
network, and back, without using SMs. And deferred transfers can yield to urgent ones. A separate group keeps them from
blocking the urgent queue, but both share the link, so a rank starts no chunk while an urgent transfer is moving there.
This cannot deadlock ranks that run the same schedule: a rank that still needs a deferred transfer has started every
urgent one before it, and so has every other rank that needs it. A rank whose urgent transfer waits for a late rank
stops holding chunks back once the transfer takes longer than its bytes need. The late rank holds its own back when it
arrives, so urgent rows get the link when they can move.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freescale.transport.base import CompletedWork, TracerFactory, Transport, Work
from freescale.transport.c10d import C10d
from freescale.transport.host_staged import Copier, CopyEvent, Staging

CHUNK_BYTES = {"cpu": 1 << 19, "gpu": 8 << 20}
"""For transfers that yield: two chunks take a few milliseconds on a slow link, and well below one on a fast one."""
LARGE_CHUNK_BYTES = {"cpu": 4 << 20, "gpu": 16 << 20}
"""For transfers that do not yield."""
_POLL_SECONDS = 2e-4
_IN_FLIGHT = 2
_RATE_SAMPLES, _RATE_SAMPLE_BYTES = 32, 1 << 16
"""Chunks whose rates are kept; smaller ones say nothing about the link."""
_MAX_CHUNKS = 128
"""Chunks per pair of ranks: very uneven transfers have larger ones."""


class ChunkedTransport(Transport):
    """Transfers of a group, chunk by chunk. A transfer is complete when the call that starts it returns."""

    def __init__(
        self,
        transport: C10d,
        *,
        urgent: Transport | None = None,
        copier: Copier | None = None,
        pairs: int | None = None,
    ) -> None:
        """`pairs`: ranks that a rank sends to at once; all by default. A chunk is divided among them."""
        self.peers, self.timeout = transport.peers, transport.timeout
        self._pairs = pairs or self.peers.world_size
        self._transport, self._urgent = transport, urgent
        self._staging = Staging(copier or Copier(transport.device))
        self._rates: deque[float] = deque(maxlen=_RATE_SAMPLES)

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Trace every chunk from now on."""
        self._transport.add_tracer(tracer)

    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str, most: int | None = None
    ) -> CompletedWork[Tensor]:
        """Exchange rows, chunk after chunk."""
        if self._transport.is_pairwise:  # no message depends on other pairs, so ranks may have more chunks than others
            most = max(*send, *receive)
            if not most:
                return CompletedWork(rows.new_empty((0, *rows.shape[1:])))
        if (
            most is not None
            and rows.device == self._staging.copier.buffer_device
            and self._most_chunks(rows, most) == 1
        ):
            return self._send_whole(rows, send, receive, name)
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        outgoing, incoming = self._cut(rows, send), self._cut(out, receive)
        own_count = max(len(outgoing), len(incoming)) if most is None else self._most_chunks(rows, most)
        peer_counts = None
        if most is None:
            # The first chunk carries the number of chunks. A rank with fewer takes part in the rest with empty ones.
            counts, peer_counts = (torch.full((self.peers.world_size,), own_count, device=rows.device) for _ in (0, 1))
            outgoing[0], incoming[0] = outgoing[0].with_counts(counts), incoming[0].with_counts(peer_counts)
        empty = _TransferChunk([[] for _ in range(self.peers.world_size)])
        self._staging.copier.begin()
        outgoing, incoming = ([*chunks, *[empty] * (own_count - len(chunks))] for chunks in (outgoing, incoming))
        self._exchange(outgoing, incoming, name)
        self._staging.copier.wait_for_copies()
        if peer_counts is not None:
            more = int(peer_counts.max()) - own_count  # on a GPU the host waits for the copies
            self._exchange([empty] * more, [empty] * more, name)
        return CompletedWork(out)

    def _send_whole(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], name: str
    ) -> CompletedWork[Tensor]:
        """Exchange rows of at most one chunk, without a copy."""
        self._yield_to_urgent()
        began, rows = time.monotonic(), rows.contiguous()
        received = self._transport.all_to_all(rows, send, receive, name=name).wait_on_host()
        to_others = sum(send) - send[self.peers.rank]
        self._add_rate(rows.nbytes * to_others // max(1, len(rows)), time.monotonic() - began)
        return CompletedWork(received)

    def all_reduce(self, values: Tensor, *, name: str) -> CompletedWork[Tensor]:
        """Sum a few values over all ranks, in place. The host waits until they have arrived."""
        self._yield_to_urgent()
        reduced = self._transport.all_reduce(values.to(self._transport.device), name=name).wait_on_host()
        return CompletedWork(values.copy_(reduced))

    def busy(self, rate: float = 0.0) -> bool:
        """Return whether a chunk may be moving."""
        return self._transport.busy(rate)

    def _cut(self, rows: Tensor, counts: Sequence[int]) -> list["_TransferChunk"]:
        """Cut the rows of every rank into chunks; each chunk holds some bytes of every rank."""
        size = self._chunk_bytes(rows)
        parts = [as_bytes(part) for part in rows.contiguous().split(list(counts))]
        # Both ranks of a pair compute the same cuts, independent of other pairs.
        cuts = [part.split(max(1, size, -(-len(part) // _MAX_CHUNKS))) for part in parts]
        number = max(map(len, cuts))
        return [_TransferChunk([list(cut[k : k + 1]) for cut in cuts]) for k in range(number)]

    def _chunk_bytes(self, rows: Tensor) -> int:
        """Return the bytes of a chunk for each pair of ranks."""
        place = "cpu" if rows.device.type == "cpu" else "gpu"
        return (LARGE_CHUNK_BYTES if self._urgent is None else CHUNK_BYTES)[place] // self._pairs

    def _most_chunks(self, rows: Tensor, most: int) -> int:
        """Return a number of chunks that suffices for any pair of ranks, if none sends more than so many rows."""
        size = most * rows.shape[1:].numel() * rows.element_size()
        return min(_MAX_CHUNKS, max(1, -(-size // max(1, self._chunk_bytes(rows)))))

    def _exchange(self, outgoing: Sequence["_TransferChunk"], incoming: Sequence["_TransferChunk"], name: str) -> None:
        """Send chunks. While one is sent, the next is copied out and the previous one copied in."""
        in_flight: deque[tuple[Work[Tensor], _TransferChunk, _TransferChunk, float]] = deque()
        staged = deque(self._staging.stage(chunk.flat) for chunk in outgoing[:1])
        for number, (sent, received) in enumerate(zip(outgoing, incoming, strict=True), start=1):
            work = self._send(staged.popleft(), sent, received, name)
            in_flight.append((work, sent, received, time.monotonic()))
            staged += [self._staging.stage(chunk.flat) for chunk in outgoing[number : number + 1]]
            while len(in_flight) >= (_IN_FLIGHT if staged else 1):
                work, sent, received, began = in_flight.popleft()
                self._staging.unstage(work.wait_on_host(), received.flat)
                sharing = 1 + (len(in_flight) > 0)
                self._add_rate(sharing * (sum(sent.sizes) - sent.sizes[self.peers.rank]), time.monotonic() - began)

    def _send(
        self, staged: tuple[Tensor, CopyEvent], sent: "_TransferChunk", received: "_TransferChunk", name: str
    ) -> Work[Tensor]:
        """Send a chunk, once it is copied out and no urgent transfer is moving."""
        rows, copied = staged
        copied.synchronize()
        self._yield_to_urgent()
        out = self._staging.receive_buffer(received.flat)
        return self._transport.all_to_all(rows, sent.sizes, received.sizes, name=name, out=out)

    def _add_rate(self, sent: int, seconds: float) -> None:
        """Sample the rate of the link, where the host waits for transfers."""
        if self._transport.device.type == "cpu" and sent >= _RATE_SAMPLE_BYTES:
            self._rates.append(sent / seconds)

    def _yield_to_urgent(self) -> None:
        """Wait until no urgent transfer is moving, or until the timeout: its own waiter reports a stuck transfer."""
        until, rate = time.monotonic() + self.timeout, max(self._rates, default=0.0)
        while self._urgent is not None and self._urgent.busy(rate) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)


class _TransferChunk(NamedTuple):
    """Some bytes of every rank, in parts."""

    by_rank: list[list[Tensor]]

    def with_counts(self, counts: Tensor) -> "_TransferChunk":
        """Prepend a count to the bytes of each rank."""
        return _TransferChunk([[as_bytes(n), *parts] for n, parts in zip(counts.split(1), self.by_rank, strict=True)])

    @property
    def flat(self) -> list[Tensor]:
        """All parts, rank by rank."""
        return [part for parts in self.by_rank for part in parts]

    @property
    def sizes(self) -> list[int]:
        """Bytes by rank."""
        return [sum(map(len, parts)) for parts in self.by_rank]


def as_bytes(part: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes."""
    return part.view(-1).view(torch.uint8) if part.numel() else part.new_empty(0, dtype=torch.uint8)
