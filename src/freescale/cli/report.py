"""`freescale report` and `freescale runs`: how trainings went, where their time went, and what to do about it."""

import json
import time
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tyro

from freescale import page
from freescale.bubbles import flight_recorder, records
from freescale.bubbles.kineto import read_traces
from freescale.bubbles.report import (
    HEADER,
    advice,
    cause_rows,
    chrome_trace,
    headline,
    report_sections,
    representative_steps,
)
from freescale.bubbles.summary import Summary, summarize
from freescale.cli.options import Flag, parse, print_json, print_table, say, write_page
from freescale.errors import UsageError
from freescale.progress import progress
from freescale.train import curves
from freescale.train.metrics_logger import METRICS_FILE, count_damaged_lines, entry_value, read_entries

_BETTER = {"ndcg@10": max, "ne": min}
"""Metrics of model quality, and which of two values is better."""
_UNRESPONSIVE_SECONDS = 60.0
"""Age of the last record from which a run without an end entry counts as lost."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Print how a training went and where its time went; write a page and a trace next to the run. Compares two runs.

    freescale report runs/latest --open
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folder of a training, such as runs/latest; two to compare them."""
    from_kineto: Path | None = None
    """Instead: a folder of torch.profiler traces of all ranks, of any trainer."""
    steps: tuple[int, ...] = ()
    """Sampled steps to draw; by default a median one and the slowest."""
    open: Flag = False
    """Open the page in a browser."""
    json: Flag = False
    """Print everything as JSON."""
    quiet: Flag = False
    """Show no progress, only results, warnings and errors."""


@dataclass(frozen=True)
class _RunRecords:
    """The records and metrics in the folder of a run."""

    folder: Path
    recorded: records.RunRecord | None
    """None before the first interval is recorded."""
    metrics: curves.RunMetrics

    @cached_property
    def summary(self) -> Summary | None:
        """Where the time went."""
        return None if self.recorded is None else summarize(self.recorded.intervals)

    @property
    def lead(self) -> str:
        """The run in a line or two."""
        lines = [curves.headline(self.metrics)] if self.metrics.entries else []
        lines += [] if self.summary is None else [headline(self.summary)]
        return "\n".join(lines)


def run_report(argv: Sequence[str], prog: str) -> int:
    """Print how the training went and where the time went; write the page and the trace."""
    options = parse(ReportOptions, argv, prog)
    for run in () if options.json else options.runs:
        _print_last_operations(run)
    with progress("reading records"):
        runs = _read_runs(options, prog)
    several = len(runs) > 1
    if options.json:
        values = {str(run.folder): _run_values(run) for run in runs} if several else _run_as_json(options, runs[0])
        print_json(values)
        return 0
    written = _compare_runs(*runs) if several else _print_run(runs[0], options.steps)
    say(*(f"{name}: {path}" for name, path in written.items()))
    if options.open and not webbrowser.open(written["page"].resolve().as_uri()):
        say(f"no browser was found to open {written['page']}")
    return 0


def _print_last_operations(run: Path) -> None:
    """Print the last operations of every rank if a start of this run did not end well."""
    if lost := flight_recorder.read(run):
        header = ["rank", "step of its start", "begun and not ended", "silent before the last"]
        print_table(
            "last operations of a start that was lost, or still runs",
            header,
            flight_recorder.unfinished_operations(lost),
            words=(2,),
        )


def _read_runs(options: ReportOptions, prog: str) -> list[_RunRecords]:
    if options.from_kineto is not None and not options.runs:
        traces, folder = read_traces(options.from_kineto), options.from_kineto
        recorded = records.from_steps(traces.steps, traces.clock_bound)
        return [_RunRecords(folder, recorded, curves.RunMetrics(str(folder), []))]
    if options.from_kineto is not None or len(options.runs) not in (1, 2):
        remedy = f"see {prog} --help"
        raise UsageError("name one run, two runs to compare, or --from-kineto and a folder", remedy=remedy)
    return [_read_run(run) for run in options.runs]


def _read_run(run: Path) -> _RunRecords:
    """Read a run. One that ended before the first interval has metrics only."""
    metrics = curves.RunMetrics(str(run), list(read_entries(run)), count_damaged_lines(run))
    recorded = records.read(run) if records.is_recorded(run) or not metrics.entries else None
    return _RunRecords(run, recorded, metrics)


def _print_run(run: _RunRecords, steps: tuple[int, ...]) -> dict[str, Path]:
    """Print a run and write its files."""
    written, summary, metrics = _write_files(run, steps), run.summary, run.metrics
    say(*([curves.headline(metrics)] if metrics.entries else []), *_recoveries(metrics))
    starts = curves.start_rows(metrics)
    if len(starts) > 1:
        print_table("starts", curves.STARTS_HEADER, starts, words=(0, 1, 6))
    if summary is None:
        say("no interval of steps was recorded yet, so nothing is known of where the time went")
        return written
    say(headline(summary))
    print_table(str(run.folder), HEADER, cause_rows(summary.lines))
    say(*(f"{cause}: {text}" for cause, text in advice(summary.lines)))
    return written


def _recoveries(metrics: curves.RunMetrics) -> Iterator[str]:
    """Yield how often ranks restarted, and how long each recovery took."""
    if took := [entry_value(entry, "seconds", 0.0) for entry in metrics.entries if entry["kind"] == "recovery"]:
        yield f"restarted {len(took)} times, in {sum(took) / len(took):.1f} s each, at most {max(took):.1f} s"


def _write_files(run: _RunRecords, steps: tuple[int, ...]) -> dict[str, Path]:
    samples = {} if run.recorded is None else run.recorded.samples
    if unknown := [step for step in steps if step not in samples]:
        remedy = f"choose from {', '.join(map(str, samples))}" if samples else "leave out --steps"
        raise UsageError(f"step {unknown[0]} was not kept whole", where=str(run.folder), remedy=remedy)
    folder = run.folder / records.FOLDER
    sections = curves.training_sections([run.metrics]) if run.metrics.entries or run.metrics.damaged else []
    sections += [] if run.recorded is None else report_sections(run.recorded, steps or representative_steps(samples))
    written = {"page": folder / "report.html", "trace": folder / "trace.json"}
    write_page(written["page"], page.document(str(run.folder), run.lead, *sections))
    written["trace"].write_text(json.dumps(chrome_trace(samples)), encoding="utf-8")
    return written


def _run_as_json(options: ReportOptions, run: _RunRecords) -> dict[str, Any]:
    return _run_values(run) | {name: str(path) for name, path in _write_files(run, options.steps).items()}


def _run_values(run: _RunRecords) -> dict[str, Any]:
    summary, training = run.summary, curves.training_values(run.metrics) if run.metrics.entries else {}
    if summary is None:
        return training
    causes = {line.cause: {n: v for n, v in line._asdict().items() if n != "cause"} for line in summary.lines}
    unknown = {} if summary.waiting_known else {"straggler_percent": None, "overlap_percent": None}
    return summary._asdict() | unknown | {"bubble_percent": summary.bubble_percent, "lines": causes} | training


def _compare_runs(first: _RunRecords, second: _RunRecords) -> dict[str, Path]:
    """Compare two runs: their metrics in one chart each, and their times by cause."""
    compared, leads = _by_cause(first, second), [f"{run.folder}: {run.lead}" for run in (first, second)]
    say(*leads)
    if compared:
        print_table("ms per step", ["cause", str(first.folder), str(second.folder), "difference", "ratio"], compared)
    names = _short_names(first.folder, second.folder)
    sections = curves.training_sections(
        [run.metrics._replace(name=name) for run, name in zip((first, second), names, strict=True)]
    )
    if compared:
        shown = page.table(["cause", *names, "difference", "ratio"], compared)
        sections.append(page.section("Causes", "Milliseconds per step, mean of all ranks.", shown))
    path = first.folder / records.FOLDER / f"compare-{second.folder.resolve().name}.html"
    write_page(path, page.document(" and ".join(names), "\n".join(leads), *sections))
    return {"page": path}


def _short_names(*folders: Path) -> list[str]:
    """Return the last part of each path where that is unique."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [f"{i}: {folder}" for i, folder in enumerate(folders, start=1)]


def _by_cause(first: _RunRecords, second: _RunRecords) -> list[list[str]]:
    """Return table rows of the step and every cause that took time, if both runs recorded them."""
    one, other = first.summary, second.summary
    if one is None or other is None:
        return []
    pairs = [("step", one.step_ms, other.step_ms)]
    pairs += [(a.cause, a.ms, b.ms) for a, b in zip(one.lines, other.lines, strict=True)]
    rows = [(cause, a, b, f"{b / a:.2f}x" if a else "") for cause, a, b in pairs if max(a, b) >= 0.005]
    return [[cause, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}", ratio] for cause, a, b, ratio in rows]


@dataclass(frozen=True, kw_only=True)
class RunListOptions:
    """List the runs in a folder with their state, their last loss and their best metric, the newest last.

    freescale runs
    """

    folder: tyro.conf.Positional[Path] = Path("runs")
    """Where `freescale train` puts them."""
    json: Flag = False
    """Print the list as JSON."""


@dataclass(frozen=True)
class RunSummary:
    """One row of the list."""

    name: str
    state: str
    step: int
    loss: float | None
    best: str
    changed: str


def run_list(argv: Sequence[str], prog: str) -> int:
    """Print the list."""
    options = parse(RunListOptions, argv, prog)
    folders = [path for path in options.folder.glob("*") if (path / METRICS_FILE).exists() and not path.is_symlink()]
    runs = [_summarize_run(path) for path in sorted(folders, key=lambda path: (path / METRICS_FILE).stat().st_mtime)]
    if options.json:
        print_json([asdict(run) for run in runs])
        return 0
    if not runs:
        say(f"no runs in {options.folder}")
        return 0
    rows = [
        [r.name, r.state, f"{r.step:,}", "" if r.loss is None else f"{r.loss:.4f}", r.best, r.changed] for r in runs
    ]
    print_table(str(options.folder), ["run", "state", "step", "loss", "best", "changed"], rows, words=(0, 1, 4, 5))
    return 0


def _summarize_run(folder: Path) -> RunSummary:
    entries = list(read_entries(folder))
    trained = [entry for entry in entries if entry["kind"] == "train"]
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / METRICS_FILE).stat().st_mtime))
    step, loss = (trained[-1]["step"], trained[-1].get("loss")) if trained else (0, None)
    loss, state = loss if isinstance(loss, float) else None, _run_state(folder, entries)
    return RunSummary(folder.name, state, step, loss, _best_metric(entries), changed)


def _run_state(folder: Path, entries: Sequence[dict[str, Any]]) -> str:
    """Return the state from the end entry, or from the flight recorders if there is none."""
    if entries and entries[-1]["kind"] == "end":
        return "done" if entries[-1].get("finished") else "stopped"
    last = [operations[-1].at for operations in flight_recorder.read(folder).values() if operations]
    return "running" if last and time.time() - max(last) / 1e9 < _UNRESPONSIVE_SECONDS else "lost"


def _best_metric(entries: Sequence[dict[str, Any]]) -> str:
    """Return the best value over all evaluations, of the first of several labels."""
    evaluated = [entry for entry in entries if entry["kind"] == "evaluate"]
    for name in evaluated[0] if evaluated else ():
        values = [entry[name] for entry in evaluated if isinstance(entry.get(name), float)]
        if name.split("/")[0] in _BETTER and values:
            return f"{name} {_BETTER[name.split('/')[0]](values):.4f}"
    return ""
