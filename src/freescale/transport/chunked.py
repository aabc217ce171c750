"""Transfers in pieces: one is copied out while another travels and a third is copied in, and what is urgent goes first.

Pieces serve two ends. Bytes of a GPU can take the way of the paper: by copy engine into pinned memory of the host, by
the network of the CPUs, and back, which costs the GPU's cores nothing. And what is deferred can give way: a group of
its own keeps it from standing in front of what is urgent, but both share the wire, so no piece begins on a rank while
something urgent is moving there. Ranks that run the same schedule cannot block each other by this: whoever still
needs a deferred transfer has begun every urgent one that came before it, and so has everybody else who needs it. A rank
that has waited for a late one for longer than its bytes take holds nothing back any more; but that late one does, once
it has come, so what is urgent has the wire when it can move.
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

CHUNK_BYTES = {"cpu": 1 << 19, "cuda": 8 << 20}
"""Of what gives way: two of them are a few milliseconds of a slow link, and well below one of a fast one."""
LARGE_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 16 << 20}
"""Of what does not have to."""
_LOOK_AGAIN_SECONDS = 2e-4
_IN_FLIGHT = 2
_REMEMBERED, _TELLING_BYTES = 32, 1 << 16
"""Pieces whose rates are known; smaller ones tell nothing about the wire."""
_MOST = 128
"""Pieces of what one rank has for another: very uneven transfers have larger ones."""


class ChunkedTransport(Transport):
    """Transfers of a group, piece by piece. One has ended when the call that begins it returns."""

    def __init__(self, transport: C10d, *, urgent: Transport | None = None, copier: Copier | None = None) -> None:
        self.peers, self.timeout = transport.peers, transport.timeout
        self._transport, self._urgent = transport, urgent
        self._staging = Staging(copier or Copier())
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)

    def add_tracer(self, tracer: TracerFactory | None) -> None:
        """Tell somebody of every piece."""
        self._transport.add_tracer(tracer)

    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str
    ) -> CompletedWork[Tensor]:
        """Exchange rows, a piece behind another."""
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        going, coming = self._cut(rows, send), self._cut(out, receive)
        own = max(len(going), len(coming))
        # With its first piece a rank tells all others how many it has; whoever has fewer takes part in the rest.
        told, heard = (torch.full((self.peers.world_size,), own, device=rows.device) for _ in range(2))
        going[0], coming[0] = going[0].telling(told), coming[0].telling(heard)
        nothing = _Chunk([[] for _ in range(self.peers.world_size)])
        self._staging.copier.begin()
        going, coming = ([*some, *[nothing] * (own - len(some))] for some in (going, coming))
        self._exchange(going, coming, name)
        self._staging.copier.wait_for_copies()
        more = int(heard.max()) - own
        self._exchange([nothing] * more, [nothing] * more, name)
        return CompletedWork(out)

    def all_reduce(self, values: Tensor, *, name: str) -> CompletedWork[Tensor]:
        """Add up a few values over all ranks, in place."""
        self._yield_to_urgent()
        return CompletedWork(self._transport.all_reduce(values, name=name).wait())

    def busy(self, rate: float = 0.0) -> bool:
        """Whether any piece may be moving."""
        return self._transport.busy(rate)

    def _cut(self, rows: Tensor, counts: Sequence[int]) -> list["_Chunk"]:
        """What goes to each rank, or comes from it, in pieces of which each holds some of every rank's."""
        size = (LARGE_CHUNK_BYTES if self._urgent is None else CHUNK_BYTES)[rows.device.type] // self.peers.world_size
        parts = [as_bytes(part) for part in rows.contiguous().split(list(counts))]
        # Both ends of a pair find the same cuts, whatever they have for others.
        cuts = [part.split(max(1, size, -(-len(part) // _MOST))) for part in parts]
        number = max(map(len, cuts))
        return [_Chunk([list(cut[k : k + 1]) for cut in cuts]) for k in range(number)]

    def _exchange(self, going: Sequence["_Chunk"], coming: Sequence["_Chunk"], name: str) -> None:
        """While a piece travels the next one is copied out, and the one before it copied in."""
        travelling: deque[tuple[Work[Tensor], _Chunk, _Chunk, float]] = deque()
        staged = deque(self._staging.out(piece.flat) for piece in going[:1])
        for number, (mine, theirs) in enumerate(zip(going, coming, strict=True), start=1):
            arriving = self._begin(staged.popleft(), mine, theirs, name)
            travelling.append((arriving, mine, theirs, time.monotonic()))
            staged += [self._staging.out(piece.flat) for piece in going[number : number + 1]]
            while len(travelling) >= (_IN_FLIGHT if staged else 1):
                arriving, sent, piece, began = travelling.popleft()
                self._staging.back(arriving.wait(), piece.flat)
                beside = 1 + (len(travelling) > 0)
                self._learn(beside * (sum(sent.sizes) - sent.sizes[self.peers.rank]), time.monotonic() - began)

    def _begin(self, staged: tuple[Tensor, CopyEvent], mine: "_Chunk", theirs: "_Chunk", name: str) -> Work[Tensor]:
        """Send a piece, once it is copied out and nothing urgent is under way."""
        sent, copied = staged
        copied.synchronize()
        self._yield_to_urgent()
        room = self._staging.room(theirs.flat)
        return self._transport.all_to_all(sent, mine.sizes, theirs.sizes, name=name, out=room)

    def _learn(self, sent: int, seconds: float) -> None:
        """How quick the wire is, where a wait of the host tells it."""
        if self._transport.device.type == "cpu" and sent >= _TELLING_BYTES:
            self._rates.append(sent / seconds)

    def _yield_to_urgent(self) -> None:
        """Wait until nothing urgent is moving. What never ends is for those to report who wait for it."""
        until, rate = time.monotonic() + self.timeout, max(self._rates, default=0.0)
        while self._urgent is not None and self._urgent.busy(rate) and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_SECONDS)


class _Chunk(NamedTuple):
    """Some bytes of every rank's, in parts."""

    of_rank: list[list[Tensor]]

    def telling(self, numbers: Tensor) -> "_Chunk":
        """With a number in front of what goes to each rank, or comes from it."""
        return _Chunk([[as_bytes(n), *parts] for n, parts in zip(numbers.split(1), self.of_rank, strict=True)])

    @property
    def flat(self) -> list[Tensor]:
        """All bytes, rank by rank."""
        return [part for parts in self.of_rank for part in parts]

    @property
    def sizes(self) -> list[int]:
        """Bytes by rank."""
        return [sum(map(len, parts)) for parts in self.of_rank]


def as_bytes(part: Tensor) -> Tensor:
    """The bytes of a packed tensor."""
    return part.view(-1).view(torch.uint8) if part.numel() else part.new_empty(0, dtype=torch.uint8)
