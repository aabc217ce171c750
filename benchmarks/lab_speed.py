"""Measures the speed of a rank and its links, from a serial run without balancing.

Then each span is one operation, and each transfer had the links to itself. For `simulator.py`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from freescale.bubbles.events import COMPUTE, TRAFFIC, RankStep, Span, Transfer
from freescale.bubbles.records import StepSample
from freescale.overlap.schedule import Schedule, serial
from freescale.simulate.cluster import Cluster, Figure
from freescale.simulate.network import Topology
from freescale.simulate.operations import DeviceModel, busy_seconds, fit_compute
from freescale.simulate.workload import ModelCost

Floats = NDArray[np.float64]
SMALL, WARM = 4 << 10, 3


def measured(samples: Mapping[int, Sequence[StepSample]], model: ModelCost) -> DeviceModel:
    """Return the device model of a rank from serial steps."""
    schedule = serial(sharded=model.sharded, micro_batches=model.micro_batches)
    steps = [sample.step for number, of_ranks in samples.items() if number > WARM for sample in of_ranks]
    spans = [_by_operation(step, schedule) for step in steps]
    (table,) = model.tables  # the bytes of several tables do not tell their rows
    rows = np.array([_sent(step, "row gradients") / (4 * table.dim) for step in steps])
    sent = np.array([_sent(step, "ids", "urgent rows", "row gradients") for step in steps])

    def per(units: Floats, *names: str) -> float:
        return float(_seconds(steps, spans, *names).sum() / max(1e-9, np.sum(units)))

    prepared = _seconds(steps, spans, "prepare")
    compute = fit_compute(samples)
    return DeviceModel(
        step=compute.step,
        work=compute.work,
        row=per(rows, "look_up"),
        update=per(rows, "update_rows"),
        event=0.0,
        byte=per(sent, "send_ids", "send_rows", "send_gradients"),
        dense=per(np.ones(len(steps)), "update_dense"),
        between=float(prepared.mean()) + _between(steps, schedule),
        forward=compute.forward,
    )


def buckets(model: ModelCost, samples: Mapping[int, Sequence[StepSample]]) -> ModelCost:
    """Return the model cost with dense gradient buckets as sent: all of them, and the last."""
    step = next(iter(samples.values()))[0].step
    sent = [transfer.size for transfer in step.transfers if transfer.kind == "dense gradients"]
    return replace(model, dense_bytes=float(sum(sent)), last_bytes=float(sent[-1]))


def linked(cluster: Cluster, samples: Mapping[int, Sequence[StepSample]], *, ranks: int) -> Cluster:
    """Return the cluster with link latency and rates measured from the transfers of a run."""
    of = [_transfers(of_ranks) for number, of_ranks in samples.items() if number > WARM]
    small = [_took(t).max() for step in of for kind in step.values() for t in kind if t[0].size <= SMALL]
    latency = statistics.median(small)
    # With links of one byte per second, a time is a number of bytes.
    unit = cluster.with_values({"far": 1.0, "latency": 0.0, "message": 0.0, "ring": 1.0})
    topology, model, measured = Topology(unit, ranks, np.random.default_rng(0)), 0.0, 0.0
    for step in of:
        rows = np.array([t.size for t in step["row gradients"][-1]], dtype=np.float64)
        for kind, incoming in (("urgent rows", True), ("row gradients", False)):
            demand = topology.all_to_all(rows, incoming=incoming)
            model += float(demand.ends(0.0, max(demand.levels), ranks).mean())
            measured += float((_took(step[kind][-1]) - latency).mean())
    far = model / measured
    ring = statistics.median(_ring_bytes(step["dense gradients"], topology, latency, ranks) for step in of) / far
    found = {"latency": latency, "far": far, "ring": ring}
    figures = {name: Figure(value, value, value, "measured") for name, value in found.items()}
    return replace(cluster, figures={**cluster.figures, **figures})


def _ring_bytes(buckets: Sequence[Sequence[Transfer]], topology: Topology, latency: float, ranks: int) -> float:
    """Return bytes per second of a step's buckets, sent one after another."""
    size, seconds, before = 0.0, 0.0, 0
    for bucket in buckets:
        came, done = max(t.arrived for t in bucket), max(t.done for t in bucket)
        size += topology.all_reduce(bucket[0].size).levels[1]
        seconds += max(0.0, (done - max(came, before)) / 1e9 - latency * math.ceil(math.log2(ranks)))
        before = done
    return size / max(seconds, 1e-9)


def _transfers(of_ranks: Sequence[StepSample]) -> dict[str, list[list[Transfer]]]:
    """Return the transfers of one step by kind, each as seen by all ranks."""
    found: dict[str, list[list[Transfer]]] = {}
    for transfer in of_ranks[0].step.transfers:
        same = [t for sample in of_ranks for t in sample.step.transfers if t.name == transfer.name]
        found.setdefault(transfer.kind, []).append(same)
    return found


def _took(of_ranks: Sequence[Transfer]) -> Floats:
    """Return the seconds of each rank since the last arrival."""
    last = max(t.arrived for t in of_ranks)
    return np.array([t.done - last for t in of_ranks]) / 1e9


def _by_operation(step: RankStep, schedule: Schedule) -> dict[str, Span]:
    """Return the span of each operation of a serial step."""
    spans = _of_operations(step, schedule)
    expected = [o.cause if o.cause in COMPUTE else "host" for o in schedule.operations]
    if [span.kind for span in spans] != expected:
        raise ValueError(f"step {step.step} was not done one thing after another")
    return {operation.key: span for operation, span in zip(schedule.operations, spans, strict=True)}


def _seconds(steps: Sequence[RankStep], spans: Sequence[Mapping[str, Span]], *names: str) -> Floats:
    """Return, per step, the busy time of operations without their waits."""
    return np.array(
        [
            sum(busy_seconds(step, span) for key, span in of.items() if key.split("/")[0] in names)
            for step, of in zip(steps, spans, strict=True)
        ]
    )


def _sent(step: RankStep, *kinds: str) -> int:
    return sum(t.size for t in step.transfers if t.kind in kinds)


def _between(steps: Sequence[RankStep], schedule: Schedule) -> float:
    """Return the seconds of a step before its first operation."""
    first = [_of_operations(step, schedule)[0].begin - step.begin for step in steps]
    return statistics.median(first) / 1e9


def _of_operations(step: RankStep, schedule: Schedule) -> list[Span]:
    """Return the spans of operations, without waits inside of them."""
    return [span for span in step.spans if span.kind not in TRAFFIC][-len(schedule.operations) :]
