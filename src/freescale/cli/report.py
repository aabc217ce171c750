"""`freescale report`: where the time of a training went, and what to do about it."""

import json
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from freescale.bubbles import records, ring
from freescale.bubbles.kineto.traces import read as read_traces
from freescale.bubbles.report import HEADER, advice, chosen, headline, report, rows
from freescale.bubbles.summary import Summary, summarize
from freescale.bubbles.trace import trace_of
from freescale.cli.options import Flag, parse, print_json, print_table, say
from freescale.errors import UsageError
from freescale.progress import progress
from freescale.train.journal import entries


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where the time went: a table here, a page and a trace beside the run. Two runs are compared.

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


def run(argv: Sequence[str], prog: str) -> int:
    """Print where the time went; write the page and the trace."""
    options = parse(Options, argv, prog)
    for run in () if options.json else options.runs:
        _tell_how_it_was_lost(run)
    with progress("reading records"):
        found = _read(options, prog)
    if len(found) == 2:
        _compare(found, as_json=options.json)
        return 0
    ((folder, recorded),) = found
    summary = summarize(recorded.intervals)
    written = _write(folder, recorded, options.steps)
    if options.json:
        print_json(_figures(summary) | {name: str(path) for name, path in written.items()})
        return 0
    say(headline(summary), *_recoveries(folder))
    print_table(str(folder), HEADER, rows(summary.lines))
    say(*(f"{cause}: {text}" for cause, text in (*advice(summary.lines), *written.items())))
    if options.open and not webbrowser.open(written["page"].resolve().as_uri()):
        say("no browser was found to open it")
    return 0


def _tell_how_it_was_lost(run: Path) -> None:
    """What every rank was about when a start of this run did not end well."""
    if lost := ring.read(run):
        header = ["rank", "step of its start", "begun and not ended", "silent before the last"]
        print_table("last operations of a start that was lost, or still runs", header, ring.stuck(lost), words=(2,))


def _recoveries(run: Path) -> Iterator[str]:
    """How often ranks were started again, and how long it took until they had done a step."""
    if took := [entry["seconds"] for entry in entries(run) if entry["kind"] == "recovery"]:
        yield f"started again {len(took)} times, in {sum(took) / len(took):.1f} s each, at most {max(took):.1f} s"


def _read(options: Options, prog: str) -> list[tuple[Path, records.Recorded]]:
    if options.from_kineto is not None and not options.runs:
        traces = read_traces(options.from_kineto)
        return [(options.from_kineto, records.of_steps(traces.steps, traces.clock_bound))]
    if options.from_kineto is not None or len(options.runs) not in (1, 2):
        remedy = f"see {prog} --help"
        raise UsageError("name one run, two runs to compare, or --from-kineto and a folder", remedy=remedy)
    return [(run, records.read(run)) for run in options.runs]


def _write(run: Path, found: records.Recorded, steps: tuple[int, ...]) -> dict[str, Path]:
    if unknown := [step for step in steps if step not in found.samples]:
        remedy = f"choose from {', '.join(map(str, found.samples))}"
        raise UsageError(f"step {unknown[0]} was not kept whole", where=str(run), remedy=remedy)
    folder = run / records.FOLDER
    folder.mkdir(exist_ok=True)
    page, trace = folder / "report.html", folder / "trace.json"
    page.write_text(report(str(run), found, steps or chosen(found.samples)), encoding="utf-8")
    trace.write_text(json.dumps(trace_of(found.samples)), encoding="utf-8")
    return {"page": page, "trace": trace}


def _figures(summary: Summary) -> dict[str, Any]:
    causes = {line.cause: {n: v for n, v in line._asdict().items() if n != "cause"} for line in summary.lines}
    return summary._asdict() | {"bubble_percent": summary.bubble_percent, "lines": causes}


def _compare(found: Sequence[tuple[Path, records.Recorded]], *, as_json: bool) -> None:
    """Two runs side by side, cause by cause."""
    (one, first), (two, second) = ((str(folder), summarize(recorded.intervals)) for folder, recorded in found)
    if as_json:
        print_json({one: _figures(first), two: _figures(second)})
        return
    pairs = [("step", first.step_ms, second.step_ms)]
    pairs += [(a.cause, a.ms, b.ms) for a, b in zip(first.lines, second.lines, strict=True)]
    seen = [(cause, a, b, f"{b / a:.2f}x" if a else "") for cause, a, b in pairs if max(a, b) >= 0.005]
    shown = [[cause, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}", ratio] for cause, a, b, ratio in seen]
    say(f"{one}: {headline(first)}", f"{two}: {headline(second)}")
    print_table("ms per step", ["cause", one, two, "difference", "ratio"], shown)
