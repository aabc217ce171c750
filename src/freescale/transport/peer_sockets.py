"""Short messages between the processes of a host, by sockets that no file system knows.

They are what symmetric memory needs beside the memory: who waits sleeps, a message may hand over a file descriptor, and
the kernel closes the sockets of a process that dies, so its peers see that at once. Whoever leaves in peace says
goodbye.
"""

import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple
from weakref import finalize

from freescale.transport.base import POLL_SECONDS, Peers

_TOKEN_BYTES = 16
_FORM = struct.Struct("<cqqq")
_GOODBYE = b"-"


class Message(NamedTuple):
    """What a peer says: a letter, up to three numbers, and perhaps the descriptor of some memory."""

    peer: int
    what: bytes
    numbers: tuple[int, int, int]
    memory: int | None


class PeerSockets:
    """A socket to every other of some ranks of a host. All of them must come here, once per `name`."""

    def __init__(
        self, peers: Peers, ranks: Sequence[int], *, name: str, timeout: float, hear: Callable[[Message], None]
    ) -> None:
        self._sockets = _Meeting(peers, ranks, name=name, timeout=timeout).sockets
        self._peers, self._hear = peers, hear
        self._said_goodbye: set[int] = set()
        self._left: set[int] = set()
        self._peer_of = {link.fileno(): peer for peer, link in self._sockets.items()}
        self._poll = select.poll()
        for number in self._peer_of:
            self._poll.register(number, select.POLLIN)
        finalize(self, _say_goodbye, self._sockets)  # also when the interpreter ends

    def say(self, peer: int, what: bytes, *numbers: int, memory: int | None = None) -> None:
        """Send a message."""
        message = _FORM.pack(what, *numbers, *[0] * (3 - len(numbers)))
        try:
            if memory is None:
                self._sockets[peer].send(message)
            else:
                socket.send_fds(self._sockets[peer], [message], [memory])
        except OSError as error:
            raise RuntimeError(f"rank {peer} is gone") from error

    def say_to_all(self, what: bytes, *numbers: int, memory: int | None = None) -> None:
        """Send a message to every peer."""
        for peer in self._sockets:
            self.say(peer, what, *numbers, memory=memory)

    def wait_until(self, there: Callable[[], bool], peer: int, until: float) -> None:
        """Take in messages until what a peer has to say is there; fails at a moment of the monotonic clock."""
        while not there():
            if peer in self._left:
                raise RuntimeError(f"rank {peer} has left")
            if not self.listen(min(POLL_SECONDS, until - time.monotonic())):
                if time.monotonic() >= until:
                    raise RuntimeError(f"rank {peer} said nothing in time")
                self._peers.raise_if_peer_failed()

    def listen(self, seconds: float = 0.0) -> bool:
        """Take in a message of each peer that has one, waiting so long at most; gives whether any had."""
        heard = self._poll.poll(max(0.0, seconds) * 1e3)
        for number, _ in heard:
            peer = self._peer_of[number]
            said, memories = b"", []
            with suppress(ConnectionError):  # it died with something unread
                said, memories, _, _ = socket.recv_fds(self._sockets[peer], _FORM.size, 1)
            if not said:
                self._poll.unregister(number)
                self._left.add(peer)
                if peer not in self._said_goodbye:  # who went without a word has died, and nobody here can go on
                    raise RuntimeError(f"rank {peer} is gone")
                continue
            what, *numbers = _FORM.unpack(said)
            if what == _GOODBYE:
                self._said_goodbye.add(peer)
            else:
                self._hear(Message(peer, what, (numbers[0], numbers[1], numbers[2]), *memories or [None]))
        return bool(heard)


def _say_goodbye(sockets: Mapping[int, socket.socket]) -> None:
    for link in sockets.values():
        with suppress(OSError):  # it left before
            link.send(_FORM.pack(_GOODBYE, 0, 0, 0))
        link.close()


class _Meeting:
    """Every rank connects with every other, once."""

    def __init__(self, peers: Peers, ranks: Sequence[int], *, name: str, timeout: float) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self._peers, self._until = peers, time.monotonic() + timeout
        self._keys = {rank: f"freescale/shared memory/{name}/{rank}" for rank in ranks}
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        with _socket() as door, peers.during("sharing memory"):
            door.bind("")  # the kernel finds a name that is free, and no file system knows it
            door.listen(len(ranks))
            peers.store.set(self._keys[peers.rank], (door.getsockname() + self._token).hex())
            for peer in ranks:
                if peer < peers.rank:
                    self._visit(peer)
            while len(self.sockets) < len(ranks) - 1:
                self._let_in(door)
        for link in self.sockets.values():
            link.settimeout(timeout)

    def _visit(self, peer: int) -> None:
        """Go to a rank below, and show what only ranks of this run can know."""
        self._peers.store.wait([self._keys[peer]], timedelta(seconds=self._left()))
        said = bytes.fromhex(self._peers.store.get(self._keys[peer]).decode())
        link = _socket()
        link.settimeout(self._left())
        link.connect(said[:-_TOKEN_BYTES])
        link.send(struct.pack("q", self._peers.rank) + said[-_TOKEN_BYTES:])
        self.sockets[peer] = link

    def _let_in(self, door: socket.socket) -> None:
        """Open to whoever comes from above. Any process of the host may knock, so strangers are turned away."""
        door.settimeout(self._left())
        link, _ = door.accept()
        link.settimeout(self._left())
        said = link.recv(8 + _TOKEN_BYTES)
        if secrets.compare_digest(said[8:], self._token):
            self.sockets[struct.unpack("q", said[:8])[0]] = link
        else:
            link.close()

    def _left(self) -> float:
        return max(0.01, self._until - time.monotonic())


def _socket() -> socket.socket:
    """One that keeps messages apart."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
