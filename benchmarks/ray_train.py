"""Trains inside Ray Train's TorchTrainer on a local Ray cluster, and kills a worker.

    python benchmarks/ray_train.py [--workers 2 4] [--out FILE.json]

Needs `pip install 'freescale[ray]'`. For each number of workers: the losses of every step and the weights must be
bitwise those of our launcher with as many ranks, also if a worker is killed with SIGKILL and Ray starts all again.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray  # type: ignore[import-not-found]
import ray.train  # type: ignore[import-not-found]
import ray.train.torch  # type: ignore[import-not-found]

import record
from elastic import largest_difference, learnt
from freescale.integrations.ray import FOLDER, train_on_worker
from freescale.train.metrics_logger import read_entries
from watched import make_data

STEPS, KILLED_AFTER = 40, 15


def flags(data: Path) -> list[str]:
    """Return the flags of the run, which both launchers get."""
    words = ["--data.path", str(data), "--train.epochs", "999", "--train.max-steps", str(STEPS)]
    return [*words, "--train.log-every", "1", "--train.save-every", "8", "--train.evaluate-every", "0"]


def entries(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the entries of a kind in the metrics of a run."""
    return [entry for entry in read_entries(run) if entry["kind"] == kind]


def ours(folder: Path, workers: int, words: list[str]) -> Path:
    """Train under our launcher."""
    out = folder / f"ours-{workers}"
    command = [sys.executable, "-m", "freescale", "train", "tiny", *words, "--nproc", str(workers), "--out", str(out)]
    subprocess.run([*command, "--quiet"], check=True)
    return out


def under_ray(folder: Path, workers: int, words: list[str], *, kill: bool) -> tuple[Path, Any, list[int]]:
    """Train under Ray; return the run, Ray's result and the worker that was killed."""
    name = f"ray-{workers}{'-killed' if kill else ''}"
    run, killed = folder / name / FOLDER, []

    def end_a_worker() -> None:
        while len(entries(run, "train")) < KILLED_AFTER:
            time.sleep(0.02)
        killed.append(max(training_workers()))
        os.kill(killed[0], signal.SIGKILL)

    if kill:
        threading.Thread(target=end_a_worker, daemon=True).start()
    trainer = ray.train.torch.TorchTrainer(
        train_on_worker,
        train_loop_config={"source": "tiny", "flags": words},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            name=name, storage_path=str(folder), failure_config=ray.train.FailureConfig(max_failures=2)
        ),
    )
    return run, trainer.fit(), killed


def training_workers() -> list[int]:
    """Return the processes of this cluster's training workers."""
    own = f"FREESCALE_BENCHMARK={os.getpid()}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (place / "cmdline").read_bytes()
            if b"RayTrainWorker" in title and own in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def compare(folder: Path, workers: int, words: list[str]) -> list[dict[str, Any]]:
    """Train with and without a killed worker; compare both with our launcher."""
    expected = ours(folder, workers, words)
    results = []
    for kill in (False, True):
        run, result, killed = under_ray(folder, workers, words, kill=kill)
        losses = [[(entry["step"], entry["loss"]) for entry in entries(place, "train")] for place in (run, expected)]
        results.append(
            {
                "workers": workers,
                "killed_workers": len(killed),
                "starts": [entry["step"] for entry in entries(run, "start")],
                "steps": len(losses[0]),
                "losses_bitwise_equal": losses[0] == losses[1],
                "largest_relative_difference": largest_difference(learnt(expected), learnt(run)),
                "reported_step": result.metrics["step"],
                "reported_checkpoint": Path(result.checkpoint.path).name,
                "error": str(result.error) if result.error else "",
            }
        )
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "FREESCALE_BENCHMARK": str(os.getpid()), "RAY_TRAIN_V2_ENABLED": "1"}
    os.environ |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    os.environ |= {"RAY_worker_register_timeout_seconds": "600"}  # on a busy machine, importing torch takes minutes
    results = []
    with tempfile.TemporaryDirectory() as place:
        words = flags(make_data(Path(place) / "data"))
        ray.init(num_cpus=max(options.workers) + 1, include_dashboard=False, _node_ip_address="127.0.0.1")
        try:
            for workers in options.workers:
                results += compare(Path(place), workers, words)
                record.save(options.out, results)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
