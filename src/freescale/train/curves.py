"""The part of a report that shows how a training went: curves over the steps, and the starts. Pure.

For one run, related metrics share a chart. For several runs, every metric has a chart with a line per run.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from freescale import page
from freescale.train.metrics_logger import entry_value

_NOT_METRICS = ("kind", "step", "time", "users", "samples")
"""Keys of an entry of metrics that are not metrics."""
_EVALUATIONS = {"evaluate": "Evaluation", "validate": "Partitions before they are trained"}
"""Kinds of entries of metrics, and the titles of their charts."""
_LOG_RATIO = 100.0
"""Ratio of the largest to the smallest value from which a chart of norms is logarithmic."""
_GREY = "#5a5a5a"
STARTS_HEADER = ["start", "at", "ranks", "from step", "to step", "time", "why"]
_MAX_TIME = 1e11
"""Unix seconds in the far future: larger values are damage."""


class RunMetrics(NamedTuple):
    """A run and the entries of its metrics."""

    name: str
    entries: Sequence[dict[str, Any]]
    damaged: int = 0
    """Damaged lines of its file."""


class _Chart(NamedTuple):
    """Metrics of train entries that share a chart."""

    title: str
    names: dict[str, str]
    """Label of each metric in the legend."""
    percent: bool = False
    tight: bool = False
    log: bool = False
    """Logarithmic from a ratio of _LOG_RATIO."""


class _StepAxis(NamedTuple):
    """The range of steps of all charts of a page, and the restarts."""

    first: int
    last: int
    marks: list[page.Mark]


_CHARTS = (
    _Chart("Loss", {"loss": "loss"}, tight=True),
    _Chart("Learning rate of the dense model", {"lr": "learning rate"}),
    _Chart("Learning rate of the tables", {"tables_lr": "learning rate"}),
    _Chart("Gradient norm of the dense model", {"grad_norm": "mean", "grad_norm_max": "largest"}, log=True),
    _Chart("Samples per second", {"samples/s": "samples/s"}),
    _Chart("Tokens per second", {"tokens/s": "tokens/s"}),
    _Chart(
        "Embedding ids",
        {"unique_ids": "distinct, of all ids", "colliding_ids": "also in the batch before, of the distinct"},
        percent=True,
    ),
    _Chart(
        "Work of the slowest rank over the mean",
        {"imbalance_before": "unbalanced", "imbalance_after": "balanced"},
        tight=True,
    ),
    _Chart("Rows of the busiest owner over the mean", {"busiest_owner": "busiest owner"}, tight=True),
    _Chart("Tokens moved to balance", {"moved_tokens": "of all tokens"}, percent=True),
)


@dataclass
class Start:
    """The time from one start of the ranks to the next."""

    step: int
    """Steps done before it."""
    world_size: int
    """0 if unknown."""
    reason: str
    began: float
    """Unix seconds; 0 if unknown."""
    until: float
    """Time of its last entry."""
    reached: int
    """Step of its last entry, even if a later start computed it again."""

    @property
    def seconds(self) -> float:
        """How long it trained; 0 if unknown."""
        return max(0.0, self.until - self.began) if self.began else 0.0


def find_starts(entries: Iterable[Mapping[str, Any]]) -> list[Start]:
    """Return all starts in order. If the first entries are missing, the first start has no details."""
    starts: list[Start] = []
    for entry in entries:
        step, at = entry["step"], _time(entry)
        if entry["kind"] == "start":
            world_size, reason = int(entry_value(entry, "world_size", 0)), str(entry.get("reason", ""))
            starts.append(Start(step, world_size, reason, at, at, step))
            continue
        if not starts:
            starts.append(Start(0, 0, "", 0.0, 0.0, 0))
        last = starts[-1]
        last.reached = max(last.reached, step, int(entry_value(entry, "reached", 0)))
        last.until = max(last.until, at)
    return starts


def _time(entry: Mapping[str, Any]) -> float:
    at = entry_value(entry, "time", 0.0)
    return at if 0.0 < at < _MAX_TIME else 0.0


def repeated_steps(entries: Iterable[Mapping[str, Any]]) -> int:
    """Return how many logged steps were computed again after a restart or a rollback."""
    rewinds = (entry for entry in entries if entry["kind"] == "rewind")
    return sum(max(0, int(entry_value(entry, "reached", 0)) - entry["step"]) for entry in rewinds)


def headline(run: RunMetrics) -> str:
    """Return the progress of a training in one sentence."""
    starts, trained = find_starts(run.entries), _of_kind(run, "train")
    if not starts:
        return "metrics.jsonl holds no entries"
    value = entry_value(trained[-1], "loss") if trained else math.nan
    loss = f", loss {value:.4f}" if math.isfinite(value) else ", loss not finite" if trained else ""
    step = max((entry["step"] for entry in run.entries if entry["kind"] != "rewind"), default=0)
    seconds, again = sum(start.seconds for start in starts), repeated_steps(run.entries)
    took = f", {_duration(seconds)}" if seconds else ""
    repeated = f", {again:,} steps computed again" if again else ""
    return f"step {step:,}{loss}; {_count(len(starts), 'start')}{took}{repeated}"


def training_values(run: RunMetrics) -> dict[str, Any]:
    """Return the starts and their totals for JSON output."""
    starts = find_starts(run.entries)
    return {
        "starts": [vars(start) | {"seconds": start.seconds} for start in starts],
        "restarts": max(0, len(starts) - 1),
        "seconds": sum(start.seconds for start in starts),
        "repeated_steps": repeated_steps(run.entries),
    }


def training_sections(runs: Sequence[RunMetrics]) -> list[str]:
    """Return the sections of a page: charts of all metrics of the runs, and their starts."""
    charts = list(_charts_of_several(runs) if len(runs) > 1 else _charts_of_one(runs[0]))
    rows = [row for run in runs for row in start_rows(run, named=len(runs) > 1)]
    restarted = len(rows) > len(runs)
    text = "Point at a chart to read its values." if charts else "No metrics were logged yet."
    text += " Dashed lines are restarts, numbered as in the table below." if charts and restarted else ""
    sections = [page.section("Training", text, page.grid(charts))]
    for run in runs:
        if run.damaged:
            sections.append(page.section("Damaged lines", f"{_count(run.damaged, 'line')} of {run.name} left out."))
    if restarted:
        text = "A resumed or restarted run continues from a checkpoint; later steps are computed again."
        sections.append(page.section("Starts", text, page.table(STARTS_HEADER, rows, words=(0, 1, 6))))
    return sections


def start_rows(run: RunMetrics, *, named: bool = False) -> list[list[str]]:
    """Return a table row per start."""
    before = f"{run.name}: " if named else ""
    return [
        [
            f"{before}{number}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began)) if start.began else "",
            f"{start.world_size:,}" if start.world_size else "",
            f"{start.step:,}",
            f"{start.reached:,}",
            _duration(start.seconds) if start.began else "",
            start.reason,
        ]
        for number, start in enumerate(find_starts(run.entries), start=1)
    ]


def _charts_of_one(run: RunMetrics) -> Iterator[str]:
    axis, trained = _step_axis([run], [_GREY]), _of_kind(run, "train")
    for chart in (*_CHARTS, *_dynamic_charts([run])):
        series = [_series(label, trained, name) for name, label in chart.names.items()]
        yield from _draw(chart, series, axis)
        if chart.names.keys() == {"loss"}:
            yield from _evaluation_charts(run, axis)


def _dynamic_charts(runs: Sequence[RunMetrics]) -> Iterator[_Chart]:
    """Yield the charts of each table with dynamic ids. Entries count what happened since the one before."""
    names = dict.fromkeys(name for run in runs for entry in _of_kind(run, "train") for name in entry)
    for load in [name for name in names if name.startswith("ids/") and name.endswith("/load")]:
        prefix = load.removesuffix("load")
        table = prefix.removeprefix("ids/").removesuffix("/")
        yield _Chart(f"Slots of table {table} in use", {load: "of all slots"}, percent=True)
        yield _Chart(
            f"Dynamic ids of table {table}, by interval",
            {
                f"{prefix}new": "new",
                f"{prefix}evicted": "evicted",
                f"{prefix}waiting": "shared row: not admitted yet",
                f"{prefix}without_slot": "shared row: no slot",
            },
        )


def _evaluation_charts(run: RunMetrics, axis: _StepAxis) -> Iterator[str]:
    """Yield a chart per family of metrics, such as hr@10 and hr@50."""
    for kind, title in _EVALUATIONS.items():
        families: dict[str, list[str]] = {}
        for name in _metrics(run, kind):
            families.setdefault(name.partition("/")[0].partition("@")[0], []).append(name)
        for family, names in families.items():
            series = [_series(name, _of_kind(run, kind), name) for name in names]
            text = f"{title}: {names[0] if len(names) == 1 else family}"
            yield from _draw(_Chart(text, {}, tight=True), series, axis)


def _charts_of_several(runs: Sequence[RunMetrics]) -> Iterator[str]:
    colours = list(page.assign_colours([str(place) for place in range(len(runs))]).values())
    axis = _step_axis(runs, colours)
    metrics = dict.fromkeys((kind, name) for kind in _EVALUATIONS for run in runs for name in _metrics(run, kind))
    for chart in (*_CHARTS, *_dynamic_charts(runs)):
        for name, label in chart.names.items():
            title = chart.title if len(chart.names) == 1 else f"{chart.title}: {label}"
            series = [_series(run.name, _of_kind(run, "train"), name) for run in runs]
            yield from _draw(chart._replace(title=title), series, axis)
        if chart.names.keys() == {"loss"}:
            for kind, name in metrics:
                series = [_series(run.name, _of_kind(run, kind), name) for run in runs]
                yield from _draw(_Chart(f"{_EVALUATIONS[kind]}: {name}", {}, tight=True), series, axis)


def _draw(chart: _Chart, series: Sequence[page.Series], axis: _StepAxis) -> Iterator[str]:
    """Yield a chart of the lines that have points, if any."""
    shown = [line for line in series if line.x]
    if not shown:
        return
    colours = page.assign_colours([line.name for line in series])
    legend = {line.name: colours[line.name] for line in shown}
    values = [value for line in shown for value in line.y]
    finite = [value for value in values if math.isfinite(value)]
    log = chart.log and min(finite, default=0.0) > 0 and max(finite) > _LOG_RATIO * min(finite)
    omitted = len(values) - len(finite)
    note = f"{_count(omitted, 'value')} of {len(values):,} not finite, left out" if omitted else ""
    y = page.Axis("", log=log, percent=chart.percent, tight=chart.tight)
    keys = [page.legend(legend)] if len(series) > 1 else []
    x = page.Axis("step", tight=True, whole=True)
    drawing = page.curve_chart(shown, legend, x, y, marks=axis.marks, spans=(axis.first, axis.last))
    yield page.figure(chart.title, drawing, *keys, note=note)


def _series(name: str, entries: Sequence[dict[str, Any]], key: str) -> page.Series:
    points = [(float(entry["step"]), entry_value(entry, key)) for entry in entries if key in entry]
    return page.Series(name, [x for x, _ in points], [y for _, y in points])


def _step_axis(runs: Sequence[RunMetrics], colours: Sequence[str]) -> _StepAxis:
    shown = ("start", "train", *_EVALUATIONS)
    steps = [entry["step"] for run in runs for entry in run.entries if entry["kind"] in shown]
    marks = [mark for run, colour in zip(runs, colours, strict=True) for mark in _marks(run, colour)]
    return _StepAxis(min(steps, default=0), max(steps, default=0), marks)


def _marks(run: RunMetrics, colour: str) -> list[page.Mark]:
    """Return a mark per start but the first."""
    return [
        page.Mark(float(start.step), str(number), _describe(run.name, number, start), colour)
        for number, start in enumerate(find_starts(run.entries), start=1)
        if number > 1
    ]


def _describe(name: str, number: int, start: Start) -> str:
    world_size = f" on {_count(start.world_size, 'rank')}" if start.world_size else ""
    return f"{name}, start {number} from step {start.step:,}{world_size}: {start.reason}"


def _metrics(run: RunMetrics, kind: str) -> list[str]:
    """Return the names of all metrics of entries of a kind."""
    values = (pair for entry in _of_kind(run, kind) for pair in entry.items())
    return list(dict.fromkeys(n for n, value in values if n not in _NOT_METRICS and type(value) in (int, float)))


def _of_kind(run: RunMetrics, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in run.entries if entry["kind"] == kind]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, _ = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
