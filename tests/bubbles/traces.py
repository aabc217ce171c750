"""Traces made by hand, in the form in which torch.profiler writes them: two ranks of a trainer on CUDA, two steps.

All times are microseconds. The two ranks differ in when a collective begins, never in when it ends.
"""

import gzip
import json
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD = 100, 101
COMPUTE_STREAM, NCCL_STREAM, OTHER_NCCL_STREAM, COPY_STREAM = 7, 20, 24, 30
ALL_TO_ALL = {"Collective name": "all_to_allv", "dtype": "Float", "Process Group Name": "0", "Group size": 2}
ALL_REDUCE = {**ALL_TO_ALL, "Collective name": "allreduce"}
LAUNCH_AHEAD, DEVICE_AHEAD = 872, 950


class Trace:
    """One rank's trace while it is made."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: list[dict[str, Any]] = []

    def host(self, name: str, begin: float, end: float, thread: int = MAIN, category: str = "cpu_op") -> None:
        self._add(name, category, 4000 + self.rank, thread, begin, end)

    def mark(self, name: str, begin: float, end: float, thread: int = MAIN) -> None:
        self.host(name, begin, end, thread, "user_annotation")

    def stream_mark(self, name: str, begin: float, end: float, stream: int) -> None:
        self._add(name, "gpu_user_annotation", 0, stream, begin, end)

    def device(
        self, name: str, begin: float, end: float, stream: int, launched: float, thread: int = MAIN, **args: Any
    ) -> None:
        """Something that the device does, and its launch."""
        number = len(self.events) + 1
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        launch = "cudaMemcpyAsync" if category == "gpu_memcpy" else "cudaLaunchKernel"
        self._add(launch, "cuda_runtime", 4000 + self.rank, thread, launched, launched + 5, correlation=number)
        self._add(name, category, 0, stream, begin, end, device=0, stream=stream, correlation=number, **args)

    def write(self, folder: Path, *, packed: bool = False, base: int = 0, later: float = 0, rank: bool = True) -> Path:
        """As the profiler names it. `base` and `later` are where this rank's clock stands."""
        path = folder / f"host_{4000 + self.rank}.171234{self.rank}.pt.trace.json"
        events = [{**event, "ts": event["ts"] + later} for event in self.events]
        trace: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events}
        if rank:
            trace["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": 2}
        text = json.dumps(trace).encode()
        path = path.with_name(path.name + ".gz") if packed else path
        path.write_bytes(gzip.compress(text) if packed else text)
        return path

    def _add(self, name: str, category: str, process: int, line: int, begin: float, end: float, **args: Any) -> None:
        where = {"ph": "X", "cat": category, "name": name, "pid": process, "tid": line}
        self.events.append({**where, "ts": begin, "dur": end - begin, "args": args})


def cuda_step(
    trace: Trace, cpu: float, gpu: float, *, forward: float, asked: float, backward: float, summed: float
) -> None:
    """Launches after `cpu`, device work after `gpu`. Given: the ends of forward and backward, and when the all-to-all
    and the first all-reduce begin."""
    trace.host("aten::to", cpu + 5, cpu + 45)
    trace.device("Memcpy HtoD (Pinned -> Device)", gpu + 10, gpu + 40, COMPUTE_STREAM, cpu + 7)
    trace.device("ampere_sgemm_forward", gpu + 50, gpu + forward, COMPUTE_STREAM, cpu + 20)
    trace.device("ncclDevKernel_SendRecv(...)", gpu + asked, gpu + 300, NCCL_STREAM, cpu + 30, **ALL_TO_ALL)
    trace.host("autograd::engine::evaluate_function: MmBackward0", cpu + 90, cpu + 200, AUTOGRAD)
    trace.device("ampere_sgemm_backward", gpu + 300, gpu + backward, COMPUTE_STREAM, cpu + 100, AUTOGRAD)
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"
    trace.device(name, gpu + summed, gpu + 800, NCCL_STREAM, cpu + 180, AUTOGRAD, **ALL_REDUCE)
    trace.device(name, gpu + 790, gpu + 890, OTHER_NCCL_STREAM, cpu + 190, AUTOGRAD, **ALL_REDUCE)
    trace.mark("Optimizer.step#Adam.step", cpu + 210, cpu + 300)
    trace.device("multi_tensor_apply_kernel", gpu + 885, gpu + 950, COMPUTE_STREAM, cpu + 220)


def cuda_traces() -> list[Trace]:
    """Both ranks. The host is done with each step before the device is."""
    first, second = Trace(0), Trace(1)
    for trace in (first, second):
        trace.mark("ProfilerStep#5", 0, LAUNCH_AHEAD - 2)
        trace.mark("ProfilerStep#6", LAUNCH_AHEAD, LAUNCH_AHEAD + 870)
    cuda_step(first, 0, 0, forward=250, asked=200, backward=700, summed=500)
    cuda_step(second, 0, 0, forward=280, asked=260, backward=720, summed=520)
    cuda_step(first, LAUNCH_AHEAD, DEVICE_AHEAD, forward=250, asked=200, backward=760, summed=500)
    cuda_step(second, LAUNCH_AHEAD, DEVICE_AHEAD, forward=280, asked=260, backward=720, summed=420)
    return [first, second]
