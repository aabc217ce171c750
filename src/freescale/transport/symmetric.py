"""Memory of every rank that its peers can write into, and signals between them: what one-sided transfers stand on.

A rank takes room for what it awaits and offers each peer its part of it. The peer writes there and says that the part
is filled. Who implements this decides what a write and a signal are: a copy inside the memory of a host, or one by the
copy engine of a GPU. Nothing here knows what the bytes mean.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class SymmetricMemory(Protocol):
    """Room that peers can reach and the signals about it, seen from one rank. Offers and signals keep their order."""

    ranks: list[int]
    """Who shares it, this rank among them."""

    def room(self, like: Tensor, rows: int) -> Tensor:
        """Memory of this rank for rows such as those of another tensor, until nobody holds it any more."""

    def offer(self, peer: int, part: Tensor) -> None:
        """Let a peer fill a part of such room, given as bytes."""

    def offered(self, peer: int) -> bool:
        """Whether a peer has offered a part that was not taken yet."""

    def take(self, peer: int, *, until: float) -> Tensor:
        """The oldest part that a peer has offered; fails at a moment of the monotonic clock."""

    def filled(self, peer: int) -> None:
        """Tell a peer that the oldest part that it waits for is filled by what was copied so far."""

    def wait(self, peer: int, *, until: float) -> None:
        """Until a peer has filled the oldest part that it was offered; fails at a moment of the monotonic clock."""

    def moving(self) -> AbstractContextManager[object]:
        """Copies and signals that are asked for inside happen where they take the least from compute."""

    def hand_over(self) -> None:
        """Whoever computes may use from here on what was moved so far."""
