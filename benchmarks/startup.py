"""How long many ranks take to start, train a few steps and end, and how many sockets each holds.

    python benchmarks/startup.py [--ranks 2 4 16 64] [--out benchmarks/results/startup.json]

Processes of the real trainer on loopback, with replicated tables, so that no rows move: hosts of 8 ranks, samples
placed in groups of 16. `on demand`: pairs of ranks connect when they first send. `all pairs`: they connect with each
group. A phase ends when the last rank is through. Sockets are counted in /proc after the last step, and by the code
that decides who talks to whom.

Before that, sockets and messages of a rank among 16,384: that code over a wire that only counts.
"""

import argparse
import contextlib
import json
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor

from freescale.balance.rank_groups import RankGroups
from freescale.bubbles.clock import measure_along_tree
from freescale.config import BalanceConfig, DataConfig, ModelConfig, RunConfig, TablesConfig, TrainConfig
from freescale.connections import TreeCollectives
from freescale.data import synthetic
from freescale.train.build import build
from freescale.transport.base import CompletedWork, Peers
from freescale.transport.host_layout import HostLayout
from freescale.transport.two_level import TwoLevelTransport
from freescale.transport.world import destroy_world, init_world
from record import save

PHASES = ("processes up", "group joined", "trainer built", "first step", "other steps", "ended")
RANKS_PER_HOST, GROUP_RANKS, TIMEOUT = 8, 16, 500.0
MODES = {"on demand": "1", "all pairs": "0"}


def connected_sockets() -> int:
    """Return the number of TCP connections that this process holds."""
    targets = list[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing
            targets.append(os.readlink(entry))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = "0A"
    return len({f"socket:[{line[9]}]" for line in lines if line[3] != listening} & set(targets))


def config_for(data: Path, ranks: int, steps: int) -> RunConfig:
    return RunConfig(
        data=DataConfig(path=str(data), global_batch=2 * ranks, max_history=20, shards=max(64, ranks)),
        model=ModelConfig(dim=16, layers=1),
        balance=BalanceConfig(mode="on", group_ranks=GROUP_RANKS),
        tables=TablesConfig(placement="replicated"),
        train=TrainConfig(max_steps=steps, epochs=steps, log_every=5, timeout=TIMEOUT),
    )


def train(rank: int, ranks: int, port: int, mode: str, began: float, data: Path, runs: Path, steps: int) -> None:
    """Train on one rank; write when each of its phases ended, and its sockets."""
    ended = [time.monotonic() - began]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": MODES[mode]}
    os.environ["FREESCALE_HOST"] = str(rank // RANKS_PER_HOST)
    torch.set_num_threads(1)
    world = init_world(timeout=TIMEOUT)
    ended.append(time.monotonic() - began)
    trainer = build(config_for(data, ranks, steps), world, runs, quiet=True)
    ended.append(time.monotonic() - began)
    run, times, held = trainer.components.step.run, list[float](), list[int]()

    def timed(*words: Any, **more: Any) -> Any:
        state = run(*words, **more)
        times.append(time.monotonic() - began)
        if len(times) == steps:  # ranks that end close theirs
            held.append(connected_sockets())
        return state

    trainer.components.step.run = timed  # type: ignore[method-assign]
    trainer.fit()
    ended += [times[0], times[-1]]
    trainer.close()
    destroy_world()
    ended.append(time.monotonic() - began)
    facts = {"ended": ended, "sockets": held[0], "steps": len(times)}
    (runs / f"rank-{rank}.json").write_text(json.dumps(facts))


def measured(ranks: int, mode: str, data: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Start ranks, train and end; return the seconds of each phase and the sockets of a rank."""
    runs = folder / f"{ranks}-{mode.replace(' ', '-')}"
    runs.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    words = ranks, port, mode, began, data, runs, steps
    mp.start_processes(train, words, ranks, start_method="forkserver")
    facts = [json.loads((runs / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    ends = np.array([fact["ended"] for fact in facts]).max(axis=0)
    connected = [fact["sockets"] for fact in facts]
    connected[0] -= ranks  # those of the store, which rank 0 serves
    return {
        "ranks": ranks,
        "mode": mode,
        "steps": min(fact["steps"] for fact in facts),
        "seconds": dict(zip(PHASES, np.diff(ends, prepend=0.0).round(2).tolist(), strict=True)),
        "total_seconds": round(time.monotonic() - began, 2),
        "sockets": {"mean": float(np.mean(connected)), "most": max(connected), "of_the_store": ranks},
        "counted": expected_sockets(ranks, mode),
    }


def expected_sockets(ranks: int, mode: str) -> dict[str, float]:
    """Return the sockets that these ranks should hold: those of each group, and one of the store."""
    options: dict[str, Any] = {"sharded": False, "group_ranks": GROUP_RANKS, "clocks": False}
    every = [groups_of(rank, ranks, **options) for rank in range(ranks)]
    sizes = {"samples in a group": GROUP_RANKS, "samples between groups": -(-ranks // GROUP_RANKS)}
    held = [
        1 + sum(len(others) if mode == "on demand" else sizes.get(name, ranks) - 1 for name, others in groups.items())
        for groups in every
    ]
    return {"mean": float(np.mean(held)), "most": max(held)}


class CountingWire:
    """A wire that counts messages and moves nothing."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.messages = rank, ranks, Counter[int]()

    def send(self, _: Tensor, to: int) -> None:
        """Count a message to a rank."""
        self.messages[to] += 1

    def receive(self, _: Tensor, source: int) -> None:
        """Count the connection. The sender counts the message."""
        self.messages[source] += 0


class CountingTransport:
    """A transport in which every rank does what this one does: it counts messages to others, and moves nothing."""

    timeout = 60.0

    def __init__(self, rank: int, ranks: int) -> None:
        self.peers = Peers(rank, ranks, torch.distributed.HashStore())
        self.messages = Counter[int]()

    def all_to_all(
        self, rows: Tensor, send: Sequence[int], receive: Sequence[int], *, name: str, **_: Any
    ) -> CompletedWork[Tensor]:
        """Count a message to each rank with rows."""
        self.messages.update(rank for rank, count in enumerate(send) if count and rank != self.peers.rank)
        own = [*rows.split([*send])][self.peers.rank]
        if name.startswith("sizes"):  # the others send what this rank would send to itself
            return CompletedWork(own.repeat(self.peers.world_size))
        return CompletedWork(rows.new_empty(sum(receive), *rows.shape[1:]))


def two_level_counts(layout: HostLayout, rank: int, turns: int = 1) -> tuple[Counter[int], Counter[int]]:
    """Return the messages that a rank sends to others of its host, and to other hosts, when all have rows for all."""
    ranks, own = len(layout.host_of), layout.ranks[layout.host_of[rank]]
    near, far = CountingTransport(own.index(rank), len(own)), CountingTransport(rank, ranks)
    connected: list[int] = []
    transport: Any = TwoLevelTransport(layout, near, far, connect=connected.extend)  # type: ignore[arg-type]
    for turn in range(turns):
        rotated = transport.rotated(turn)
        rotated.all_to_all(torch.zeros(ranks, 1), [1] * ranks, [1] * ranks, name="rows").wait()
    assert set(connected) == set(far.messages), "what is connected ahead is what sends"
    return near.messages, far.messages


def tree_counts(rank: int, ranks: int, run: Callable[[Any], object]) -> Counter[int]:
    """Return the messages of a rank in a collective along a tree."""
    wire = CountingWire(rank, ranks)
    run(wire)
    return wire.messages


def broadcast_peers(rank: int, ranks: int) -> set[int]:
    """Return the ranks that one exchanges messages with in a broadcast of gloo, by which DDP begins."""
    pairs = [(child - (1 << child.bit_length() - 1), child) for child in range(1, ranks)]
    return {a + b - rank for a, b in pairs if rank in (a, b)}


def groups_of(rank: int, ranks: int, *, sharded: bool, group_ranks: int, clocks: bool) -> dict[str, set[int]]:
    """Return the ranks that one connects to in each group. `clocks`: every host has one."""
    layout = HostLayout.of([other // RANKS_PER_HOST for other in range(ranks)])
    far = set(two_level_counts(layout, rank)[1]) if sharded else set()
    ring = {(rank - 1) % ranks, (rank + 1) % ranks} - {rank}
    tree = set(tree_counts(rank, ranks, lambda wire: TreeCollectives(wire).all_gather(torch.zeros(()))))
    leaders = [of_host[0] for of_host in layout.ranks] if clocks else [0]
    clock = tree_counts(rank, ranks, lambda wire: measure_along_tree(wire, leaders)) if rank in leaders else set()
    hosts = tree if sharded or group_ranks < ranks else set()  # else they are gathered in the group of samples
    groups = {
        "rows, dense gradients, hosts": ring | hosts | broadcast_peers(rank, ranks) | far,
        "checkpoints": ring,
        "records and clocks": tree | set(clock),
    }
    if sharded:
        groups["deferred rows"] = ring | far
    if group_ranks >= ranks:
        return groups | {"samples": set(range(ranks)) - {rank}}
    of_hosts = RankGroups.of_hosts(np.array(layout.host_of), group_ranks)
    inside, column = of_hosts.members(of_hosts.group[rank]).tolist(), of_hosts.column(rank).tolist()
    return groups | {"samples in a group": {*inside} - {rank}, "samples between groups": {*column} - {rank}}


def counted(rank: int, ranks: int) -> dict[str, Any]:
    """Return the connections and the messages of a rank, with both levels, one width of rows, and overlap."""
    layout = HostLayout.of([other // RANKS_PER_HOST for other in range(ranks)])
    near, far = two_level_counts(layout, rank)
    groups = groups_of(rank, ranks, sharded=True, group_ranks=256, clocks=True)
    connections = {name: len(others) for name, others in groups.items()}
    leaders = [of_host[0] for of_host in layout.ranks]

    def sent(run: Callable[[Any], object]) -> int:
        return tree_counts(rank, ranks, run).total()

    return {
        "rank": rank,
        "ranks": ranks,
        "connections": connections | {"store": 1},
        "sockets": sum(connections.values()) + 1,
        "sockets_all_pairs": len(connections) * (ranks - 1) + 1,
        "sockets_inside_the_host": 2 * len(near),
        "messages": {
            "rows to other hosts": far.total(),
            "rows to ranks of the host": near.total(),
            "hosts, at the start": sent(lambda wire: TreeCollectives(wire).all_gather(torch.zeros(()))),
            "arrivals": sent(lambda wire: TreeCollectives(wire).all_reduce(torch.zeros(1024), torch.maximum)),
            "records": sent(lambda wire: TreeCollectives(wire).reduce(torch.zeros(256, 20), torch.add)),
            "clocks": sent(lambda wire: measure_along_tree(wire, leaders)) if rank in leaders else 0,
        },
        "steps_of_a_tree": 2 * (ranks - 1).bit_length(),
        "steps_of_a_ring": 2 * (ranks - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--count", type=int, default=16_384)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    of_ranks = [0, 1, RANKS_PER_HOST, options.count // 2, options.count - 1]
    results += [counted(rank, options.count) for rank in of_ranks]
    print(json.dumps(results[0], indent=1), flush=True)
    mp.set_forkserver_preload(["torchrec", "freescale.train.build"])  # as the launcher does it
    with tempfile.TemporaryDirectory() as folder:
        synthetic.write_log(Path(folder) / "data", "ml1m", users=2_000, catalogue=200, shorter=4)
        for ranks in options.ranks:
            for mode in options.modes:
                results.append(measured(ranks, mode, Path(folder) / "data", Path(folder), options.steps))
                print(json.dumps(results[-1]), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
