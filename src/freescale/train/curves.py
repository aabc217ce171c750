"""The part of a page that shows how a training went: its figures over the steps, and its starts. Pure.

Of one run, figures that belong together share a chart. Of several runs, every figure has a chart with a line per run.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from freescale import page
from freescale.train.journal import figure
from freescale.train.starts import Start, repeated_steps, starts_of

_BESIDE = ("kind", "step", "time", "users")
"""What an evaluation notes beside its metrics."""
_LOG_FROM = 100.0
"""How many times the least value the largest one is when a chart of norms becomes logarithmic."""
_GREY = "#5a5a5a"
STARTS_HEADER = ["start", "at", "ranks", "from step", "to step", "time", "why"]


class Run(NamedTuple):
    """A run and what it noted."""

    name: str
    noted: Sequence[dict[str, Any]]
    damaged: int = 0
    """Lines of its file that could not be read."""


class _Chart(NamedTuple):
    """Figures of train entries that are drawn together."""

    title: str
    names: dict[str, str]
    """Of each figure, what it is called in the legend."""
    percent: bool = False
    tight: bool = False
    log: bool = False
    """Logarithmic if the values are far apart."""


class _Steps(NamedTuple):
    """What all charts of a page span, and where ranks were restarted."""

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
    _Chart("Tokens moved to balance", {"moved_tokens": "of all tokens"}, percent=True),
)


def headline(run: Run) -> str:
    """How far a training came, in a sentence."""
    starts, trained = starts_of(run.noted), _of_kind(run, "train")
    if not starts:
        return "metrics.jsonl holds no entries"
    value = figure(trained[-1], "loss") if trained else math.nan
    loss = f", loss {value:.4f}" if math.isfinite(value) else ", loss not finite" if trained else ""
    step = max((entry["step"] for entry in run.noted if entry["kind"] != "rewind"), default=0)
    seconds, again = sum(start.seconds for start in starts), repeated_steps(run.noted)
    took = f", {_duration(seconds)}" if seconds else ""
    repeated = f", {again:,} steps computed again" if again else ""
    return f"step {step:,}{loss}; {_count(len(starts), 'start')}{took}{repeated}"


def figures(run: Run) -> dict[str, Any]:
    """The same and every start, for programs."""
    starts = starts_of(run.noted)
    return {
        "starts": [vars(start) | {"seconds": start.seconds} for start in starts],
        "restarts": max(0, len(starts) - 1),
        "seconds": sum(start.seconds for start in starts),
        "repeated_steps": repeated_steps(run.noted),
    }


def training(runs: Sequence[Run]) -> list[str]:
    """The sections of a page: charts of all figures that any of the runs noted, and the starts."""
    charts = list(_compared(runs) if len(runs) > 1 else _of_one(runs[0]))
    rows = [row for run in runs for row in start_rows(run, named=len(runs) > 1)]
    restarted = len(rows) > len(runs)
    text = "Point at a chart to read its values." if charts else "No figures were noted yet."
    text += " Dashed lines are restarts, numbered as in the table below." if charts and restarted else ""
    sections = [page.section("Training", text, page.grid(charts))]
    for run in runs:
        if run.damaged:
            sections.append(page.section("Damaged lines", f"{_count(run.damaged, 'line')} of {run.name} left out."))
    if restarted:
        text = "A run that is resumed or restarted goes on from a checkpoint; steps beyond it are computed again."
        sections.append(page.section("Starts", text, page.table(STARTS_HEADER, rows, words=(0, 1, 6))))
    return sections


def start_rows(run: Run, *, named: bool = False) -> list[list[str]]:
    """A line per start."""
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
        for number, start in enumerate(starts_of(run.noted), start=1)
    ]


def _of_one(run: Run) -> Iterator[str]:
    over, trained = _steps([run], [_GREY]), _of_kind(run, "train")
    for chart in _CHARTS:
        series = [_series(said, trained, name) for name, said in chart.names.items()]
        yield from _drawn(chart, series, over)
        if chart.names.keys() == {"loss"}:
            yield from _evaluations(run, over)


def _evaluations(run: Run, over: _Steps) -> Iterator[str]:
    """A chart per family of metrics, such as hr@10 and hr@50."""
    evaluated = _of_kind(run, "evaluate")
    families: dict[str, list[str]] = {}
    for name in _metrics(run):
        families.setdefault(name.partition("/")[0].partition("@")[0], []).append(name)
    for family, names in families.items():
        series = [_series(name, evaluated, name) for name in names]
        title = f"Evaluation: {names[0] if len(names) == 1 else family}"
        yield from _drawn(_Chart(title, {}, tight=True), series, over)


def _compared(runs: Sequence[Run]) -> Iterator[str]:
    colours = list(page.assign_colours([str(place) for place in range(len(runs))]).values())
    over = _steps(runs, colours)
    metrics = list(dict.fromkeys(name for run in runs for name in _metrics(run)))
    for chart in _CHARTS:
        for name, said in chart.names.items():
            title = chart.title if len(chart.names) == 1 else f"{chart.title}: {said}"
            series = [_series(run.name, _of_kind(run, "train"), name) for run in runs]
            yield from _drawn(chart._replace(title=title), series, over)
        if chart.names.keys() == {"loss"}:
            for name in metrics:
                series = [_series(run.name, _of_kind(run, "evaluate"), name) for run in runs]
                yield from _drawn(_Chart(f"Evaluation: {name}", {}, tight=True), series, over)


def _drawn(chart: _Chart, series: Sequence[page.Series], over: "_Steps") -> Iterator[str]:
    """A figure of the lines that have points; none where no line has any."""
    shown = [one for one in series if one.x]
    if not shown:
        return
    colours = page.assign_colours([one.name for one in series])
    seen = {one.name: colours[one.name] for one in shown}
    values = [value for one in shown for value in one.y]
    finite = [value for value in values if math.isfinite(value)]
    log = chart.log and min(finite, default=0.0) > 0 and max(finite) > _LOG_FROM * min(finite)
    lost = len(values) - len(finite)
    note = f"{_count(lost, 'value')} of {len(values):,} not finite, left out" if lost else ""
    y = page.Axis("", log=log, percent=chart.percent, tight=chart.tight)
    keys = [page.legend(seen)] if len(series) > 1 else []
    x = page.Axis("step", tight=True, whole=True)
    drawn = page.curve_chart(shown, seen, x, y, marks=over.marks, spans=(over.first, over.last))
    yield page.figure(chart.title, drawn, *keys, note=note)


def _series(name: str, noted: Sequence[dict[str, Any]], key: str) -> page.Series:
    points = [(float(entry["step"]), figure(entry, key)) for entry in noted if key in entry]
    return page.Series(name, [x for x, _ in points], [y for _, y in points])


def _steps(runs: Sequence[Run], colours: Sequence[str]) -> _Steps:
    steps = [entry["step"] for run in runs for entry in run.noted if entry["kind"] in ("start", "train", "evaluate")]
    marks = [mark for run, colour in zip(runs, colours, strict=True) for mark in _marks(run, colour)]
    return _Steps(min(steps, default=0), max(steps, default=0), marks)


def _marks(run: Run, colour: str) -> list[page.Mark]:
    """Every start but the first."""
    return [
        page.Mark(float(start.step), str(number), _said(run.name, number, start), colour)
        for number, start in enumerate(starts_of(run.noted), start=1)
        if number > 1
    ]


def _said(name: str, number: int, start: Start) -> str:
    world_size = f" on {_count(start.world_size, 'rank')}" if start.world_size else ""
    return f"{name}, start {number} from step {start.step:,}{world_size}: {start.reason}"


def _metrics(run: Run) -> list[str]:
    """Names of everything that an evaluation measured."""
    values = (pair for entry in _of_kind(run, "evaluate") for pair in entry.items())
    return list(dict.fromkeys(n for n, value in values if n not in _BESIDE and type(value) in (int, float)))


def _of_kind(run: Run, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in run.noted if entry["kind"] == kind]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, _ = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
