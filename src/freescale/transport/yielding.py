"""Transfers that give way: in pieces, before each of which whatever is urgent goes first.

A group of its own keeps what is deferred from standing in front of what is urgent, but both share the wire. So pieces
are small, and none begins on a rank while something urgent is under way there. Ranks that run the same schedule cannot
block each other by this: whoever still needs a deferred transfer has begun every urgent one that came before it, and so
has everybody else who needs it.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freescale.transport.c10d import C10d
from freescale.transport.handle import Landed

PIECE_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
"""A few milliseconds of a slow link, well below one of a fast one."""
_LOOK_AGAIN_SECONDS = 2e-4
Ints = NDArray[np.int64]


class Yielding:
    """Collectives of a group beside the one that is urgent. A transfer has ended when a call returns."""

    def __init__(self, transport: C10d, *, urgent: C10d) -> None:
        self.peers = transport.peers
        self._transport, self._urgent = transport, urgent

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str) -> Landed[Tensor]:
        """Exchange rows, piece by piece; of all ranks the one with the most decides how many pieces there are."""
        bytes_per_row = rows.shape[1:].numel() * rows.element_size()
        most = max(sum(send), sum(receive)) * bytes_per_row
        self._give_way()
        pieces = self._transport.largest(-(-most // PIECE_BYTES[rows.device.type]), name=f"pieces of {name}")
        if pieces <= 1:
            return Landed(self._transport.all_to_all(rows, send, receive, name=name).wait())
        mine, theirs = _cut(send, pieces), _cut(receive, pieces)
        staged = torch.empty_like(rows).index_copy_(0, mine.place(rows.device), rows)
        arrived = []
        for piece, counts, expected in zip(staged.split(mine.sizes), mine.counts, theirs.counts, strict=True):
            self._give_way()
            arrived.append(self._transport.all_to_all(piece, counts, expected, name=name).wait())
        return Landed(torch.cat(arrived).index_select(0, theirs.place(rows.device)))

    def all_reduce(self, values: Tensor, *, name: str) -> Landed[Tensor]:
        """Add up a few values over all ranks, in place."""
        self._give_way()
        return Landed(self._transport.all_reduce(values, name=name).wait())

    def _give_way(self) -> None:
        """Wait until nothing urgent is under way. What never ends is for those to report who wait for it."""
        until = time.monotonic() + self._transport.deadline
        while self._urgent.busy() and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_SECONDS)


class _Cut(NamedTuple):
    """Rows by rank, cut into pieces that each hold some rows of every rank."""

    counts: list[list[int]]
    """Rows by piece, then by rank."""
    sizes: list[int]
    places: Ints
    """Of each row, as they stand rank by rank: where it stands when the pieces lie one after another."""

    def place(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.places).to(device)


def _cut(rows: Sequence[int], pieces: int) -> _Cut:
    by_rank = np.array(rows)
    per_piece = np.maximum(1, -(-by_rank // pieces))
    counts = np.clip(by_rank - np.arange(pieces)[:, None] * per_piece, 0, per_piece)
    first = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
    rank = np.repeat(np.arange(len(by_rank)), by_rank)
    number = np.arange(len(rank)) - (np.cumsum(by_rank) - by_rank)[rank]
    piece = number // per_piece[rank]
    return _Cut(counts.tolist(), counts.sum(axis=1).tolist(), first[piece, rank] + number - piece * per_piece[rank])
