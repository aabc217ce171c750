"""Rank processes for benchmarks, over gloo, on the loopback interface or the hosts of a lab."""

import multiprocessing
import os
import pickle
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from tests.support.lab import ADDRESS, INTERFACE, Lab, enter

from freescale.transport.world import destroy_world, init_world


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, lab: Lab | None = None) -> Any:
    """Run `function(world, *arguments)` on every rank; return rank 0's result.

    In a lab the ranks are divided over the hosts, in order.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        hosts = [] if lab is None else lab.hosts
        mp.set_forkserver_preload(["torchrec"])  # imported once, and not by every rank of every measurement
        mp.start_processes(_run, (ranks, port, hosts, result, function, arguments), ranks, start_method="forkserver")
        return pickle.loads(result.read_bytes())


def _run(
    rank: int, ranks: int, port: int, hosts: list[str], result: Path, function: Callable[..., Any], arguments: Any
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if hosts:
        enter(hosts[rank * len(hosts) // ranks])
        os.environ |= {"MASTER_ADDR": ADDRESS.format(1), "GLOO_SOCKET_IFNAME": INTERFACE}
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_measurement, daemon=True).start()
    world = init_world(timeout=120.0)
    found = function(world, *arguments)
    if world.is_rank_zero:
        result.write_bytes(pickle.dumps(found))
    destroy_world()


def _end_with_the_measurement() -> None:
    """End this rank when the benchmark is killed: its parent, the forkserver, would outlive it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
