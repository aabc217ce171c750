"""Long tasks show their progress and remaining time, and progress never mixes with results.

On a terminal a bar, elsewhere a line now and then, nothing with `--quiet` and nothing but on rank 0.
"""

import os
import pty
import re
import subprocess
import sys
import threading
import time
from functools import partial
from typing import NamedTuple

import pytest

from freescale import progress as module
from freescale.cli.main import COMMANDS, main
from freescale.progress import (
    ProgressBar,
    ProgressDisplay,
    ProgressState,
    estimate_remaining,
    fit_line,
    line_is_due,
    plain_line,
    progress,
    session,
    track,
)

_BRIEF = {"config", "runs", "tables"}
"""Commands that never take long."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_remaining_time_follows_the_mean_speed_and_counts_down_between_updates() -> None:
    clock = Clock()
    bar = ProgressBar("work", 10, clock=clock)
    assert bar.state().seconds_left is None
    clock.now += 4
    bar.advance(2)
    assert bar.state().seconds_left == 16
    clock.now += 1
    assert bar.state().seconds_left == 15
    clock.now += 95
    assert bar.state().seconds_left == 150, "the fourth of 10 ends after now, 100 seconds after the start"
    bar.update(4, seconds_left=123.0)
    clock.now += 3
    assert bar.state().seconds_left == 120
    clock.now += 1000
    assert bar.state().seconds_left == 0


def test_there_is_no_estimate_without_a_total_or_progress() -> None:
    assert estimate_remaining(5, None, 1.0) is None
    assert estimate_remaining(0, 10, 1.0) is None
    assert estimate_remaining(12, 10, 6.0) == 0, "a total may have been an estimate"


def test_a_plain_line_is_printed_after_ten_seconds_and_then_every_thirty() -> None:
    printed: list[float] = []
    for second in range(100):
        if line_is_due(float(second), second - printed[-1] if printed else None):
            printed.append(float(second))
    assert printed == [10, 40, 70]


@pytest.mark.parametrize(
    ("state", "line"),
    [
        (ProgressState("ranking", "users", 1500, 6000, 20.0, 60.0), "ranking: 25%, 1:00 left, 1,500 of 6,000 users"),
        (ProgressState("reading x", "B", 2.5e6, 1e9, 20.0, 7980.0), "reading x: 0%, 2:13:00 left, 2.5 MB of 1.0 GB"),
        (ProgressState("reading x", "B", 2.5e6, None, 5.0), "reading x: 2.5 MB, 500.0 kB/s, 0:05"),
        (ProgressState("counting", "events", 3000, None, 2.0), "counting: 3,000 events, 1,500/s, 0:02"),
        (ProgressState("ranking", "users", 0, 6000, 20.0), "ranking: 0%, 0:20 so far, 0 of 6,000 users"),
        (ProgressState("loading torch", "", 0, None, 12.0), "loading torch: 0:12"),
        (ProgressState("sorting", "buckets", 0, 1, 12.0), "sorting: 0:12"),
    ],
)
def test_a_plain_line_shows_fraction_remaining_time_and_counts_or_speed(state: ProgressState, line: str) -> None:
    assert plain_line(state) == line


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("total", [None, 4000])
@pytest.mark.parametrize("text", ["training", "reading a-log-with-a-name-longer-than-any-terminal-is-wide.csv.gz"])
def test_a_line_fits_its_terminal(width: int, total: int | None, text: str) -> None:
    details = ("loss 7.1234", "12,345 samples/s", "1,234,567 tokens/s")
    line = fit_line(ProgressState(text, "steps", 1234, total, 3600.0, 7200.0, details), width)
    assert len(f"{line.text} {'━' * (line.bar or 1)}  {line.figures}^C") < width
    assert (line.bar > 0) == (total is not None)
    assert total is None or width < 60 or "2:00:00 left" in line.figures, "the remaining time is dropped last"
    assert width < 120 or text != "training" or "tokens/s" in line.figures


def test_lines_follow_the_clock_of_the_command_through_all_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    display = ProgressDisplay(clock)
    display.begin()
    printed: dict[float, str] = {}
    for part in range(9):  # 7 seconds each: none is long enough for a line
        bar = ProgressBar(f"part {part}", in_background=False, clock=clock)
        display.open(bar)
        for _ in range(7):
            clock.now += 1
            display.tick()
            if line := capsys.readouterr().err:
                printed[clock.now - 100] = line
        display.close(bar)
    assert printed == {10: "part 1: 0:03\n", 40: "part 5: 0:05\n"}


def test_a_short_nested_task_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    display = ProgressDisplay(clock)
    display.begin()
    display.open(ProgressBar("outer", in_background=False, clock=clock))
    clock.now += 10
    display.open(ProgressBar("inner", in_background=False, clock=clock))
    clock.now += 1
    display.tick()
    assert capsys.readouterr().err == "outer: 0:11\n"
    clock.now += 30
    display.tick()
    assert capsys.readouterr().err == "inner: 0:31\n"


def test_a_task_that_just_started_prints_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    display = ProgressDisplay(clock)
    display.begin()
    clock.now += 10
    display.open(ProgressBar("work", 4, "files", in_background=False, clock=clock))
    display.tick()
    assert capsys.readouterr().err == ""
    clock.now += 2
    display.tick()
    assert capsys.readouterr().err == "work: 0%, 0:02 so far, 0 of 4 files\n"


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Output of a task when the first line is due immediately."""
    monkeypatch.setattr(module, "FIRST_LINE_SECONDS", 0.0)
    with session(), progress("work", total=4, at_once=True, in_background=False):
        pass
    return capsys.readouterr().err


def test_only_rank_zero_shows_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(capsys, monkeypatch) == "work: 0%\n"
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "0")
        assert shown(capsys, monkeypatch) == "work: 0%\n"
        monkeypatch.setenv(name, "1")
        assert shown(capsys, monkeypatch) == ""
        monkeypatch.delenv(name)


def _drawing() -> bool:
    """Whether a drawing thread runs after a short wait."""
    time.sleep(0.1)
    return any(thread.name == "freescale-progress" for thread in threading.enumerate())


def test_a_measurement_runs_without_a_drawing_thread() -> None:
    with progress("around"):
        assert _drawing()
        for _ in track([1, 2], "measuring", in_background=False):
            assert not _drawing()
        assert _drawing()
    assert not _drawing()


def test_tracked_items_are_complete_and_in_order() -> None:
    assert list(track(iter("abc"), "letters", size=len)) == ["a", "b", "c"]


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - _BRIEF))
def test_every_command_that_may_take_long_can_be_quiet(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    assert "--quiet" in capsys.readouterr().out


_IMPORT = """
import sys, time
import rich.live
from freescale import progress
from freescale.cli.main import main
from freescale.data import histories
from freescale.log import warning_once
progress.SHOW_SECONDS = progress.FIRST_LINE_SECONDS = progress.LINE_SECONDS = 0.2
real = histories._group_by_user
def slow(*arguments):
    time.sleep(1.2)
    warning_once("logged meanwhile")
    print("a result")
    time.sleep(0.3)
    return real(*arguments)
histories._group_by_user = slow
sys.exit(main(sys.argv[1:]))
"""


class ImportOutput(NamedTuple):
    """Output of an import."""

    stderr: str
    """From stderr."""
    result: str
    """From stdout, redirected to a file."""


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImportOutput]:
    """A long import on a terminal of 60 columns, on a terminal with --quiet, and without a terminal."""
    folder = tmp_path_factory.mktemp("progress")
    log = folder / "log.csv"
    log.write_text("user_id,item_id,timestamp\n" + "".join(f"{i % 50},{i % 7},{i}\n" for i in range(1000)))
    environment = os.environ | {"COLUMNS": "60", "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    running = {}
    for name, (ours, theirs) in {"bar": pty.openpty(), "quiet": pty.openpty(), "lines": os.pipe()}.items():
        words = ["data", "import", "events", str(log), str(folder / name), "--time-unit", "s"]
        words += ["--quiet"] if name == "quiet" else []
        command = [sys.executable, "-c", _IMPORT, *words]
        with (folder / f"{name}.out").open("wb") as out:
            running[name] = ours, subprocess.Popen(command, stdout=out, stderr=theirs, env=environment)
        os.close(theirs)
    outputs = {}
    for name, (ours, process) in running.items():
        stderr = b"".join(iter(partial(_read, ours), b""))
        os.close(ours)
        assert process.wait(60) == 0, stderr
        outputs[name] = ImportOutput(stderr.decode(), (folder / f"{name}.out").read_text())
    return outputs


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux: the other side is closed
        return b""


def test_a_long_import_shows_a_bar_on_a_terminal_and_leaves_it_clean(imports: dict[str, ImportOutput]) -> None:
    stderr = imports["bar"].stderr
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", stderr)]
    assert any(re.fullmatch(r"sorting histories [|/\\-]  0:0\d", line) for line in lines)
    assert "warning: logged meanwhile" in lines, "a log record has a separate line"
    assert max(map(len, lines)) < 60
    assert stderr.rindex("\x1b[?25h") > stderr.rindex("\x1b[?25l"), "the cursor is shown again"
    assert stderr.endswith("\x1b[1A\x1b[2K"), "the line of the bar is cleared at the end"


def test_a_long_import_prints_lines_without_a_terminal(imports: dict[str, ImportOutput]) -> None:
    lines = imports["lines"].stderr.splitlines()
    assert any(re.fullmatch(r"sorting histories: 0:0\d", line) for line in lines)
    assert "\x1b" not in imports["lines"].stderr


def test_a_quiet_import_shows_nothing(imports: dict[str, ImportOutput]) -> None:
    assert imports["quiet"].stderr == "\r\x1b[Kwarning: logged meanwhile\r\n"


def test_results_are_separate_from_progress(imports: dict[str, ImportOutput]) -> None:
    for imported in imports.values():
        first, last = imported.result.splitlines()
        assert first == "a result"
        assert last.endswith(": 50 users, 7 items, 1,000 events")
        assert "result" not in imported.stderr
