"""Two runs on one machine each get their share of it.

Measured as processor time per step: threads that spin while they wait take it from the other run, and a fair scheduler
gives each the rest. Unlike the time on the clock, it does not depend on what else the machine does.
"""

import json
import os
import subprocess
import sys

import pytest

STEPS = """
import json, sys, time
from freescale.launch.launcher import launch_ranks

launch_ranks([], nproc=1)  # as every command that computes does, before torch is imported
import torch

x = torch.rand(64, 4096)

def milliseconds_per_step(threads):
    torch.set_num_threads(threads)
    done, begin, before = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < 0.7:
        for _ in range(20):  # short pieces of work for all threads, as a training step is
            torch.tanh(x)
        done += 1
    return 1e3 * (time.process_time() - before) / done

print(flush=True)
sys.stdin.readline()
print(json.dumps([milliseconds_per_step(threads) for threads in (1, 2)]))
"""


@pytest.mark.quiet
def test_waiting_threads_take_no_time_from_another_run() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    start = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    runs = [subprocess.Popen([sys.executable, "-c", STEPS], **start) for _ in range(2)]
    for run in runs:
        assert run.stdout is not None
        run.stdout.readline()  # both have imported torch
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("\n")
        run.stdin.flush()
    for run in runs:
        one_thread, two_threads = json.loads(run.communicate()[0])
        assert two_threads < 2.5 * one_thread
