"""How long an urgent exchange takes while 64 MB that may wait are on their way between the same two hosts.

    python benchmarks/overtaking.py --out benchmarks/results/overtaking.json

Two hosts (network namespaces) with a shaped link, one rank each. 256 KB are exchanged alone; behind 64 MB in the same
process group; beside 64 MB in another group; and beside 64 MB in chunks between which the sender yields to urgent
exchanges, as prioritized embedding communication sends them.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.support.lab import lab
from torch import Tensor

from freescale.transport.chunked import CHUNK_BYTES, ChunkedTransport
from freescale.transport.world import World, clone_group
from processes import on_ranks
from record import save

RANKS = 2


def overtaking(world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the milliseconds of an urgent exchange: alone, and while deferred ones are on their way in three ways."""
    urgent = world.transport
    other = clone_group(urgent)
    small = torch.zeros(options.urgent_bytes // 4 // RANKS * RANKS)
    large = torch.zeros(options.deferred_bytes // 4 // RANKS * RANKS)

    def exchange(transport: Any, values: Tensor) -> None:
        halves = [len(values) // RANKS] * RANKS
        transport.all_to_all(values, halves, halves, name="bytes").wait()

    def timed() -> int:
        began = time.perf_counter_ns()
        exchange(urgent, small)
        return time.perf_counter_ns() - began

    def while_deferred(transport: Any) -> int:
        thread = threading.Thread(target=exchange, args=(transport, large))
        thread.start()
        time.sleep(0.05)
        took = timed()
        thread.join()
        return took

    def median(function: Callable[..., int], *words: Any) -> float:
        """Each exchange ends when the last rank has what it waits for."""
        took = [urgent.max(function(*words), name="nanoseconds") for _ in range(options.repeats)]
        return round(statistics.median(took) / 1e6, 2)

    exchange(other, small)
    return {
        "urgent_kb": options.urgent_bytes // 1024,
        "deferred_mb": options.deferred_bytes >> 20,
        "alone_ms": median(timed),
        "same_group_ms": median(while_deferred, urgent),
        "two_groups_ms": median(while_deferred, other),
        "chunked_ms": median(while_deferred, ChunkedTransport(other, urgent=urgent)),
        "chunk_ms": round(1e3 * CHUNK_BYTES["cpu"] / RANKS * 8 / (options.mbit * 1e6), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=2000, help="of the link between the hosts")
    parser.add_argument("--urgent-bytes", type=int, default=256 << 10)
    parser.add_argument("--deferred-bytes", type=int, default=64 << 20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with lab(RANKS) as hosts:
        hosts.shape(options.mbit)
        result = on_ranks(overtaking, RANKS, options, lab=hosts)
    print(json.dumps(result))
    save(options.out, [result])


if __name__ == "__main__":
    main()
