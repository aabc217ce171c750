"""Sockets between the ranks of a host connect these ranks only, although any process of the host can connect."""

import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from freescale.transport.base import Peers
from freescale.transport.peer_sockets import Message, PeerSockets

TOKEN_BYTES = 16


def test_a_process_without_the_token_is_rejected_and_cannot_replace_a_rank() -> None:
    store, received = dist.HashStore(), list[Message]()

    def connected(rank: int) -> PeerSockets:
        return PeerSockets(Peers(rank, 2, store), [0, 1], name="rows", timeout=20.0, on_message=received.append)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connected, 0)
        address = bytes.fromhex(store.get("freescale/shared memory/rows/0").decode())[:-TOKEN_BYTES]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(5.0)
            stranger.connect(address)
            stranger.send(struct.pack("q", 1) + bytes(TOKEN_BYTES))
            assert stranger.recv(1) == b"", "the connection is closed"
        one, zero = connected(1), waiting.result()
    one.send(0, b"o", 7)
    zero.wait_until(lambda: bool(received), 1, time.monotonic() + 20.0)
    assert received == [Message(1, b"o", (7, 0, 0), None)]
