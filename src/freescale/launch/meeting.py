"""Where the agents of all hosts meet: a store that one of them serves, on one address and no other.

agents                count of those that ever came; each is known by its number
agent/ID, beat/ID     its ranks; a count that goes on while it lives
GENERATION/here/ID    it has come to this generation
GENERATION/ranks      which agents take part, and the first rank of each
GENERATION/ended/ID   exit codes of its ranks
GENERATION/pause      ranks are to save and end
GENERATION/verdict    how the generation ended
"""

import contextlib
import errno
import fcntl
import json
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from freescale.errors import TransportError, UsageError, reason
from freescale.launch.decide import Verdict
from freescale.launch.hosts import Hosts
from freescale.transport.world import store_prefix

SILENT_SECONDS = 15.0
"""After which an agent or the store that gave no sign is taken to be lost."""
_JOIN_SECONDS = 600.0
_CONNECT_SECONDS, _CONNECT_AGAIN_SECONDS = 5.0, 0.2
_SIOCGIFADDR = 0x8915


class Meeting:
    """The store, seen from the agent of one host."""

    def __init__(self, hosts: Hosts, ranks: int) -> None:
        """Serve the store if the address is one of this host's and free; else find it there."""
        self.hosts = hosts
        self._listener = _listener(hosts)
        self.serves = self._listener is not None
        port = self._listener.getsockname()[1] if self._listener is not None else hosts.port
        self.address = (hosts.address, port)
        self._store = _store(self.address, self._listener)
        self.id = self._store.add("agents", 1) - 1
        self._set(f"agent/{self.id}", ranks)
        self._beats: dict[int, tuple[int, float]] = {}

    def close(self) -> None:
        """Give up the port."""
        del self._store
        if self._listener is not None:
            with contextlib.suppress(OSError):  # the store may have closed what it was given
                self._listener.close()

    def beat(self) -> None:
        """Give a sign of life."""
        self._store.add(f"beat/{self.id}", 1)

    def alive(self) -> list[int]:
        """Agents that give signs of life."""
        now, found = time.monotonic(), []
        for agent in range(self._store.add("agents", 0)):
            beat = self._store.add(f"beat/{agent}", 0)
            seen, since = self._beats.get(agent, (-1, now))
            if beat != seen:
                self._beats[agent] = beat, now
            if (beat != seen or now - since < SILENT_SECONDS) and beat > 0:
                found.append(agent)
        return found

    def come(self, generation: int) -> None:
        """Say that this agent is ready for a generation."""
        self._set(f"{generation}/here/{self.id}", True)

    def here(self, generation: int, agents: Iterable[int]) -> dict[int, int]:
        """Those that have come to a generation, and the ranks of each."""
        return {a: self._get(f"agent/{a}") for a in agents if self._get(f"{generation}/here/{a}")}

    def leave(self) -> None:
        """Say that this agent takes part no more, and give others a moment to read what it served."""
        self._set(f"left/{self.id}", True)
        until = time.monotonic() + SILENT_SECONDS
        while self.serves and time.monotonic() < until:
            if all(self._get(f"left/{agent}") for agent in self.alive()):
                return
            time.sleep(0.05)

    def open(self, generation: int, first: Mapping[int, int], ranks: int) -> None:
        """Begin a generation: the first rank of each agent. What was said in earlier ones is forgotten."""
        self._forget(generation - 2)  # of the one before, somebody may still read how it ended
        self._set(f"{generation}/ranks", {"first": {str(a): rank for a, rank in first.items()}, "ranks": ranks})

    def opened(self, generation: int) -> tuple[dict[int, int], int] | None:
        """The first rank of each agent of a generation and the number of ranks, once it has begun."""
        found = self._get(f"{generation}/ranks")
        return None if found is None else ({int(a): rank for a, rank in found["first"].items()}, found["ranks"])

    def report(self, generation: int, codes: Sequence[int | None]) -> None:
        """Tell how the ranks of this host stand."""
        self._set(f"{generation}/ended/{self.id}", list(codes))

    def reported(self, generation: int, agents: Mapping[int, int]) -> dict[int, list[int | None]]:
        """How the ranks of every host stand."""
        return {agent: self._get(f"{generation}/ended/{agent}") or [None] for agent in agents}

    def pause(self, generation: int) -> None:
        """Let all ranks save and end."""
        self._set(f"{generation}/pause", True)

    def paused(self, generation: int) -> bool:
        """Whether they are to."""
        return bool(self._get(f"{generation}/pause"))

    def conclude(self, generation: int, verdict: Verdict) -> None:
        """End a generation."""
        self._set(f"{generation}/verdict", asdict(verdict))

    def concluded(self, generation: int) -> Verdict | None:
        """How a generation ended, if it has."""
        found = self._get(f"{generation}/verdict")
        return None if found is None else Verdict(**found)

    def interface(self) -> str:
        """The name of the network through which this host sees the meeting: ranks use no other."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(self.address if self.address[1] else (self.address[0], 9))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = struct.pack("256s", name.encode()[:15])
                    if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == own:
                        return name
        return ""

    def _forget(self, generation: int) -> None:
        """Drop what agents and ranks left in the store, which would grow with every start."""
        for key in self._store.list_keys():
            if key.lstrip("/").startswith((f"{generation}/", f"{store_prefix(generation)}/")):
                self._store.delete_key(key)

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        """What was set, or None."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def _listener(hosts: Hosts) -> socket.socket | None:
    """Listen on the chosen address alone; None where it is another host's, or another agent of this host serves."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((hosts.address, hosts.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise UsageError(
            f"cannot listen at {hosts.address}:{hosts.port}: {reason(error)}", remedy="give another --meet HOST:PORT"
        ) from error
    return listener


def _store(address: tuple[str, int], listener: socket.socket | None) -> dist.Store:
    waits = timedelta(seconds=_JOIN_SECONDS)
    try:
        if listener is None:
            _wait_for(address)
            return dist.TCPStore(*address, is_master=False, timeout=waits)
        # The store takes the descriptor over and closes it, so it gets one of its own.
        given = listener.dup().detach()
        return dist.TCPStore(*address, is_master=True, wait_for_workers=False, timeout=waits, master_listen_fd=given)
    except (RuntimeError, TimeoutError) as error:
        raise TransportError(
            f"nobody serves the store at {address[0]}:{address[1]}",
            where=reason(error),
            remedy="start the agent of that host, and see that nothing blocks the port",
        ) from error


def _wait_for(address: tuple[str, int]) -> None:
    """Wait until somebody listens there. Torch would wait in native code, where no signal is heard."""
    until = time.monotonic() + _JOIN_SECONDS
    while True:
        try:
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise TimeoutError(f"{reason(error)}, for {_JOIN_SECONDS:.0f} s") from error
            time.sleep(_CONNECT_AGAIN_SECONDS)
