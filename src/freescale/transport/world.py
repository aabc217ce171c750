"""The ranks of a run: initializes process groups and describes them from one rank."""

import contextlib
import hashlib
import os
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from freescale.connections import BackgroundWork, GlooWire, TreeCollectives, connects_on_demand, few_connections
from freescale.errors import TransportError, UsageError, reason
from freescale.log import logger, warning_once
from freescale.transport.base import DEVICE_SLACK_SECONDS, POLL_SECONDS, Peers, call_with_timeout
from freescale.transport.c10d import C10d
from freescale.transport.host_layout import HostLayout

_SLACK_SECONDS = 1.0
"""Time beyond the timeout for calls that enforce it themselves."""
_DEFERRED_CTAS = 4
"""SMs that a deferred transfer may take from compute."""


@dataclass(frozen=True)
class World:
    """The ranks of a run, seen from one of them."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    transport: C10d

    @property
    def is_rank_zero(self) -> bool:
        """Return whether this rank writes logs and files for all."""
        return self.rank == 0


def restart_count() -> int:
    """Return how often a launcher has restarted these ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def store_prefix(restart_count: int) -> str:
    """Return the store prefix of a start, so that a restart does not see keys of an earlier one."""
    return f"freescale/{restart_count}"


def init_world(*, timeout: float, device: Literal["cpu", "cuda"] | None = None) -> World:
    """Initialize the default process group from torchrun's or SLURM's environment; with one rank if there is none.

    `device`: by default the GPU, if there is one.
    """
    rank, world_size, local = _from_slurm() if "RANK" not in os.environ else _from_torchrun()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = device or ("cpu" if accelerator is None else accelerator.type)
    place = torch.device("cpu") if kind == "cpu" else torch.device(kind, _visible_index(local))
    if place.type != "cpu":
        torch.accelerator.set_device_index(place)
    else:
        _share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local)
    store: dist.Store = dist.HashStore() if world_size == 1 else _store(rank, world_size, timeout)
    backend = dist.get_default_backend_for_device(place)
    with exit_on_hang(Peers(rank, world_size, store), "joining the group", timeout), few_connections(world_size):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=_group_timeout(place, timeout)
        )
        group = _world_group()
        _connect_ring(group)
    return World(rank, world_size, place, group, C10d(group, store, timeout=timeout))


def _visible_index(local: int) -> int:
    """Return the device of a rank. SLURM can show each task its own GPU only, which is then device 0."""
    return local % max(1, torch.accelerator.device_count())


def _share_cores(world_size: int, local: int) -> None:
    """Divide the cores of this host among its ranks, unless OMP_NUM_THREADS is set."""
    cores = len(os.sched_getaffinity(0))
    if world_size > cores and local == 0:
        warning_once(
            f"{world_size} ranks share {cores} cores of this host, so each step takes longer than with {cores} ranks"
        )
    if world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores // world_size))


def from_group(group: dist.ProcessGroup, device: torch.device, *, timeout: float) -> World:
    """Describe an existing process group."""
    store = dist.distributed_c10d._get_default_store()
    return World(group.rank(), group.size(), device, group, C10d(group, store, timeout=timeout))


def new_group(process_group: dist.ProcessGroup | None = None, *, timeout: float) -> C10d:
    """Create a gloo group of all ranks, or those of a group, for transfers concurrent with training. Collective."""
    store = dist.distributed_c10d._get_default_store()
    return clone_group(C10d(process_group or _world_group(), store, timeout=timeout), backend="gloo")


def clone_group(transport: C10d, *, backend: str | None = None, urgent: bool = False) -> C10d:
    """Create another group of the same ranks, whose transfers are independent of the first. Collective.

    `urgent`: on GPUs, its kernels start before those of compute; the others use few SMs.
    """
    ranks = dist.get_process_group_ranks(transport.group)
    on_device = transport.device.type != "cpu" and backend is None
    timeout = _group_timeout(transport.device, transport.timeout)
    with exit_on_hang(transport.peers, "opening a group", transport.timeout), few_connections(len(ranks)):
        part = len(ranks) < dist.get_world_size()  # other ranks do not take part
        group = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=_nccl_options(urgent=urgent) if on_device else None,
            use_local_synchronization=part,
        )
        assert isinstance(group, dist.ProcessGroup)
        _connect_ring(group)
    return C10d(group, transport.peers.store, timeout=transport.timeout)


def _connect_ring(group: dist.ProcessGroup) -> None:
    """Connect the neighbours of a group that connects on demand, while a hang ends the process.

    All-reduces and all-gathers use no other pairs. Later, a dead neighbour is noticed at once.
    """
    if dist.get_backend(group) == "gloo" and connects_on_demand(group.size()):
        dist.all_reduce(torch.zeros(1), group=group)


def _nccl_options(*, urgent: bool) -> Any:
    """Return the options of a communicator: urgent ones have a stream of high priority, deferred ones few CTAs."""
    options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
    options.is_high_priority_stream = urgent
    if not urgent:
        options.config.max_ctas = _DEFERRED_CTAS
    return options


def _group_timeout(device: torch.device, seconds: float) -> timedelta:
    """Return the timeout of a group. NCCL's watchdog ends the process and names no rank, so it comes last."""
    return timedelta(seconds=seconds if device.type == "cpu" else seconds + DEVICE_SLACK_SECONDS)


def _world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def host_of_each_rank(transport: C10d) -> HostLayout:
    """Return the host of each rank. A network namespace counts as a host. Collective."""
    own = torch.tensor(int.from_bytes(hashlib.sha256(_host().encode()).digest()[:7], "big"))
    if transport.device.type != "cpu":
        names = transport.all_gather(own.to(transport.device), name="hosts").wait_on_host()
    else:
        tree, peers = TreeCollectives(GlooWire(transport.group)), transport.peers
        with peers.guard("hosts"):
            gathering = BackgroundWork(lambda: tree.all_gather(own), name="gathering of hosts")
            names = gathering.wait(transport.timeout, peers.raise_if_peer_failed)
    return HostLayout.of(names.tolist())


def destroy_world() -> None:
    """Destroy the default process group."""
    dist.destroy_process_group()


@contextlib.contextmanager
def exit_on_hang(peers: Peers, operation: str, timeout: float) -> Iterator[None]:
    """Guard calls that connect ranks. If a rank dies meanwhile, gloo may hang forever: then the process exits."""
    ended = threading.Event()
    threading.Thread(target=_watchdog, args=(peers, operation, timeout, ended), daemon=True).start()
    with peers.guard(operation):
        try:
            yield
        finally:
            ended.set()


def _watchdog(peers: Peers, operation: str, timeout: float, ended: threading.Event) -> None:
    """Exit the process if the call hangs beyond the timeout, or when another rank failed."""
    until = time.monotonic() + timeout + _SLACK_SECONDS
    if ended.wait(POLL_SECONDS):
        return
    stuck: Exception | None = None
    with contextlib.suppress(RuntimeError):  # the call may wait in the store, and then its connection answers no other
        clone = call_with_timeout(lambda: peers.store.clone(), POLL_SECONDS)  # type: ignore[attr-defined]
        peers = replace(peers, store=clone or peers.store)
    while stuck is None:
        try:
            peers.raise_if_peer_failed()
        except RuntimeError as error:
            stuck = error
        if time.monotonic() > until:
            stuck = RuntimeError("gloo did not end in time")
        if stuck is None and ended.wait(POLL_SECONDS):
            return
    if ended.wait(POLL_SECONDS / 2):  # the call fails by itself
        return
    error = peers.transport_error(operation, stuck)
    logger.error("%s", error)
    os._exit(error.exit_code)


def _host() -> str:
    """Return FREESCALE_HOST, else an id of the boot and the network namespace, which scopes abstract sockets."""
    if name := os.environ.get("FREESCALE_HOST"):
        return name
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return boot + os.readlink("/proc/self/ns/net")
    return platform.node()


def _from_torchrun() -> tuple[int, int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))


def _from_slurm() -> tuple[int, int, int]:
    if "SLURM_PROCID" not in os.environ:
        return 0, 1, 0
    return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_LOCALID"])


def _store(rank: int, world_size: int, timeout: float) -> dist.Store:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "29500")
    if not host:
        remedy = "in the job script: export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1)"
        raise UsageError("several ranks were started, but MASTER_ADDR does not say where they meet", remedy=remedy)
    # torchrun's agent already serves a store.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, int(port), world_size, serves, timedelta(seconds=timeout), wait_for_workers=False)
    except RuntimeError as error:
        what = f"rank {rank} of {world_size} cannot meet the others at {host}:{port}"
        remedy = "see that MASTER_ADDR and MASTER_PORT name rank 0's host and that nothing blocks that port"
        raise TransportError(what, where=reason(error), remedy=remedy) from error
    return dist.PrefixStore(store_prefix(restart_count()), store)
