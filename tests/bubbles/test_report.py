"""The report shows where the time went, as a table, an offline page, a trace and JSON."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freescale.bubbles import records
from freescale.bubbles.events import CAUSES
from freescale.bubbles.report import COLOURS, report_sections, representative_steps
from freescale.bubbles.summary import summarize
from freescale.cli.main import main
from freescale.train import curves
from tests.bubbles.synthetic import steps
from tests.bubbles.traces import cuda_traces
from tests.test_page import Links, in_browser

FIGURES = ["loss", "samples/s", "tokens/s", "lr", "tables_lr", "grad_norm", "grad_norm_max", "unique_ids"]
FIGURES += ["colliding_ids", "imbalance_before", "imbalance_after", "moved_tokens", "busiest_owner"]
LOOK = """
<script>
const cut = [], over = [];
let texts = 0;
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
  for (const [name, box] of boxes)
    if (box.left < frame.left - 1 || box.right > frame.right + 1) cut.push(name);
    else if (box.top < frame.top - 1 || box.bottom > frame.bottom + 1) cut.push(name);
  for (let i = 1; i < boxes.length; i++) {
    const [a, b] = [boxes[i - 1][1], boxes[i][1]];
    const beside = a.right - 1 < b.left || b.right - 1 < a.left;
    if (!beside && a.top < b.bottom - 3 && b.top < a.bottom - 3) over.push(boxes[i][0]);
  }
  texts += boxes.length;
}
const asked = performance.getEntriesByType("resource").map(entry => entry.name);
document.title = JSON.stringify({texts, cut, over, asked, wide: document.body.scrollWidth > innerWidth});
</script>
"""


def written(folder: Path, ranks: int, count: int) -> Path:
    """A run of so many ranks, in the files that a real one writes."""
    recorded = records.from_steps(steps(ranks, count), clock_bound=2500)
    writer = records.RecordWriter(folder)
    for interval in recorded.intervals:
        writer.write_interval(interval)
    every = -(-ranks // records.SAMPLED_RANKS)
    for rank in range(0, ranks, every):
        writer.write_samples([of_ranks[rank] for of_ranks in list(recorded.samples.values())[-8:]])
    return folder


def noted(run: Path, steps: int, *, restarts: Sequence[int] = (), scale: float = 1.0) -> Path:
    """The metrics of a training of so many steps, restarted at some, in the file that a real one writes."""
    starts = {
        step: {"kind": "start", "step": step, "world_size": 2, "reason": "a rank was lost"} for step in (0, *restarts)
    }
    lines = []
    for step in range(0, steps + 1, 10):
        lines += [starts[step]] if step in starts else []
        figures = {name: scale * (2 + math.sin(step / 50)) * 0.9 ** (step / 100) for name in FIGURES}
        lines += [{"kind": "train", "step": step, **figures}] if step else []
        if step and step % 50 == 0:
            metrics = {"hr@10": 0.1 + scale * step / 10_000, "hr@50": 0.3, "mrr": 0.05, "users": 600}
            lines.append({"kind": "evaluate", "step": step, **metrics})
    run.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line | {"time": 1.75e9 + at}) + "\n" for at, line in enumerate(lines))
    (run / "metrics.jsonl").write_text(text)
    return run


def looked_at(page: Path, width: int) -> str:
    """What a browser shows of a page that is readable, asks for nothing and fits a window of this width."""
    text = page.read_text()
    assert len(text) < 5_000_000
    links = Links()
    links.feed(text)
    assert links.resources == []
    looked = page.with_name("looked.html")
    looked.write_text(text.replace("</body>", LOOK + "</body>"))
    shown = in_browser(looked, "--dump-dom", f"--window-size={width},2000").stdout
    found = json.loads(re.search(r"<title>(.*?)</title>", shown)[1])  # type: ignore[index]
    assert found["texts"] > 30
    assert found["cut"] == []
    assert found["over"] == []
    assert not found["wide"]
    assert found["asked"] == []
    return shown


@pytest.mark.parametrize(("ranks", "count", "width"), [(2, 12, 600), (8, 40, 1200), (256, 100, 1050)])
def test_the_page_is_readable_in_a_browser_and_loads_nothing(
    tmp_path: Path, ranks: int, count: int, width: int
) -> None:
    run = noted(written(tmp_path / "run", ranks, count), 200)
    assert main(["report", str(run)]) == 0
    shown = looked_at(run / "bubbles" / "report.html", width)
    for chart in ("Loss", "Evaluation: hr", "Gradient norm of the dense model", "Samples per second", "Embedding ids"):
        assert f"<figcaption>{chart}</figcaption>" in shown
    for heading in ("Causes", "By rank", "Over time", "Who waits for whom", "Measured time against the cost model"):
        assert f"<h2>{heading}</h2>" in shown
    assert shown.count("<h2>Step ") == 2


@pytest.mark.parametrize("width", [600, 1200])
def test_pages_of_resumed_and_compared_runs_are_readable(tmp_path: Path, width: int) -> None:
    one = noted(written(tmp_path / "one", 2, 12), 400)
    two = noted(written(tmp_path / "two", 2, 12), 900, restarts=(100, 110, 600), scale=0.01)
    assert main(["report", str(two)]) == 0
    shown = looked_at(two / "bubbles" / "report.html", width)
    assert shown.count("start 3 from step 110 on 2 ranks: a rank was lost") == shown.count("<figure>")
    assert "<h2>Starts</h2>" in shown
    assert main(["report", str(one), str(two)]) == 0
    shown = looked_at(one / "bubbles" / "compare-two.html", width)
    charts = re.findall("<figure>.*?</figure>", shown, re.DOTALL)
    assert len(charts) == len(FIGURES) + 3  # and one of each metric
    assert all(chart.count("<polyline") == 2 for chart in charts)


def test_a_resumed_run_is_reported_with_all_its_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = noted(written(tmp_path, 4, 12), 400, restarts=(100, 110))
    before = summarize(records.read_intervals(run)).steps
    writer = records.RecordWriter(run)
    for interval in records.from_steps(steps(2, 30), clock_bound=0).intervals[12:]:
        writer.write_interval(interval)  # resumed on fewer ranks
    assert main(["report", str(run)]) == 0
    told = capsys.readouterr().out
    assert "3 starts, 48.0 s" in told  # a second before each of two restarts is nobody's
    assert f"4 then 2 ranks, {before + 18} steps" in told
    page = (run / "bubbles" / "report.html").read_text()
    assert "3 starts, 48.0 s" in page
    assert f"4 then 2 ranks, {before + 18} steps" in page
    assert main(["report", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["steps"], figures["world_sizes"], figures["restarts"]) == (before + 18, [4, 2], 2)
    assert [start["step"] for start in figures["starts"]] == [0, 100, 110]
    assert figures["seconds"] == pytest.approx(48)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "No metrics were logged yet"),
        ([{"kind": "train", "step": 10, "loss": 2.0}], "step 10\nloss: 2"),
        ([{"kind": "train", "step": s, "loss": math.nan} for s in (10, 20)], "2 values of 2 not finite"),
        ([{"kind": "train", "step": s, "loss": math.nan if s == 30 else s} for s in range(60)], "1 value of 60"),
        ([{"kind": "train", "step": 1, "loss": "low", "lr": [1], "grad_norm": 1e300}], "1 value of 1 not finite"),
        ([{"kind": "evaluate", "step": 1, "hr@10": 0.5}], "Evaluation: hr@10"),
        (
            [{"kind": "start", "step": 0, "time": 1e29, "world_size": "two", "reason": None}],
            "No metrics were logged yet",
        ),
        ([{"kind": "train", "step": s, "loss": 1e29 * s} for s in (0, 2**53 - 1)], "Loss"),
    ],
)
def test_any_metrics_give_a_page(tmp_path: Path, lines: list[dict[str, Any]], says: str) -> None:
    run = written(tmp_path, 2, 12)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + '{"kind": "train", "st')
    assert main(["report", str(run)]) == 0
    page = (run / "bubbles" / "report.html").read_text()
    assert says in page
    assert "1 line of" in page, "what is damaged is told"
    assert "nan" not in page


def test_a_run_without_metrics_is_reported_by_its_times_alone(tmp_path: Path) -> None:
    run = written(tmp_path, 2, 12)
    assert main(["report", str(run)]) == 0
    page = (run / "bubbles" / "report.html").read_text()
    assert "<h2>Training</h2>" not in page
    assert "<h2>Causes</h2>" in page


def test_a_run_that_ended_before_its_first_interval_is_reported_by_its_metrics_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = noted(tmp_path, 10)
    assert main(["report", str(run)]) == 0
    assert "no interval of steps was recorded yet" in capsys.readouterr().out
    assert "<figcaption>Loss</figcaption>" in (run / "bubbles" / "report.html").read_text()
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["restarts"] == 0
    assert main(["report", str(run), str(written(tmp_path / "other", 2, 12))]) == 0
    assert (run / "bubbles" / "compare-other.html").exists()


def test_a_long_run_gives_a_page_of_bounded_size_that_still_shows_its_extremes(tmp_path: Path) -> None:
    losses = [9.0 if step == 31_415 else 1.0 + step % 7 / 100 for step in range(100_000)]
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate(losses)]
    training = "".join(curves.training_sections([curves.RunMetrics("long", lines)]))
    assert len(training) < 200_000
    assert "step 31,415\nloss: 9" in training


def test_dynamic_tables_have_charts_of_their_load_and_changes() -> None:
    changes = {"load": 0.5, "new": 7, "evicted": 3, "waiting": 2, "without_slot": 1}
    lines = [
        {"kind": "train", "step": step} | {f"ids/{table}/{name}": value for name, value in changes.items()}
        for step in (4, 8)
        for table in ("artist",)
    ]
    run = curves.RunMetrics("one", lines)
    alone, compared = ("".join(curves.training_sections(runs)) for runs in ([run], [run, run._replace(name="other")]))
    for title in ("Slots of table artist in use", "Dynamic ids of table artist, by interval"):
        assert title in alone
    for label in ("new", "evicted", "shared row: not admitted yet", "shared row: no slot"):
        assert label in alone
        assert f"Dynamic ids of table artist, by interval: {label}" in compared


def test_every_cause_has_a_distinct_colour() -> None:
    assert list(COLOURS) == list(CAUSES)
    for (one, a), (two, b) in itertools.combinations(COLOURS.items(), 2):
        assert np.linalg.norm(lab(a) - lab(b)) > 20, (one, two)


def lab(colour: str) -> np.ndarray:
    """A colour where distances are as people see them (CIE L*a*b*)."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    bent = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * bent[1] - 16, 500 * (bent[0] - bent[1]), 200 * (bent[1] - bent[2])])


def test_the_summary_adds_up_and_names_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    recorded = records.read(written(tmp_path, 8, 40))
    summary = summarize(recorded.intervals)
    assert sum(line.ms for line in summary.lines) == pytest.approx(summary.step_ms)
    assert sum(line.share for line in summary.lines) == pytest.approx(1.0)
    by_cause = {line.cause: line for line in summary.lines}
    assert by_cause["backward"].worst == "2"  # `steps` makes rank 8 // 3 slow
    assert "balance.mode" in by_cause["straggler"].advice
    assert by_cause["ids"].advice == ""  # too short to be worth a word
    assert by_cause["deferred rows"].hidden_ms == pytest.approx(by_cause["forward"].ms, rel=1e-3)


def test_the_table_and_the_numbers_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path, 2, 12)
    assert main(["report", str(run)]) == 0
    table = capsys.readouterr().out
    assert main(["report", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    for cause, line in figures["lines"].items():
        if line["ms"] > 0.01:
            assert re.search(rf"{cause} .*{line['ms']:.2f} ", table), cause
    assert f"{figures['step_ms']:.1f} ms" in table


def without_collectives(folder: Path, ranks: int) -> Path:
    """A run whose ranks recorded phases only."""
    of_ranks = [[step._replace(transfers=()) for step in ranks_of] for ranks_of in steps(ranks, 12)]
    for interval in records.from_steps(of_ranks, clock_bound=0).intervals:
        records.RecordWriter(folder).write_interval(interval)
    return folder


def test_waiting_is_not_stated_where_no_collective_was_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = without_collectives(tmp_path, 2)
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert "no collective was recorded, so waiting for slower ranks is not known" in " ".join(said.split())
    assert "record_comm_hook" in said
    assert "% waiting for slower ranks" not in said
    assert "Who waits for whom" not in (run / "bubbles" / "report.html").read_text()
    assert main(["report", str(run), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["straggler_percent"], figures["overlap_percent"]) == (None, None)


def test_one_rank_waits_for_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(without_collectives(tmp_path, 1))]) == 0
    assert "0.0% waiting for slower ranks" in " ".join(capsys.readouterr().out.split())


def test_without_a_browser_the_page_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    run = written(tmp_path, 2, 12)
    assert main(["report", str(run), "--open"]) == 0
    assert "no browser was found to open" in (said := capsys.readouterr().out)
    assert "report.html" in said.partition("no browser")[2]


def test_the_trace_holds_every_instant_of_the_sampled_steps(tmp_path: Path) -> None:
    run = written(tmp_path, 2, 12)
    assert main(["report", str(run)]) == 0
    events = json.loads((run / "bubbles" / "trace.json").read_text())["traceEvents"]
    blocks = [event for event in events if event["ph"] == "X"]
    samples = records.read_samples(run).values()
    for rank in (0, 1):
        took = sum(event["dur"] for event in blocks if event["pid"] == rank and event["tid"] == 0)
        causes = sum(event["dur"] for event in blocks if event["pid"] == rank and event["tid"] == 1)
        assert took == pytest.approx(causes)
        ns = sum(of_ranks[rank].step.end - of_ranks[rank].step.begin for of_ranks in samples)
        assert took == pytest.approx(ns / 1e3), "the unit of a trace is the microsecond"
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"causes", "urgent rows", "dense gradients"} <= names


def test_two_runs_are_compared_cause_by_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = written(tmp_path / "one", 2, 12), written(tmp_path / "two", 8, 12)
    assert main(["report", str(one), str(two)]) == 0
    table = capsys.readouterr().out
    a, b = (summarize(records.read_intervals(run)).step_ms for run in (one, two))
    assert re.search(rf"step .*{a:.2f}.*{b:.2f}.*{re.escape(f'{b - a:+.2f}')}.*{b / a:.2f}x", table)
    assert main(["report", str(one), str(two), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [str(one), str(two)]


def test_traces_of_any_trainer_are_reported_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for trace in cuda_traces():
        trace.write(tmp_path)
    assert main(["report", "--from-kineto", str(tmp_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["world_size"] == 2
    assert figures["overlap_percent"] > 0
    assert (tmp_path / "bubbles" / "report.html").exists()
    assert main(["report", "--from-kineto", str(tmp_path)]) == 0  # what was written is not taken for a trace


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "name one run"),
        (["a", "b", "c"], 2, "name one run"),
        (["nowhere"], 3, "there is no run"),
        (["RUN", "--steps", "3"], 2, "was not kept whole"),
    ],
)
def test_wrong_usage_is_an_error_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    run = written(tmp_path, 2, 12)
    assert main(["report", *(str(run) if word == "RUN" else word for word in words)]) == code
    assert said in capsys.readouterr().err


def test_the_shortest_run_gives_a_page(tmp_path: Path) -> None:
    recorded = records.from_steps(steps(1, 1), clock_bound=0)
    assert "<svg" in "".join(report_sections(recorded, representative_steps(recorded.samples)))
    assert "<svg" in "".join(report_sections(recorded._replace(samples={}), []))
