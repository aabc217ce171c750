"""Emulated hosts on one machine: network namespaces on one bridge, each with a link of a given rate.

Traffic stays inside namespaces that this file creates and removes. Needs root and iproute2.
"""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence

INTERFACE, ADDRESS = "e0", "10.77.0.{}"
_NEW_NETWORK = 0x40000000


class Lab:
    """Hosts and their bridge. `hosts` are names of namespaces."""

    def __init__(self, hosts: int) -> None:
        self._switch = f"freescale-{os.getpid()}-switch"
        self.hosts = [f"freescale-{os.getpid()}-{host}" for host in range(hosts)]

    def shape(self, mbit: float | None) -> None:
        """Limit the rate of every link, in both directions; None removes the limit."""
        for place, port in self._ports():
            _ip(["tc", "-n", place, "qdisc", "del", "dev", port, "root"], may_fail=True)
            if mbit is not None:
                rate = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms"]
                _ip(["tc", "-n", place, "qdisc", "add", "dev", port, "root", "tbf", *rate])

    def cut(self, host: int) -> None:
        """Take the link of a host down."""
        _ip(["ip", "-n", self._switch, "link", "set", f"p{host}", "down"])

    def mend(self, host: int) -> None:
        """Bring it up again."""
        _ip(["ip", "-n", self._switch, "link", "set", f"p{host}", "up"])

    def open(self) -> None:
        """Create the namespaces."""
        for place in (self._switch, *self.hosts):
            _ip(["ip", "netns", "add", place])
        _ip(["ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge"])
        _ip(["ip", "-n", self._switch, "link", "set", "bridge", "up"])
        for number, host in enumerate(self.hosts):
            pair = ["name", INTERFACE, "type", "veth", "peer", "name", f"p{number}", "netns", self._switch]
            _ip(["ip", "-n", host, "link", "add", *pair])
            _ip(["ip", "-n", self._switch, "link", "set", f"p{number}", "master", "bridge", "up"])
            _ip(["ip", "-n", host, "addr", "add", f"{ADDRESS.format(number + 1)}/24", "dev", INTERFACE])
            for link in (INTERFACE, "lo"):
                _ip(["ip", "-n", host, "link", "set", link, "up"])

    def close(self) -> None:
        """Remove the namespaces and their links."""
        for place in (*self.hosts, self._switch):
            _ip(["ip", "netns", "del", place], may_fail=True)

    def _ports(self) -> Iterator[tuple[str, str]]:
        for number, host in enumerate(self.hosts):
            yield host, INTERFACE
            yield self._switch, f"p{number}"


@contextlib.contextmanager
def lab(hosts: int) -> Iterator[Lab]:
    """Create hosts and remove them afterwards."""
    created = Lab(hosts)
    try:
        created.open()
        yield created
    finally:
        created.close()


def enter(host: str) -> None:
    """Move this process into a host: later connections use that host's link."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}", encoding="utf-8") as space:
        if libc.setns(space.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {host}")


def _ip(command: Sequence[str], *, may_fail: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
