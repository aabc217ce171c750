"""Runs the scripts of docs/how-to/slurm.md on a real SLURM cluster, with killed tasks, requeues and a time limit.

    python benchmarks/slurm.py [--scenarios task node agents limit] [--out FILE.json]

task: a task is killed. node: rank 0 is killed, and its node leaves. agents: a rank is killed that an agent started.
limit: the time limit, scancel, and further jobs with other numbers of tasks.

The cluster runs on this machine (see slurm_cluster.py). Every job trains the same run in fp64. Its weights are compared
with those of an undisturbed job after the same step: bitwise on the same number of tasks, to rounding on another.
"""

import argparse
import json
import os
import re
import signal
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import record
from elastic import largest_difference, learnt
from freescale.checkpoint.checkpoints import complete_checkpoints
from freescale.config import override, resolve, save
from freescale.train.metrics_logger import read_entries
from slurm_cluster import SlurmCluster, shown, slurm_cluster
from watched import make_data

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "slurm.md"
STEPS, KILLED_AFTER, EVERY = 60, 15, 10
SCENARIOS = ("task", "node", "agents", "limit")
TWO_TASKS = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")


def scripts() -> list[str]:
    """Return the job scripts of the page: tasks are ranks, and tasks are agents."""
    found = re.findall(r"^```\n(#!/bin/bash\n.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 2, f"{PAGE} has {len(found)} scripts"
    return found


class Jobs:
    """Jobs of one cluster. Each scenario has a folder, in which the script finds run.toml and runs/mine."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self._folder = cluster, folder
        self._data = make_data(folder / "data")
        self._tasks, self._agents = scripts()

    def prepare(self, name: str, *, steps: int = STEPS, agents: bool = False) -> Path:
        """Write the script of the page and the config of a scenario, and return the run's folder."""
        place = self._folder / name
        place.mkdir(exist_ok=True)
        (place / "job.sh").write_text(self._agents if agents else self._tasks)
        flags = {"data.path": self._data, "data.global-batch": 384, "model.dim": 64, "train.epochs": 10_000}
        flags |= {"train.max-steps": steps, "train.precision": "fp64", "train.log-every": 1, "train.keep": 10_000}
        flags |= {"train.save-every": EVERY, "train.evaluate-every": 0}
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        save(override(resolve("tiny"), words, prog="slurm.py"), place / "run.toml")
        return place / "runs" / "mine"

    def submit(self, run: Path, *options: str) -> str:
        """Submit the script of a scenario."""
        return self.cluster.submit(run.parents[1] / "job.sh", *(options or TWO_TASKS))

    def finish(self, run: Path, *options: str) -> dict[str, Any]:
        """Submit it and wait for its end."""
        return shown(self.cluster.wait_for_end(self.submit(run, *options)))

    def wait_for_step(self, run: Path, step: int) -> None:
        """Return when a step is logged."""
        self.cluster.wait_until(lambda: last_step(run) >= step, f"{run} does not reach step {step}")

    def log(self, run: Path) -> str:
        """Return what the jobs of a scenario printed."""
        return "".join(path.read_text() for path in sorted(run.parents[1].glob("slurm-*.out")))


def last_step(run: Path) -> int:
    """Return the last step in the metrics; 0 if there is none."""
    return max((entry["step"] for entry in read_entries(run) if entry["kind"] == "train"), default=0)


def killed_task(jobs: Jobs, calm: Path, *, rank: int, elsewhere: bool) -> dict[str, Any]:
    """Kill a task with SIGKILL; the script requeues the job. `elsewhere`: on other nodes than before."""
    run = jobs.prepare(f"killed-{rank}")
    number = jobs.submit(run)
    jobs.wait_for_step(run, KILLED_AFTER)
    first = jobs.cluster.job(number)["BatchHost"]
    if elsewhere:
        jobs.cluster.ask("scontrol", "update", f"NodeName={first}", "State=DRAIN", "Reason=benchmark")
    os.kill(jobs.cluster.task(number, rank), signal.SIGKILL)
    ended = shown(jobs.cluster.wait_for_end(number))
    if elsewhere:
        jobs.cluster.ask("scontrol", "update", f"NodeName={first}", "State=RESUME")
    return {
        "killed_rank": rank,
        "on_other_nodes": first != jobs.cluster.job(number)["BatchHost"],
        **ended,
        "waited_for_the_lock": "waiting for the lock" in jobs.log(run),
        "named": re.findall(r"ranks that do not answer: [\d, ]+", jobs.log(run))[:1],
        "resumed": re.findall(r"at step (\d+)", jobs.log(run)),
        "largest_relative_difference": largest_difference(learnt(calm, STEPS), learnt(run, STEPS)),
    }


def killed_rank_of_an_agent(jobs: Jobs, calm: Path) -> dict[str, Any]:
    """Kill a rank that an agent started; the agents restart the ranks without a requeue."""
    run = jobs.prepare("agents", agents=True)
    number = jobs.submit(run)
    jobs.wait_for_step(run, KILLED_AFTER)
    ranks = [pid for pid in _named("freescale-r1") if _job_of(pid) == number]
    os.kill(ranks[0], signal.SIGKILL)
    ended = shown(jobs.cluster.wait_for_end(number))
    recovered = re.findall(r"recovered in ([\d.]+) s", jobs.log(run))
    difference = largest_difference(learnt(calm, STEPS), learnt(run, STEPS))
    return {"recovered_s": [*map(float, recovered)], **ended, "largest_relative_difference": difference}


def time_limit(jobs: Jobs) -> tuple[dict[str, Any], Path, int]:
    """Let a job reach its time limit; it saves, is requeued and continues. Then it is cancelled, which saves again."""
    run = jobs.prepare("time-limit", steps=1_000_000)
    number = jobs.submit(run)
    jobs.wait_for_step(run, KILLED_AFTER)
    began = datetime.fromisoformat(jobs.cluster.job(number)["StartTime"]).timestamp()
    minutes = int((time.time() - began) // 60) + 2  # so that the two minutes of the script's --signal have begun
    limited_at = time.time()
    jobs.cluster.ask("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
    jobs.cluster.wait_until(lambda: jobs.cluster.job(number).get("Restarts") == "1", "the job is not requeued")
    saved = complete_checkpoints(run / "checkpoints")[-1]
    step = int(saved.name.split("-")[1])
    seconds = (saved / "facts.json").stat().st_mtime - limited_at  # of which the controller takes up to 30 to notice
    limited = {"saved_at_step": step, "seconds_from_limit_to_checkpoint": round(seconds, 2)}
    jobs.wait_for_step(run, step + KILLED_AFTER)
    jobs.cluster.ask("scancel", number)
    ended = shown(jobs.cluster.wait_for_end(number))
    last = int(complete_checkpoints(run / "checkpoints")[-1].name.split("-")[1])
    time.sleep(5)
    assert jobs.cluster.job(number)["JobState"] == "CANCELLED", "a cancelled job is not requeued"
    return {"time_limit": limited, "cancelled": ended | {"saved_at_step": last}}, run, last


def other_task_counts(jobs: Jobs, calm: Path, limited: Path, reached: int) -> dict[str, Any]:
    """Continue the job that was cancelled with 3 tasks and then with 1; compare with 2 undisturbed tasks."""
    found: dict[str, Any] = {}
    for tasks, steps in ((3, reached + 20), (1, reached + 40)):
        jobs.prepare("time-limit", steps=steps)
        found[f"{tasks} tasks"] = jobs.finish(limited, f"--nodes={tasks}", "--ntasks-per-node=1", "--gpus-per-node=1")
    jobs.prepare("calm", steps=reached + 40)
    jobs.finish(calm)
    before = largest_difference(learnt(calm, reached - reached % EVERY), learnt(limited, reached - reached % EVERY))
    after = largest_difference(learnt(calm), learnt(limited))
    return found | {"largest_relative_difference_before": before, "largest_relative_difference": after}


def _named(name: str) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/comm"):
        try:
            if place.read_text().strip() == name:
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


def _job_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return next((word.partition("=")[2] for word in words if word.startswith("SLURM_JOB_ID=")), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []

    def keep(name: str, found: dict[str, Any]) -> None:
        results.append({"scenario": name, **found})
        print(json.dumps(results[-1]), flush=True)
        record.save(options.out, results)

    with tempfile.TemporaryDirectory() as place, slurm_cluster(Path(place), nodes=3) as cluster:
        jobs = Jobs(cluster, Path(place))
        calm = jobs.prepare("calm")
        keep("undisturbed", jobs.finish(calm))
        if "task" in options.scenarios:
            keep("a task is killed", killed_task(jobs, calm, rank=1, elsewhere=False))
        if "node" in options.scenarios:
            keep("rank 0 is killed, and its node leaves", killed_task(jobs, calm, rank=0, elsewhere=True))
        if "agents" in options.scenarios:
            keep("a rank of an agent is killed", killed_rank_of_an_agent(jobs, calm))
        if "limit" in options.scenarios:
            found, limited, reached = time_limit(jobs)
            keep("time limit, then scancel", found)
            keep("other numbers of tasks", other_task_counts(jobs, calm, limited, reached))


if __name__ == "__main__":
    main()
