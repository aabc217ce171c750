"""Checks that hosts that leave and join keep the training result, and that a launcher does not grow with restarts.

    python benchmarks/elastic.py sizes [--ranks 4] [--steps 240] [--out FILE.json]
    python benchmarks/elastic.py soak [--minutes 30] [--every 60] [--out FILE.json]

sizes: 4 ranks lose 2, then a third and a fourth join again, each with an agent of its own; in fp64 the result is that
of 4 undisturbed ranks to 1e-9. soak: training under one fault a minute; memory, descriptors and threads of the
launcher, of the process that ranks are forked from and of ranks of the same age, and the files of the run, must not
grow.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freescale.checkpoint import checkpoints
from freescale.checkpoint.run_folder import checkpoint_path
from freescale.checkpoint.tensor_files import LocalRows, read_json
from record import save
from watched import WatchedRun, make_data

RECIPE = ["train", "tiny", "--train.epochs", "999", "--train.log-every", "1", "--train.timeout", "20"]
SERVES = "this host serves the store"
WATCHED = ("agent", "nursery", "rank")
SAMPLE_AT_SECONDS = 15.0
"""After a start, when ranks of every generation have done the same."""


def learnt(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Return all tensors of a checkpoint, by default the newest, concatenated over the ranks that wrote them."""
    folder = run / "checkpoints"
    checkpoint = checkpoints.complete_checkpoints(folder)[-1] if step is None else checkpoint_path(folder, step)
    shapes: dict[str, tuple[torch.dtype, list[int]]] = {}
    for path in checkpoint.glob("rank-*.json"):
        for piece in read_json(path):
            shapes[piece["name"]] = getattr(torch, piece["dtype"]), [piece["rows"], *piece["shape"]]
    names = [name for name in shapes if not name.startswith("generator")]
    parts = {n: LocalRows.whole(torch.zeros(shapes[n][1], dtype=shapes[n][0]), replicated=True) for n in names}
    checkpoints.load(checkpoint, parts)
    return {name: part.local.numpy() for name, part in parts.items()}


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the largest relative difference of two sets of tensors, in norm. 0: they are bitwise equal."""
    assert a.keys() == b.keys()
    if all(a[n].tobytes() == b[n].tobytes() for n in a):
        return 0.0
    return max(float(np.linalg.norm(a[n] - b[n]) / max(np.linalg.norm(a[n]), 1e-300)) for n in a)


def sizes(folder: Path, ranks: int, steps: int) -> dict[str, Any]:
    """Train on 4 -> 2 -> 3 -> 4 ranks, by hosts that leave and join."""
    data = make_data(folder / "data")
    words = [*RECIPE, "--train.max-steps", str(steps), "--train.save-every", "4", "--train.precision", "fp64"]
    words += ["--data", str(data), "--data.global-batch", "96", "--model.dim", "64", "--restarts", "9"]
    one_thread = {"OMP_NUM_THREADS": "1"}  # each; the hosts share this machine
    calm = WatchedRun(folder / "calm", [*words, "--nproc", str(ranks)], **one_thread)
    assert calm.ended() == 0, calm.said
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    elastic = [*words, "--nproc", "1", "--hosts", f"1:{ranks}", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    run = folder / "elastic"
    agents = [WatchedRun(run, elastic, **one_thread) for _ in range(ranks)]
    for agent in agents:
        agent.wait_for_ranks(1)
    agents.sort(key=lambda agent: SERVES not in agent.said)
    first = agents[0]
    assert SERVES in first.said, first.said
    _wait_for_steps(first, 8)
    for lost in agents[ranks // 2 :]:
        os.killpg(lost.agent, signal.SIGKILL)
    del agents[ranks // 2 :]
    while len(agents) < ranks:
        _wait_until(lambda: f"resumed on {len(agents)} ranks" in first.said, first)
        _wait_for_steps(first, 8)
        agents.append(WatchedRun(run, elastic, **one_thread))
    codes = [agent.ended() for agent in agents]
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    apart = largest_difference(learnt(folder / "calm"), learnt(run))
    return {
        "exit_codes": codes,
        "ranks": [int(line.split()[3]) for line in first.said.splitlines() if line.startswith("warning: resumed on ")],
        "told": [line for line in first.said.splitlines() if "ranks restart" in line],
        "recoveries_s": [round(entry["seconds"], 1) for entry in entries if entry["kind"] == "recovery"],
        "steps_once_each": [e["step"] for e in entries if e["kind"] == "train"] == list(range(1, steps + 1)),
        "largest_relative_difference": apart,
    }


def _wait_for_steps(run: WatchedRun, count: int) -> None:
    begun = run.said.count("\nstep ")
    _wait_until(lambda: run.said.count("\nstep ") >= begun + count, run)


def _wait_until(met: Callable[[], bool], run: WatchedRun) -> None:
    until = time.monotonic() + 120
    while not met():
        assert time.monotonic() < until, f"the hosts did not get where they should: {run.said[-2000:]}"
        time.sleep(0.01)


def soak(folder: Path, minutes: float, every: float) -> dict[str, Any]:
    """Inject one fault a minute; after each, measure ranks of the same age."""
    data = make_data(folder / "data")
    endless = ["--train.epochs", "1000000", "--train.max-steps", "10000000", "--restarts", "100000"]
    words = [*RECIPE, *endless, "--data", str(data), "--nproc", "2", "--train.save-every", "40"]
    run = WatchedRun(folder / "run", words)
    random, seen, files = np.random.default_rng(0), [], []
    run.wait_for(1)
    hit = time.monotonic()
    until = hit + 60 * minutes
    while time.monotonic() < until:
        begun = run.said.count("recovered in")
        time.sleep(min(every, SAMPLE_AT_SECONDS))
        ranks = run.ranks()
        files.append(files_of(folder / "run"))
        held = zip(WATCHED, (run.agent, parent(ranks[0]), ranks[0]), strict=True)
        seen.append({**{who: usage(process) for who, process in held}, "files": files[-1].total()})
        print(json.dumps(seen[-1]), flush=True)
        time.sleep(max(0.0, hit + every - time.monotonic()))
        hit = time.monotonic()
        kind = signal.SIGKILL if random.random() < 0.8 else signal.SIGSTOP
        with contextlib.suppress(IndexError, ProcessLookupError):  # ranks that were slow to end may just start again
            os.kill(run.ranks()[int(random.integers(2))], kind)
        while run.said.count("recovered in") == begun and time.monotonic() < hit + 180:
            time.sleep(0.1)
    os.kill(run.agent, signal.SIGTERM)
    code = run.ended()
    first, last = seen[0], seen[-1]
    grown = {f"{who} {what}": [first[who][what], last[who][what]] for who in WATCHED for what in first[who]}
    grown["files"] = [first["files"], last["files"]]
    figures = {"minutes": minutes, "exit_code": code, "faults": len(seen), "first_and_last": grown}
    return figures | {"new_files": files[-1] - files[0], "seen": seen}


def files_of(folder: Path) -> Counter[str]:
    """Count all files by name, without the step of a checkpoint."""
    found = [os.path.relpath(Path(where) / name, folder) for where, _, names in os.walk(folder) for name in names]
    return Counter(re.sub(r"step-\d+", "step-N", name) for name in found)


def parent(pid: int) -> int:
    """Return the process that a rank was forked from."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def usage(pid: int) -> dict[str, float]:
    """Return memory, descriptors and threads of a process."""
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return {
        "memory_mb": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sizes", "soak"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        soaks = options.what == "soak"
        found = soak(place, options.minutes, options.every) if soaks else sizes(place, options.ranks, options.steps)
    print(json.dumps({name: value for name, value in found.items() if name != "seen"}), flush=True)
    save(options.out, [found])


if __name__ == "__main__":
    main()
