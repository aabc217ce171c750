"""Short messages between the processes of a host, over Unix sockets in the abstract namespace.

Symmetric memory uses them for offers and signals: a waiting rank sleeps, a message can carry a file descriptor, and the
kernel closes the sockets of a process that dies, so peers notice at once. A clean exit sends a goodbye first.
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
_FORMAT = struct.Struct("<cqqq")
_GOODBYE = b"-"


class Message(NamedTuple):
    """A message of a peer: a tag, three integers, and optionally a file descriptor."""

    peer: int
    tag: bytes
    numbers: tuple[int, int, int]
    descriptor: int | None


class PeerSockets:
    """A socket to each of some other ranks of a host. Collective: construct it on all of them, once per `name`."""

    def __init__(
        self, peers: Peers, ranks: Sequence[int], *, name: str, timeout: float, on_message: Callable[[Message], None]
    ) -> None:
        self._sockets = _Connector(peers, ranks, name=name, timeout=timeout).sockets
        self._peers, self._on_message = peers, on_message
        self._said_goodbye: set[int] = set()
        self._closed: set[int] = set()
        self._peer_of = {connection.fileno(): peer for peer, connection in self._sockets.items()}
        self._poll = select.poll()
        for number in self._peer_of:
            self._poll.register(number, select.POLLIN)
        finalize(self, _send_goodbye, self._sockets)  # also at interpreter exit

    def send(self, peer: int, tag: bytes, *numbers: int, descriptor: int | None = None) -> None:
        """Send a message."""
        message = _FORMAT.pack(tag, *numbers, *[0] * (3 - len(numbers)))
        try:
            if descriptor is None:
                self._sockets[peer].send(message)
            else:
                socket.send_fds(self._sockets[peer], [message], [descriptor])
        except OSError as error:
            raise RuntimeError(f"rank {peer} is gone") from error

    def broadcast(self, tag: bytes, *numbers: int, descriptor: int | None = None) -> None:
        """Send a message to every peer."""
        for peer in self._sockets:
            self.send(peer, tag, *numbers, descriptor=descriptor)

    def wait_until(self, condition: Callable[[], bool], peer: int, until: float) -> None:
        """Receive messages until a condition on a peer holds; fail at a time of the monotonic clock."""
        while not condition():
            if peer in self._closed:
                raise RuntimeError(f"rank {peer} has left")
            if not self.poll(min(POLL_SECONDS, until - time.monotonic())):
                if time.monotonic() >= until:
                    raise RuntimeError(f"rank {peer} sent nothing in time")
                self._peers.raise_if_peer_failed()

    def poll(self, seconds: float = 0.0) -> bool:
        """Receive one message of each peer that has one, waiting at most so long; return whether any had."""
        ready = self._poll.poll(max(0.0, seconds) * 1e3)
        for number, _ in ready:
            peer = self._peer_of[number]
            data, descriptors = b"", []
            with suppress(ConnectionError):  # it died with unread data
                data, descriptors, _, _ = socket.recv_fds(self._sockets[peer], _FORMAT.size, 1)
            if not data:
                self._poll.unregister(number)
                self._closed.add(peer)
                if peer not in self._said_goodbye:  # it died, so no transfer can complete
                    raise RuntimeError(f"rank {peer} is gone")
                continue
            tag, *numbers = _FORMAT.unpack(data)
            if tag == _GOODBYE:
                self._said_goodbye.add(peer)
            else:
                self._on_message(Message(peer, tag, (numbers[0], numbers[1], numbers[2]), *descriptors or [None]))
        return bool(ready)


def _send_goodbye(sockets: Mapping[int, socket.socket]) -> None:
    for connection in sockets.values():
        with suppress(OSError):  # the peer exited before
            connection.send(_FORMAT.pack(_GOODBYE, 0, 0, 0))
        connection.close()


class _Connector:
    """Connects every rank with every other."""

    def __init__(self, peers: Peers, ranks: Sequence[int], *, name: str, timeout: float) -> None:
        self.sockets: dict[int, socket.socket] = {}
        self._peers, self._until = peers, time.monotonic() + timeout
        self._keys = {rank: f"freescale/shared memory/{name}/{rank}" for rank in ranks}
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        with _new_socket() as listener, peers.guard("sharing memory"):
            listener.bind("")  # the kernel picks a free abstract name
            listener.listen(len(ranks))
            peers.store.set(self._keys[peers.rank], (listener.getsockname() + self._token).hex())
            for peer in ranks:
                if peer < peers.rank:
                    self._connect(peer)
            while len(self.sockets) < len(ranks) - 1:
                self._accept(listener)
        for connection in self.sockets.values():
            connection.settimeout(timeout)

    def _connect(self, peer: int) -> None:
        """Connect to a lower rank and present its token from the store."""
        self._peers.store.wait([self._keys[peer]], timedelta(seconds=self._remaining()))
        address = bytes.fromhex(self._peers.store.get(self._keys[peer]).decode())
        connection = _new_socket()
        connection.settimeout(self._remaining())
        connection.connect(address[:-_TOKEN_BYTES])
        connection.send(struct.pack("q", self._peers.rank) + address[-_TOKEN_BYTES:])
        self.sockets[peer] = connection

    def _accept(self, listener: socket.socket) -> None:
        """Accept a higher rank. Any process of the host can connect, so a wrong token is rejected."""
        listener.settimeout(self._remaining())
        connection, _ = listener.accept()
        connection.settimeout(self._remaining())
        hello = connection.recv(8 + _TOKEN_BYTES)
        if secrets.compare_digest(hello[8:], self._token):
            self.sockets[struct.unpack("q", hello[:8])[0]] = connection
        else:
            connection.close()

    def _remaining(self) -> float:
        return max(0.01, self._until - time.monotonic())


def _new_socket() -> socket.socket:
    """Return a Unix socket that keeps message boundaries."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
