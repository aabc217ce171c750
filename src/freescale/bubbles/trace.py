"""Sampled steps as a trace that Chrome's and Perfetto's viewers open. Pure.

A process per rank, with a track of causes, and a track for each kind of traffic as it was in flight.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from freescale.bubbles.events import TRAFFIC
from freescale.bubbles.ledger import segments
from freescale.bubbles.records import Sample


def trace_of(samples: Mapping[int, Sequence[Sample]]) -> dict[str, Any]:
    """All sampled steps, at the times at which they were."""
    ranks = sorted({sample.step.rank for of_ranks in samples.values() for sample in of_ranks})
    events = [event for rank in ranks for event in _names(rank)]
    events += [event for of_ranks in samples.values() for sample in of_ranks for event in _events(sample)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    for track, name in enumerate(("steps", "causes", *TRAFFIC)):
        yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _events(sample: Sample) -> Iterator[dict[str, Any]]:
    step = sample.step

    def block(track: int, name: str, begin: int, end: int, **args: object) -> dict[str, Any]:
        times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
        return {"ph": "X", "pid": step.rank, "tid": track, "name": name, **times, "args": args}

    yield block(0, f"step {step.step}", step.begin, step.end, work=step.work)
    for piece in segments(step, sample.last):
        yield block(1, piece.cause, piece.begin, piece.end)
    for transfer in step.transfers:
        track = 2 + TRAFFIC.index(transfer.kind)
        last = (sample.last[transfer.name] - transfer.arrived) / 1e3
        yield block(track, transfer.name, transfer.arrived, transfer.done, waited_for_last_rank_us=last)
