"""`freescale report`: how a training went, where its time went, and what to do about it."""

import json
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from freescale.train.metrics_logger import count_damaged_lines, entry_value, read_entries


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a training went and where its time went: a table here, a page and a trace beside the run. Two are compared.

    freescale report runs/latest --open
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folder of a training, such as runs/latest; two to compare them."""
    from_kineto: Path | None = None
    """Instead: a folder of torch.profiler traces of all ranks, of any trainer."""
    steps: tuple[int, ...] = ()
    """Sampled steps to draw; without, a middling one and the slowest."""
    open: Flag = False
    """Open the page in a browser."""
    json: Flag = False
    """Print everything as JSON."""
    quiet: Flag = False
    """Show no progress, only results, notes and errors."""


@dataclass(frozen=True)
class _Found:
    """What a run left in its folder."""

    folder: Path
    recorded: records.RunRecord | None
    """None before the first interval was recorded."""
    noted: curves.RunMetrics

    @cached_property
    def summary(self) -> Summary | None:
        """Where the time went."""
        return None if self.recorded is None else summarize(self.recorded.intervals)

    @property
    def lead(self) -> str:
        """The run in a line or two."""
        told = [curves.headline(self.noted)] if self.noted.entries else []
        told += [] if self.summary is None else [headline(self.summary)]
        return "\n".join(told)


def run(argv: Sequence[str], prog: str) -> int:
    """Print how the training went and where the time went; write the page and the trace."""
    options = parse(Options, argv, prog)
    for run in () if options.json else options.runs:
        _tell_how_it_was_lost(run)
    with progress("reading records"):
        found = _read(options, prog)
    if options.json:
        print_json(
            {str(one.folder): _figures(one) for one in found} if len(found) > 1 else _one_as_json(options, found[0])
        )
        return 0
    written = _compare(*found) if len(found) > 1 else _show(found[0], options.steps)
    say(*(f"{name}: {path}" for name, path in written.items()))
    if options.open and not webbrowser.open(written["page"].resolve().as_uri()):
        say("no browser was found to open it")
    return 0


def _tell_how_it_was_lost(run: Path) -> None:
    """What every rank was about when a start of this run did not end well."""
    if lost := flight_recorder.read(run):
        header = ["rank", "step of its start", "begun and not ended", "silent before the last"]
        print_table(
            "last operations of a start that was lost, or still runs",
            header,
            flight_recorder.unfinished_operations(lost),
            words=(2,),
        )


def _read(options: Options, prog: str) -> list[_Found]:
    if options.from_kineto is not None and not options.runs:
        traces, folder = read_traces(options.from_kineto), options.from_kineto
        return [
            _Found(folder, records.from_steps(traces.steps, traces.clock_bound), curves.RunMetrics(str(folder), []))
        ]
    if options.from_kineto is not None or len(options.runs) not in (1, 2):
        remedy = f"see {prog} --help"
        raise UsageError("name one run, two runs to compare, or --from-kineto and a folder", remedy=remedy)
    return [_found(run) for run in options.runs]


def _found(run: Path) -> _Found:
    """A run that was ended before the first interval has metrics only."""
    noted = curves.RunMetrics(str(run), list(read_entries(run)), count_damaged_lines(run))
    recorded = records.read(run) if records.is_recorded(run) or not noted.entries else None
    return _Found(run, recorded, noted)


def _show(one: _Found, steps: tuple[int, ...]) -> dict[str, Path]:
    """Print one run and write its files."""
    written, summary, noted = _write(one, steps), one.summary, one.noted
    say(*([curves.headline(noted)] if noted.entries else []), *_recoveries(noted))
    starts = curves.start_rows(noted)
    if len(starts) > 1:
        print_table("starts", curves.STARTS_HEADER, starts, words=(0, 1, 6))
    if summary is None:
        say("no interval of steps was recorded yet, so nothing is known of where the time went")
        return written
    say(headline(summary))
    print_table(str(one.folder), HEADER, cause_rows(summary.lines))
    say(*(f"{cause}: {text}" for cause, text in advice(summary.lines)))
    return written


def _recoveries(run: curves.RunMetrics) -> Iterator[str]:
    """How often ranks were started again, and how long it took until they had done a step."""
    if took := [entry_value(entry, "seconds", 0.0) for entry in run.entries if entry["kind"] == "recovery"]:
        yield f"started again {len(took)} times, in {sum(took) / len(took):.1f} s each, at most {max(took):.1f} s"


def _write(one: _Found, steps: tuple[int, ...]) -> dict[str, Path]:
    samples = {} if one.recorded is None else one.recorded.samples
    if unknown := [step for step in steps if step not in samples]:
        remedy = f"choose from {', '.join(map(str, samples))}" if samples else "leave out --steps"
        raise UsageError(f"step {unknown[0]} was not kept whole", where=str(one.folder), remedy=remedy)
    folder = one.folder / records.FOLDER
    sections = curves.training_sections([one.noted]) if one.noted.entries or one.noted.damaged else []
    sections += [] if one.recorded is None else report_sections(one.recorded, steps or representative_steps(samples))
    written = {"page": folder / "report.html", "trace": folder / "trace.json"}
    write_page(written["page"], page.document(str(one.folder), one.lead, *sections))
    written["trace"].write_text(json.dumps(chrome_trace(samples)), encoding="utf-8")
    return written


def _one_as_json(options: Options, one: _Found) -> dict[str, Any]:
    return _figures(one) | {name: str(path) for name, path in _write(one, options.steps).items()}


def _figures(one: _Found) -> dict[str, Any]:
    summary, training = one.summary, curves.training_values(one.noted) if one.noted.entries else {}
    if summary is None:
        return training
    causes = {line.cause: {n: v for n, v in line._asdict().items() if n != "cause"} for line in summary.lines}
    return summary._asdict() | {"bubble_percent": summary.bubble_percent, "lines": causes} | training


def _compare(one: _Found, two: _Found) -> dict[str, Path]:
    """Two runs side by side: their figures in one chart each, and their times cause by cause."""
    compared, leads = _by_cause(one, two), [f"{found.folder}: {found.lead}" for found in (one, two)]
    say(*leads)
    if compared:
        print_table("ms per step", ["cause", str(one.folder), str(two.folder), "difference", "ratio"], compared)
    names = _short_names(one.folder, two.folder)
    sections = curves.training_sections(
        [found.noted._replace(name=name) for found, name in zip((one, two), names, strict=True)]
    )
    if compared:
        shown = page.table(["cause", *names, "difference", "ratio"], compared)
        sections.append(page.section("Causes", "Milliseconds per step, mean of all ranks.", shown))
    path = one.folder / records.FOLDER / f"compare-{two.folder.resolve().name}.html"
    write_page(path, page.document(" and ".join(names), "\n".join(leads), *sections))
    return {"page": path}


def _short_names(*folders: Path) -> list[str]:
    """The last part of each path where that tells them apart."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [f"{i}: {folder}" for i, folder in enumerate(folders, start=1)]


def _by_cause(one: _Found, two: _Found) -> list[list[str]]:
    """The step and every cause that took any time, as far as both runs recorded them."""
    first, second = one.summary, two.summary
    if first is None or second is None:
        return []
    pairs = [("step", first.step_ms, second.step_ms)]
    pairs += [(a.cause, a.ms, b.ms) for a, b in zip(first.lines, second.lines, strict=True)]
    seen = [(cause, a, b, f"{b / a:.2f}x" if a else "") for cause, a, b in pairs if max(a, b) >= 0.005]
    return [[cause, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}", ratio] for cause, a, b, ratio in seen]
