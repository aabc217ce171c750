"""Does every transport deliver what gloo delivers, how long does it take, and how much CPU?

    python benchmarks/transport.py [--exchanges 2000] [--large 3] [--ranks 2 4 8] [--turns 8] [--out FILE.json]

Exactness: random uneven exchanges, zeros and single rows among them, of every dtype that is used, and a few with a
message above 2 GiB; each way's result against gloo's, bit by bit. Time and CPU: even exchanges of 1 to 64 MB a rank on
one host, by gloo and through shared memory in turns; CPU is that of all threads of both ranks. Staged: through buffers
of the host, in pieces, against gloo's bare all-to-all of the same bytes, between two hosts by shaped links (needs
root).
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.lab import lab

from freescale.transport.base import Transport
from freescale.transport.selection import TransportFactory
from freescale.transport.world import World
from processes import on_ranks
from record import save

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
SHAPES = ((), (1,), (3,), (64,), (2, 5))
LARGE_ROWS = (1 << 28) + 4097
"""Of 8 bytes each: slightly above 2 GiB."""


def exchanges(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Run random exchanges over every transport; count those that differ from gloo's bitwise."""
    factory = TransportFactory(world)
    opened = {name: factory.create(name) for name in factory.available if name != "c10d"}
    wrong = dict.fromkeys(opened, 0)
    for number in range(options.exchanges):
        rows, send, receive = _drawn(world, number)
        _compare(world, opened, rows, send, receive, wrong)
    for number in range(options.large):
        _compare(world, opened, *_large(world, number, options.large_rows), wrong)
    counts = [world.transport.sum(count, name="wrong") for count in wrong.values()]
    return {
        "ranks": world.world_size,
        "exchanges": options.exchanges,
        "above_2_gib": options.large,
        "wrong": dict(zip(wrong, counts, strict=True)),
        "impossible": factory.unavailable,
    }


def _compare(
    world: World,
    ways: Mapping[str, Transport],
    rows: torch.Tensor,
    send: list[int],
    receive: list[int],
    wrong: dict[str, int],
) -> None:
    expected = world.transport.all_to_all(rows, send, receive, name="expected").wait()
    for name, transport in ways.items():
        got = transport.all_to_all(rows, send, receive, name=name).wait()
        wrong[name] += not (got.dtype == expected.dtype and torch.equal(got, expected))


def _drawn(world: World, number: int) -> tuple[torch.Tensor, list[int], list[int]]:
    random = np.random.default_rng(number)
    most, square = int(random.choice([1, 2, 30, 1000, 8000])), (world.world_size, world.world_size)
    splits = random.integers(0, most + 1, square) * random.integers(0, 2, square)
    send, receive = splits[world.rank].tolist(), splits[:, world.rank].tolist()
    dtype, shape = DTYPES[number % len(DTYPES)], SHAPES[number % len(SHAPES)]
    own = np.random.default_rng((number, world.rank))
    values = own.integers(0, 2 if dtype == torch.bool else 200, (sum(send), *shape))
    return torch.from_numpy(values).to(dtype), send, receive


def _large(world: World, number: int, rows: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return one message above 2 GiB from a rank to the next, and a few rows between all others."""
    splits = np.full((world.world_size, world.world_size), 3)
    splits[number % world.world_size, (number + 1) % world.world_size] = rows
    send, receive = splits[world.rank].tolist(), splits[:, world.rank].tolist()
    return torch.arange(sum(send)) * 0x9E3779B97F4A7C15 + world.rank, send, receive


def speed(world: World, megabytes: int, names: tuple[str, str], turns: int) -> dict[str, Any]:
    """Compare two transports, interleaved, and the first with itself: milliseconds and CPU of an exchange."""
    factory = TransportFactory(world)
    opened = {name: factory.create(name) for name in names} | {"again": world.transport}
    counts = [(megabytes << 18) // world.world_size] * world.world_size
    rows = torch.rand(sum(counts))
    times = max(2, 128 // megabytes)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in opened}
    for transport in opened.values():
        transport.all_to_all(rows, counts, counts, name="warm").wait()
    for _ in range(turns):
        for name, transport in opened.items():
            taken[name].append(_taken(world, transport, rows, counts, times))
    wall, cpu = ({name: statistics.median(t[i] for t in taken[name]) for name in opened} for i in (0, 1))
    baseline, other = names
    return {
        "megabytes": megabytes,
        **{f"{name}_ms": round(wall[name], 3) for name in names},
        **{f"{name}_cpu_ms": round(cpu[name], 3) for name in names},
        "time_ratio": round(wall[other] / wall[baseline], 3),
        "time_ratio_same": round(wall["again"] / wall[baseline], 3),
        "cpu_ratio": round(cpu[other] / cpu[baseline], 3),
        "cpu_ratio_same": round(cpu["again"] / cpu[baseline], 3),
    }


def _taken(
    world: World, transport: Transport, rows: torch.Tensor, counts: list[int], times: int
) -> tuple[float, float]:
    """Return milliseconds of the slowest rank and CPU of all ranks, per exchange."""
    world.transport.sum(0, name="meet")
    began, busy = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(times):
        transport.all_to_all(rows, counts, counts, name="bytes").wait()
    took, spent = time.perf_counter_ns() - began, time.process_time_ns() - busy
    slowest = world.transport.max(took, name="took")
    return slowest / times / 1e6, world.transport.sum(spent, name="spent") / times / 1e6


def staged(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare host staging with gloo, between two hosts."""
    found = []
    with lab(2) as hosts:
        for mbit in options.mbit:
            hosts.shape(mbit)
            for megabytes in options.staged_megabytes:
                names = ("c10d", "host_staged")
                found.append({"mbit": mbit} | on_ranks(speed, 2, megabytes, names, options.turns, lab=hosts))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--exchanges", type=int, default=2000)
    parser.add_argument("--large", type=int, default=3, help="exchanges with a message above 2 GiB")
    parser.add_argument("--large-rows", type=int, default=LARGE_ROWS, help="of 8 bytes, in such a message")
    parser.add_argument("--megabytes", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--mbit", type=float, nargs="*", default=[500.0, 2000.0])
    parser.add_argument("--staged-megabytes", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = [{"exact": on_ranks(exchanges, ranks, options)} for ranks in options.ranks]
    names = ("c10d", "shared_memory")
    results += [{"shared_memory": on_ranks(speed, 2, size, names, options.turns)} for size in options.megabytes]
    results += [{"host_staged": one} for one in (staged(options) if options.mbit else [])]
    for result in results:
        print(json.dumps(result), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
