"""Rank processes for tests, over gloo on the loopback interface.

Importing torch takes seconds, so a forkserver preloads it, and a test module starts its ranks once (see the fixture in
`conftest`) and sends them module-level functions. Every wait has a timeout. Errors are raised here with their rank.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.lab import INTERFACE, Lab, enter

DEADLINE = 120.0


class World(NamedTuple):
    """First argument of a function that runs on a rank."""

    rank: int
    ranks: int
    store: dist.Store


class RendezvousPoint(NamedTuple):
    """Where ranks find each other: a port, or a file for hosts of a lab."""

    port: int
    file: str
    hosts: Sequence[str]
    """Network namespaces of the ranks, if they run in a lab."""
    on_virtual_gpus: bool


class RankError(Exception):
    """A rank raised an error."""


class Ranks:
    """Processes that form one group: over gloo, or of virtual GPUs."""

    def __init__(self, ranks: int, lab: Lab | None = None, *, on_virtual_gpus: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torchrec"])
        # This process serves the store, so any rank may die. Hosts of a lab cannot reach it and use a file.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        hosts = lab.hosts if lab else ()
        point = RendezvousPoint(self._store.port, f"{self._folder.name}/store", hosts, on_virtual_gpus)
        self._sent = 0
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            local, remote = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, point, remote, dict(os.environ)), daemon=True)
            process.start()
            remote.close()
            self._pipes.append(local)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = DEADLINE) -> list[Any]:
        """Run `function(world, *arguments)` on every rank and return the results."""
        self.send(function, *arguments)
        results, errors = [], []
        for rank in range(len(self._pipes)):
            try:
                results.append(self.result(rank, timeout))
            except RankError as error:
                errors.append(str(error))
        if errors:
            raise RankError("\n".join(errors))
        return results

    def send(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start it on every rank."""
        self._sent += 1
        for pipe in self._pipes:
            pipe.send((self._sent, function, arguments))

    def result(self, rank: int, timeout: float = DEADLINE) -> Any:
        """Return the result of one rank, or raise its error."""
        answers, ok, value = 0, False, None
        while answers != self._sent:  # skip late results of earlier tasks
            if not self._pipes[rank].poll(timeout):
                self._dump_stacks()
                raise RankError(f"rank {rank} gave no answer within {timeout} s")
            answers, ok, value = self._pipes[rank].recv()
        if not ok:
            raise RankError(f"rank {rank}:\n{value}")
        return value

    def _dump_stacks(self) -> None:
        """Make every rank write the stacks of its threads to stderr."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)

    def close(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, ranks: int, point: RendezvousPoint, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE if point.hosts else "lo"
    store: dist.Store = dist.FileStore(point.file, ranks) if point.hosts else dist.TCPStore("127.0.0.1", point.port)
    if point.hosts:
        enter(point.hosts[rank * len(point.hosts) // ranks])
    backend = "gloo"
    if point.on_virtual_gpus:
        from tests.support import vgpu

        vgpu.install(os.path.dirname(point.file), index=rank, count=ranks)
        backend = "vccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    gc.collect()
    gc.freeze()  # what was imported: it is not collected after every task
    while (task := pipe.recv()) is not None:
        number, function, arguments = task
        # Keys of its own: a failure that another task has reported would end the waits of this one.
        world = World(rank, ranks, dist.PrefixStore(f"task {number}", store))
        try:
            pipe.send((number, True, function(world, *arguments)))
        except Exception:
            pipe.send((number, False, traceback.format_exc()))
        _close_other_groups(on_virtual_gpus=point.on_virtual_gpus)
    dist.destroy_process_group()  # open groups delay the exit


def _close_other_groups(*, on_virtual_gpus: bool) -> None:
    """Destroy the groups that a task created: each holds threads and sockets, and a rank serves hundreds of tasks."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    if on_virtual_gpus:
        from tests.support.vgpu.group import release_destroyed_groups

        release_destroyed_groups()
    gc.collect()  # gloo's threads poll until the last reference to their group is gone, also one in a cycle
