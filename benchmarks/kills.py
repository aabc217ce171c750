"""Do all other ranks name a rank that is killed at any moment, and does nothing of it stay behind?

    python benchmarks/kills.py [--kills 100] [--timeout 10] [--ways two_level] [--out FILE.json]

Seeded: how many ranks, which way their bytes take, who is killed (-9) and when, from before it has joined to amid
transfers of both lanes. The others must end with an error that names it within the timeout of a wait (and the moment
of grace in which they ask who is there). Then no process, shared memory or socket may be left, and the next run starts
at the same port. Last, a run without a kill. With two_level the ranks are on two hosts, and who is killed leads one.
"""

import argparse
import io
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from freescale.errors import TransportError
from freescale.transport.host_layout import HostLayout
from freescale.transport.selection import TWO_LEVEL, TransportFactory
from freescale.transport.world import destroy_world, init_world
from record import save

LANES = 2
GRACE_SECONDS = 5.0
WAYS = ("c10d", "host_staged", "shared_memory")


def halves(ranks: int) -> HostLayout:
    """Return two hosts."""
    return HostLayout.of([2 * rank // ranks for rank in range(ranks)])


class PipeWriter(io.StringIO):
    """Sends the stderr of a rank to the benchmark."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def write(self, text: str) -> int:
        if " failed on rank " in text:  # also as `logging` writes it without a handler
            self._pipe.send(text[text.find("error: ") + len("error: ") :] if "error: " in text else text)
        return len(text)


def rank_of(rank: int, ranks: int, port: int, setting: dict[str, Any], pipe: Connection) -> None:
    """Exchange rows in both lanes and report how it ended."""
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if setting["way"] == TWO_LEVEL:
        os.environ["FREESCALE_HOST"] = str(halves(ranks).host_of[rank])
    torch.set_num_threads(1)
    sys.stderr = PipeWriter(pipe)  # whoever cannot even join says so there, and ends
    try:
        world = init_world(timeout=setting["timeout"])
        factory = TransportFactory(world)
        create = factory.create_two_level if setting["way"] == TWO_LEVEL else partial(factory.create, setting["way"])
        urgent = create()
        lanes = [urgent, create(urgent=urgent)]
        for number in range(setting["exchanges"]):
            rows = int(np.random.default_rng((setting["seed"], number)).integers(1, 300_000))
            counts = [rows] * ranks
            got = lanes[number % LANES].all_to_all(torch.arange(rows * ranks), counts, counts, name="rows").wait()
            assert torch.equal(got.view(ranks, rows)[0], torch.arange(rows) + rank * rows)
        destroy_world()
        pipe.send("done")
    except TransportError as error:
        pipe.send(str(error))
        os._exit(5)  # a lost group takes its time to end by itself


def trial(seed: int, port: int, timeout: float, ways: list[str], *, kill: bool = True) -> dict[str, Any]:
    """One run, in which one rank is killed."""
    random = np.random.default_rng(seed)
    ranks, way = int(random.integers(2, 5)), str(random.choice(ways))
    leaders = [halves(ranks).leader(host, 1 - host, 0) for host in (0, 1)]
    victim = int(random.choice(leaders if way == TWO_LEVEL else range(ranks)))
    after = float(random.uniform(0.0, 1.5))
    setting = {"seed": seed, "way": way, "timeout": timeout, "exchanges": 1_000_000 if kill else 40}
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes, pipes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=rank_of, args=(rank, ranks, port, setting, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    if kill:
        time.sleep(after)
        processes[victim].kill()
    began = time.monotonic()
    told = {rank: _receive(pipes[rank], timeout + GRACE_SECONDS) for rank in range(ranks) if rank != victim or not kill}
    seconds = time.monotonic() - began
    for process in processes:
        process.join(5)
    alive = [process.pid for process in processes if process.is_alive()]
    del store
    wrong = [text for text in told.values() if text != "done" and not text.split("\n")[0].endswith(f"answer: {victim}")]
    return {
        "seed": seed,
        "ranks": ranks,
        "way": way,
        "victim": victim if kill else None,
        "after_s": round(after, 2),
        "named_s": round(seconds, 2),
        "operation": next(iter(told.values())).split(" failed")[0],
        "ok": not wrong and not alive and ("done" in told.values()) != kill,
        "said": wrong,
        "alive": alive,
    }


def _receive(pipe: Connection, seconds: float) -> str:
    try:
        return pipe.recv() if pipe.poll(seconds) else "nothing in time"
    except EOFError:
        return "ended without a word"


def left_behind() -> dict[str, int]:
    """Count what a process can leave: shared memory files and abstract sockets."""
    sockets = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    return {"shared memory": len(os.listdir("/dev/shm")), "sockets": sum(" @" in line for line in sockets)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch", "freescale.transport.selection", "__main__"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trial(-1 & 0xFFFF, port, options.timeout, options.ways, kill=False)  # the fork server is up
    before = left_behind()
    kills = []
    for seed in range(options.kills):
        kills.append(trial(seed, port, options.timeout, options.ways))
        print(json.dumps(kills[-1]), flush=True)
    last = trial(options.kills, port, options.timeout, options.ways, kill=False)
    times = [kill["named_s"] for kill in kills]
    summary = {
        "kills": len(kills),
        "named_in_time": sum(kill["ok"] for kill in kills),
        "seconds_median": statistics.median(times),
        "seconds_most": max(times),
        "left_behind": {name: left_behind()[name] - count for name, count in before.items()},
        "next_run_ends": last["ok"],
        "moments": {name: sum(k["operation"] == name for k in kills) for name in {k["operation"] for k in kills}},
    }
    print(json.dumps(summary), flush=True)
    save(options.out, [summary, *kills])


if __name__ == "__main__":
    main()
