"""The rendezvous of the agents of all hosts: a store that one of them serves, on one address and no other.

agents                   number of agents that ever joined; each has an id from 0
agent/ID, heartbeat/ID   its number of ranks; a counter that increases while it lives
restart                  the newest restart; a host that joins later begins there
RESTART/joined/ID        it has joined this restart
RESTART/ranks            which agents take part, and the first rank of each
RESTART/exit_codes/ID    exit codes of its ranks
RESTART/pause            ranks are to save and end
RESTART/decision         how the ranks ended
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
from freescale.launch import Hosts
from freescale.launch.restart_decision import RestartDecision
from freescale.transport.world import store_prefix

UNRESPONSIVE_SECONDS = 15.0
"""Age of the last heartbeat from which an agent or the store counts as lost."""
_JOIN_SECONDS = 600.0
_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.2
_SIOCGIFADDR = 0x8915


class Rendezvous:
    """The store as seen by the agent of one host."""

    def __init__(self, hosts: Hosts, nproc: int) -> None:
        """Serve the store if the address belongs to this host and is free; else connect to it."""
        self.hosts = hosts
        self._listener = _listener(hosts)
        self.serves = self._listener is not None
        port = self._listener.getsockname()[1] if self._listener is not None else hosts.port
        self.address = (hosts.address, port)
        self._store = _store(self.address, self._listener)
        self.id = self._store.add("agents", 1) - 1
        self._set(f"agent/{self.id}", nproc)
        self._heartbeats: dict[int, tuple[int, float]] = {}

    def close(self) -> None:
        """Release the port."""
        del self._store
        if self._listener is not None:
            with contextlib.suppress(OSError):  # the store may have closed it
                self._listener.close()

    def heartbeat(self) -> None:
        """Report that this agent is alive."""
        self._store.add(f"heartbeat/{self.id}", 1)

    def alive_agents(self) -> list[int]:
        """Return the agents with a recent heartbeat."""
        now, alive = time.monotonic(), []
        for agent in range(self._store.add("agents", 0)):
            count = self._store.add(f"heartbeat/{agent}", 0)
            last, since = self._heartbeats.get(agent, (-1, now))
            if count != last:
                self._heartbeats[agent] = count, now
            if (count != last or now - since < UNRESPONSIVE_SECONDS) and count > 0:
                alive.append(agent)
        return alive

    def newest_restart(self) -> int:
        """Return the restart that ranks were last assigned for, 0 before any. Keys of earlier ones may be deleted."""
        return self._get("restart") or 0

    def join(self, restart: int) -> None:
        """Report that this agent is ready to start its ranks."""
        self._set(f"{restart}/joined/{self.id}", True)

    def joined_agents(self, restart: int, agents: Iterable[int]) -> dict[int, int]:
        """Return which of the agents have joined, and the number of ranks of each."""
        return {a: self._get(f"agent/{a}") for a in agents if self._get(f"{restart}/joined/{a}")}

    def leave(self) -> None:
        """Report that this agent has ended. The serving agent waits until the others have read the decision."""
        self._set(f"left/{self.id}", True)
        until = time.monotonic() + UNRESPONSIVE_SECONDS
        while self.serves and time.monotonic() < until:
            if all(self._get(f"left/{agent}") for agent in self.alive_agents()):
                return
            time.sleep(0.05)

    def publish_ranks(self, restart: int, first: Mapping[int, int], world_size: int) -> None:
        """Start a round with the first rank of each agent. Deletes the keys of earlier rounds."""
        self._delete_round(restart - 2)  # agents may still read the decision of the previous one
        ranks = {"first": {str(agent): rank for agent, rank in first.items()}, "world_size": world_size}
        self._set(f"{restart}/ranks", ranks)
        self._set("restart", restart)

    def read_ranks(self, restart: int) -> tuple[dict[int, int], int] | None:
        """Return the first rank of each agent and the world size, once they are published."""
        ranks = self._get(f"{restart}/ranks")
        return None if ranks is None else ({int(a): rank for a, rank in ranks["first"].items()}, ranks["world_size"])

    def report_exit_codes(self, restart: int, codes: Sequence[int | None]) -> None:
        """Report the exit codes of the ranks of this host."""
        self._set(f"{restart}/exit_codes/{self.id}", list(codes))

    def exit_codes(self, restart: int, agents: Mapping[int, int]) -> dict[int, list[int | None]]:
        """Return the reported exit codes of every host."""
        return {agent: self._get(f"{restart}/exit_codes/{agent}") or [None] for agent in agents}

    def request_pause(self, restart: int) -> None:
        """Request that all ranks save and end."""
        self._set(f"{restart}/pause", True)

    def is_pausing(self, restart: int) -> bool:
        """Return whether a pause was requested."""
        return bool(self._get(f"{restart}/pause"))

    def publish_decision(self, restart: int, decision: RestartDecision) -> None:
        """Publish how the ranks end."""
        self._set(f"{restart}/decision", asdict(decision))

    def read_decision(self, restart: int) -> RestartDecision | None:
        """Return the decision, once it is published."""
        decision = self._get(f"{restart}/decision")
        return None if decision is None else RestartDecision(**decision)

    def interface(self) -> str:
        """Return the name of the network interface that reaches the store. Ranks use no other."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(self.address if self.address[1] else (self.address[0], 9))
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = struct.pack("256s", name.encode()[:15])
                    if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == own:
                        return name
        return ""

    def _delete_round(self, restart: int) -> None:
        """Delete the keys of an earlier round, so that the store does not grow with every restart."""
        for key in self._store.list_keys():
            if key.lstrip("/").startswith((f"{restart}/", f"{store_prefix(restart)}/")):
                self._store.delete_key(key)

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        """Return the value of a key, or None."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def _listener(hosts: Hosts) -> socket.socket | None:
    """Listen on the given address alone; None if it belongs to another host or another agent serves it."""
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
            f"cannot listen at {hosts.address}:{hosts.port}: {reason(error)}",
            remedy="give another --rdzv-endpoint HOST:PORT",
        ) from error
    return listener


def _store(address: tuple[str, int], listener: socket.socket | None) -> dist.Store:
    timeout = timedelta(seconds=_JOIN_SECONDS)
    try:
        if listener is None:
            _wait_for_listener(address)
            return dist.TCPStore(*address, is_master=False, timeout=timeout)
        # The store closes the descriptor, so it gets a duplicate.
        descriptor = listener.dup().detach()
        return dist.TCPStore(
            *address, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
        )
    except (RuntimeError, TimeoutError) as error:
        raise TransportError(
            f"no agent serves the store at {address[0]}:{address[1]}",
            where=reason(error),
            remedy="start the agent of that host, and check that no firewall blocks the port",
        ) from error


def _wait_for_listener(address: tuple[str, int]) -> None:
    """Wait until the store listens. Torch would wait in native code, which handles no signal."""
    until = time.monotonic() + _JOIN_SECONDS
    while True:
        try:
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise TimeoutError(f"{reason(error)}, for {_JOIN_SECONDS:.0f} s") from error
            time.sleep(_RETRY_SECONDS)
