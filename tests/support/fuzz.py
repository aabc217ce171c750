"""Damaged, mistyped and generated files for every reader: only our own errors may be raised.

An input is a folder of files: valid ones with some bytes or values changed, or files generated from their parts. A
reader must accept it and work with it, or refuse it with an error of ours. Any other exception is a fault, and so is an
input that takes longer than SECONDS or more memory than MEMORY beyond the start.
"""

import contextlib
import io
import resource
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings

from freescale.errors import FreeScaleError
from tests.support.fuzz_training_inputs import (
    checkpoint_inputs,
    cluster_inputs,
    config_inputs,
    data_inputs,
    read_checkpoint,
    read_cluster,
    read_config,
    read_data,
    small_question,
)
from tests.support.fuzz_training_outputs import read_run, read_trace_folder, run_inputs, trace_inputs
from tests.support.fuzz_values import Files, Inputs

SECONDS, MEMORY = 20.0, 3 << 30


class Target(NamedTuple):
    """A kind of file: its inputs, and the reader to test."""

    inputs: Callable[[], Inputs]
    read: Callable[[Path], None]


TARGETS = {
    "checkpoint": Target(checkpoint_inputs, read_checkpoint),
    "config": Target(config_inputs, read_config),
    "data": Target(data_inputs, read_data),
    "kineto": Target(trace_inputs, read_trace_folder),
    "cluster": Target(cluster_inputs, read_cluster),
    "run": Target(run_inputs, read_run),
}


def accepts(target: Target, files: Files) -> bool:
    """Whether a reader takes a folder of these files, rather than refuses it. Raises what a reader should not have."""
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(raw)
        try:
            with confined():
                target.read(Path(folder))
        except FreeScaleError:
            return False
        return True


def fuzz(target: Target, examples: int) -> dict[str, Any]:
    """Let a target read so many inputs, the same ones every time."""
    seen, slowest = Counter[bool](), 0.0

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(target.inputs())
    def every(files: Files) -> None:
        nonlocal slowest
        begin = time.perf_counter()
        seen[accepts(target, files)] += 1
        slowest = max(slowest, time.perf_counter() - begin)

    begin = time.perf_counter()
    with bounded_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # overflow in figures that nobody could have measured
        every()
    return {
        "inputs": seen.total(),
        "accepted": seen[True],
        "refused": seen[False],
        "seconds": round(time.perf_counter() - begin, 1),
        "slowest_s": round(slowest, 3),
    }


@contextlib.contextmanager
def confined() -> Iterator[None]:
    """No longer than SECONDS, and nothing said."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """A reader that believes an absurd size fails here, instead of taking the machine with it."""
    small_question()  # what is made once is not counted
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
