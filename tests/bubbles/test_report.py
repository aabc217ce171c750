"""Promise: the report says where the time went, in a table, a page that opens offline, a trace and numbers."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from freescale.bubbles import records
from freescale.bubbles.events import CAUSES
from freescale.bubbles.report import COLOURS, chosen, report
from freescale.bubbles.summary import summarize
from freescale.cli.main import main
from tests.bubbles.kineto_traces import cuda_traces
from tests.bubbles.made_up import steps
from tests.test_page import Links, in_browser

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
    recorded = records.of_steps(steps(ranks, count), clock_bound=2500)
    writer = records.Writer(folder)
    for interval in recorded.intervals:
        writer.interval(interval)
    every = -(-ranks // records.SAMPLED_RANKS)
    for rank in range(0, ranks, every):
        writer.samples([of_ranks[rank] for of_ranks in list(recorded.samples.values())[-8:]])
    return folder


@pytest.mark.parametrize(("ranks", "count"), [(2, 12), (8, 40), (256, 100)])
def test_the_page_is_readable_in_a_browser_and_asks_for_nothing(tmp_path: Path, ranks: int, count: int) -> None:
    run = written(tmp_path / "run", ranks, count)
    assert main(["report", str(run)]) == 0
    text = (run / "bubbles" / "report.html").read_text()
    assert len(text) < 5_000_000
    links = Links()
    links.feed(text)
    assert links.found == []
    (tmp_path / "looked.html").write_text(text.replace("</body>", LOOK + "</body>"))
    shown = in_browser(tmp_path / "looked.html", "--dump-dom", "--window-size=1050,2000").stdout
    found = json.loads(re.search(r"<title>(.*?)</title>", shown)[1])  # type: ignore[index]
    assert found["texts"] > 30
    assert found["cut"] == []
    assert found["over"] == []
    assert not found["wide"]
    assert found["asked"] == []
    for heading in ("Causes", "By rank", "Over time", "Who waits for whom", "Measured time against the cost model"):
        assert f"<h2>{heading}</h2>" in shown
    assert shown.count("<h2>Step ") == 2


def test_every_cause_has_a_colour_and_no_two_look_alike() -> None:
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
    assert by_cause["backward"].worst == "2"  # made_up makes rank 8 // 3 slow
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


def test_the_trace_holds_every_instant_of_the_sampled_steps(tmp_path: Path) -> None:
    run = written(tmp_path, 2, 12)
    assert main(["report", str(run)]) == 0
    events = json.loads((run / "bubbles" / "trace.json").read_text())["traceEvents"]
    blocks = [event for event in events if event["ph"] == "X"]
    for rank in (0, 1):
        took = sum(event["dur"] for event in blocks if event["pid"] == rank and event["tid"] == 0)
        causes = sum(event["dur"] for event in blocks if event["pid"] == rank and event["tid"] == 1)
        assert took == pytest.approx(causes)
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
    assert figures["ranks"] == 2
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
def test_wrong_use_is_told_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    run = written(tmp_path, 2, 12)
    assert main(["report", *(str(run) if word == "RUN" else word for word in words)]) == code
    assert said in capsys.readouterr().err


def test_a_page_can_be_made_of_the_shortest_run(tmp_path: Path) -> None:
    recorded = records.of_steps(steps(1, 1), clock_bound=0)
    assert "<svg" in report("one step", recorded, chosen(recorded.samples))
    assert "<svg" in report("no sample", recorded._replace(samples={}), [])
