"""Reports of a run's profile: the sections of the page, terminal tables, and a Chrome trace of sampled steps. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from freescale import page
from freescale.bubbles.events import CAUSES, TRAFFIC
from freescale.bubbles.ledger import account, segments
from freescale.bubbles.records import COLUMNS, IntervalRecord, RunRecord, StepSample
from freescale.bubbles.summary import Line, Row, Summary, mean_by_group, mean_over_ranks, summarize

COLOURS = {
    "forward": "#2b7bba",
    "backward": "#123f74",
    "optimizer": "#8fc1e3",
    "straggler": "#d62839",
    "samples": "#6a3d9a",
    "ids": "#8c5a2b",
    "urgent rows": "#f57c00",
    "deferred rows": "#ffc46b",
    "row gradients": "#e377c2",
    "dense gradients": "#2f9e44",
    "other traffic": "#98a100",
    "data": "#00a6a6",
    "host": "#7c8792",
    "idle": "#d9dee3",
}
HEADER = ["cause", "ms per step", "share", "worst rank", "ms there", "hidden ms"]
_SEEN = 0.001
_MOST_COLUMNS = 60


def cause_rows(lines: Iterable[Line]) -> list[list[str]]:
    """Return the table of causes that took any time, the longest first."""
    shown = sorted((line for line in lines if line.ms >= 0.0005 or line.hidden_ms >= 0.0005), key=lambda x: -x.ms)
    hidden = [f"{line.hidden_ms:.2f}" if line.cause in TRAFFIC else "" for line in shown]
    return [
        [line.cause, f"{line.ms:.2f}", f"{100 * line.share:.1f}%", line.worst, f"{line.worst_ms:.2f}", behind]
        for line, behind in zip(shown, hidden, strict=True)
    ]


def advice(lines: Iterable[Line]) -> list[list[str]]:
    """Return the advice for each significant cause, the longest first."""
    return [[line.cause, line.advice] for line in sorted(lines, key=lambda line: -line.ms) if line.advice]


def headline(summary: Summary) -> str:
    """Summarize a run in a sentence."""
    ranks = " then ".join(f"{size:,}" for size in summary.world_sizes or (summary.world_size,))
    steps = f"{ranks} ranks, {summary.steps:,} steps of {summary.step_ms:.1f} ms"
    if not summary.waiting_known:
        return (
            f"{steps}: no collective was recorded, so waiting for slower ranks is not known, and counts as the phase "
            "that it happens in; with DDP, wrap the communication hook: freescale.bubbles.recorder.record_comm_hook"
        )
    return (
        f"{steps}: {summary.bubble_percent:.1f}% without compute, "
        f"{summary.straggler_percent:.1f}% waiting for slower ranks, "
        f"{summary.overlap_percent:.1f}% of traffic hidden; clocks agree within {summary.clock_bound_us:,.0f} us"
    )


def visible_colours(lines: Iterable[Line]) -> dict[str, str]:
    """Return the colours of causes that are visible in a chart."""
    seen = {line.cause for line in lines if line.share >= _SEEN}
    return {cause: colour for cause, colour in COLOURS.items() if cause in seen}


def representative_steps(samples: Mapping[int, Sequence[StepSample]]) -> list[int]:
    """Return the median and the slowest step, without the first, which is warm-up."""
    took = {step: max(s.step.end - s.step.begin for s in of_ranks) for step, of_ranks in samples.items() if step > 1}
    by_time = sorted(took or samples, key=lambda step: took.get(step, 0))
    return sorted({by_time[len(by_time) // 2], by_time[-1]}) if by_time else []


def report_sections(recorded: RunRecord, steps: Sequence[int]) -> list[str]:
    """Return the sections of the page, with timelines of these steps."""
    intervals, samples = recorded
    summary = summarize(intervals)
    colours = visible_colours(summary.lines)
    return [
        page.section(
            "Causes",
            "Every instant of every rank's step has one cause. Traffic counts where it is exposed; traffic "
            "overlapped with compute is hidden and costs nothing.",
            page.table(HEADER, cause_rows(summary.lines)),
            page.table(["cause", "what to do"], advice(summary.lines), words=(0, 1)),
        ),
        *_by_rank(intervals, colours),
        *_over_time(intervals, colours),
        *(_who_waits(intervals) if summary.waiting_known else ()),
        *(_timeline(samples[step], colours) for step in steps),
        *_against_cost(samples),
    ]


def _by_rank(intervals: Sequence[IntervalRecord], colours: Mapping[str, str]) -> list[str]:
    bars = [
        page.StackedBar(name, dict(zip(COLUMNS, values.tolist(), strict=True)))
        for name, values in mean_by_group(intervals).items()
    ]
    drawn = page.stacked_bars(bars, colours, rows="rank", axis="ms per step")
    return [
        page.section(
            "By rank",
            "Where a step of each rank goes, over the steps that it took part in.",
            page.legend(colours),
            drawn,
        )
    ]


def _over_time(intervals: Sequence[IntervalRecord], colours: Mapping[str, str]) -> list[str]:
    bars = [page.StackedBar(f"{part[-1].step:,}", mean_over_ranks(part)) for part in _merged(intervals)]
    drawn = page.stacked_bars(bars, colours, rows="up to step", axis="ms per step, mean of all ranks")
    return [page.section("Over time", "The same, from the first steps to the last.", page.legend(colours), drawn)]


def _who_waits(intervals: Sequence[IntervalRecord]) -> list[str]:
    parts = _merged(intervals)
    names = list(mean_by_group(intervals))
    waited = [{name: _waiting_percent(row) for name, row in mean_by_group(part).items()} for part in parts]
    values = [[of_part.get(name, math.nan) for of_part in waited] for name in names]
    columns = [f"{part[-1].step:,}" for part in parts]
    drawn = page.heat_map(names, columns, values, rows="rank", axis="up to step", unit="% of the step")
    text = "How long each rank waits for slower ones. A pale row among dark ones is the rank that the others wait for."
    return [page.section("Who waits for whom", text, drawn)]


def _waiting_percent(row: Row) -> float:
    """Return the share of a step that a rank waits for slower ones."""
    return float(100 * row[COLUMNS.index("straggler")] / max(row[: len(CAUSES)].sum(), 1e-9))


def _timeline(of_ranks: Sequence[StepSample], colours: Mapping[str, str]) -> str:
    first = min(sample.step.begin for sample in of_ranks)
    lanes = []
    for sample in of_ranks:
        pieces = []
        for piece in segments(sample.step, sample.last):
            begin, end = (piece.begin - first) / 1e6, (piece.end - first) / 1e6
            says = f"rank {sample.step.rank}: {piece.cause} {end - begin:.2f} ms"
            pieces.append(page.TimelineSegment(begin, end, COLOURS[piece.cause], says))
        lanes.append(page.Lane(str(sample.step.rank), pieces))
    kept = "" if len(of_ranks) < 2 else f" of {len(of_ranks)} ranks"
    drawn = page.timeline(lanes, rows="rank", axis="ms since the first rank began")
    text = f"One step{kept}, on one clock. The trace in the same folder shows the traffic too."
    return page.section(f"Step {of_ranks[0].step.step:,}", text, page.legend(colours), drawn)


def _against_cost(samples: Mapping[int, Sequence[StepSample]]) -> list[str]:
    """Compare measured compute of sampled steps with the cost model."""
    measured = [
        (
            sample.step.work,
            sum(account(sample.step, sample.last).cause_ns(kind) for kind in ("forward", "backward")) / 1e6,
        )
        for step, of_ranks in samples.items()
        for sample in of_ranks
        if sample.step.work and step > 1
    ]
    if len(measured) < 3:
        return []
    work, ms = np.array(measured).T
    work = work / work.mean()
    slope, base = np.polyfit(work, ms, 1) if np.ptp(work) > 0 else (0.0, float(ms.mean()))
    error = float(np.abs(ms - (slope * work + base)).mean() / ms.mean())
    points = page.Series("a rank in a step", work.tolist(), ms.tolist())
    ends = [float(work.min()), float(work.max())]
    line = page.Series("best line", ends, [slope * end + base for end in ends])
    text = f"On average a measured time lies {100 * error:.1f}% off the line; balancing samples relies on it."
    drawn = page.scatter(points, line, page.Axis("cost of the batch, of the mean"), page.Axis("forward + backward, ms"))
    return [page.section("Measured time against the cost model", text, drawn)]


def _merged(intervals: Sequence[IntervalRecord]) -> list[Sequence[IntervalRecord]]:
    """Merge neighbours, so that they fit on a page."""
    size = -(-len(intervals) // _MOST_COLUMNS)
    return [intervals[first : first + size] for first in range(0, len(intervals), size)]


def chrome_trace(samples: Mapping[int, Sequence[StepSample]]) -> dict[str, Any]:
    """Return sampled steps as a trace for chrome://tracing and Perfetto.

    Each rank is a process, with a track of causes and one for each kind of traffic in flight.
    """
    ranks = sorted({sample.step.rank for of_ranks in samples.values() for sample in of_ranks})
    events = [event for rank in ranks for event in _chrome_names(rank)]
    events += [event for of_ranks in samples.values() for sample in of_ranks for event in _chrome_events(sample)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _chrome_names(rank: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    for track, name in enumerate(("steps", "causes", *TRAFFIC)):
        yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _chrome_events(sample: StepSample) -> Iterator[dict[str, Any]]:
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
