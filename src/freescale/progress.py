"""Progress of long tasks on stderr: a bar on a terminal, periodic plain lines elsewhere.

    with progress("reading clicks.csv", total=size, unit="B") as bar:
        bar.advance(len(block))

    for batch in track(loader, "evaluating", unit="batches"):
        ...

A command that ends within two seconds shows nothing. Nested tasks show only the innermost one, because other processes
of a run print above the bar by clearing a single line. Only rank 0 shows progress; `--quiet` disables it.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

T = TypeVar("T")
SHOW_SECONDS = 2.0
"""Shorter tasks show nothing on a terminal."""
FIRST_LINE_SECONDS, LINE_SECONDS = 10.0, 30.0
"""Without a terminal: the time of the first plain line, and the time between lines."""
_TICK_SECONDS = 0.25
_WIDEST_BAR, _NARROWEST_BAR = 40, 8
_FREE = 3
"""Free columns at the end of a line, so that an echoed ^C does not wrap."""
_SPINNER = "|/-\\"


@dataclass(frozen=True)
class ProgressState:
    """A snapshot of a task."""

    text: str
    unit: str
    done: float
    total: float | None
    elapsed: float
    """Seconds since the start."""
    seconds_left: float | None = None
    details: tuple[str, ...] = ()
    """Additional figures, the most important first."""

    @property
    def fraction(self) -> float | None:
        """Completed fraction; None if it is unknown or the task has a single step."""
        return None if self.total is None or self.total <= 1 else min(1.0, self.done / self.total)


class TerminalLine(NamedTuple):
    """Parts of a terminal line: text, width of the bar in columns, figures."""

    text: str
    bar: int
    figures: str


def estimate_remaining(done: float, total: float | None, elapsed: float) -> float | None:
    """Remaining seconds at the mean speed; None if unknown."""
    return None if total is None or done <= 0 else elapsed * max(0.0, total - done) / done


def line_is_due(elapsed: float, since_last: float | None) -> bool:
    """Whether to print a plain line. `since_last`: seconds since the last line, if there was one."""
    return elapsed >= FIRST_LINE_SECONDS if since_last is None else since_last >= LINE_SECONDS


def plain_line(state: ProgressState) -> str:
    """Plain line, for a file or a pipe."""
    return f"{state.text}: {', '.join(figures(state))}"


def fit_line(state: ProgressState, width: int) -> TerminalLine:
    """Line for a terminal of `width` columns. Drops the least important figures if they do not fit."""
    text, available = _shortened(state.text, 2 * width // 5), width - _FREE
    least = _NARROWEST_BAR + 1 if state.fraction is not None else 2  # a bar, or a spinner
    kept: list[str] = []
    for figure in figures(state):
        if len("  ".join([text, *kept, figure])) + least > available:
            break
        kept.append(figure)
    tail = "  ".join(kept)
    columns = available - len(text) - 1 - len(tail) - 2
    return TerminalLine(text, 0 if state.fraction is None else max(0, min(_WIDEST_BAR, columns)), tail)


def figures(state: ProgressState) -> list[str]:
    """Figures of a task, the most important first."""
    done = _amount(state.done, state.unit)
    unit = "" if state.unit == "B" else f" {state.unit}"
    if state.fraction is None:
        speed = f"{_amount(state.done / max(state.elapsed, 1e-9), state.unit)}/s"
        counts = [f"{done}{unit}", speed] if state.done and state.total is None else []
        return [*counts, *state.details, duration(state.elapsed)]
    left = [] if state.seconds_left is None else [f"{duration(state.seconds_left)} left"]
    counts = [f"{done} of {_amount(state.total or 0, state.unit)}{unit}"] if state.unit else []
    so_far = [f"{duration(state.elapsed)} so far"] if not left and state.elapsed >= 1 else []
    return [f"{state.fraction:.0%}", *left, *so_far, *state.details, *counts]


def duration(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _amount(value: float, unit: str) -> str:
    if unit != "B":
        return f"{value:,.0f}"
    scale = next((power for power in (3, 2, 1) if value >= 1000**power), 0)
    return f"{value / 1000**scale:.{1 if scale else 0}f} {['B', 'kB', 'MB', 'GB'][scale]}"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


class ProgressBar:
    """A task that reports its progress."""

    def __init__(
        self,
        text: str,
        total: float | None = None,
        unit: str = "",
        *,
        at_once: bool = False,
        in_background: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._text, self._total, self._unit, self._clock = text, total, unit, clock
        self.at_once, self.in_background = at_once, in_background
        self._began = self._changed = clock()
        self._done = 0.0
        self._part: float | None = None
        self._left: float | None = None
        self._details: tuple[str, ...] = ()
        self.on_change: Callable[[], None] = lambda: None

    def advance(self, amount: float = 1) -> None:
        """Add to the completed amount."""
        self.update(self._done + amount)

    def update(self, done: float, *, details: Sequence[str] = (), seconds_left: float | None = None) -> None:
        """Set the completed amount. `seconds_left`: a better estimate than from the mean speed."""
        self._part = done - self._done if seconds_left is None else None
        self._done, self._details, self._changed = done, tuple(details), self._clock()
        mean = estimate_remaining(done, self._total, self._changed - self._began)
        self._left = mean if seconds_left is None else seconds_left
        self.on_change()

    def state(self) -> ProgressState:
        """Current state. Between updates the remaining time counts down to a lower bound."""
        now, left, least = self._clock(), self._left, 0.0
        if self._part is not None:  # the next update comes after now
            least = estimate_remaining(self._done + self._part, self._total, now - self._began) or 0.0
        if left is not None:
            left = max(least, left - (now - self._changed))
        return ProgressState(self._text, self._unit, self._done, self._total, now - self._began, left, self._details)


class ProgressDisplay:
    """Stack of the bars of this process, innermost last. A thread draws it, also during long library calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        """Start of the current command; None outside of commands."""
        self._last_line: float | None = None
        self._bars: list[ProgressBar] = []
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._stop_ticking = threading.Event()

    def begin(self) -> None:
        """Start timing a command."""
        self._began, self._last_line = self._clock(), None

    def end(self) -> None:
        """Close the bars that were not closed, and clear the terminal."""
        self._began = None
        for bar in reversed(self._bars):
            self.close(bar)

    def open(self, bar: ProgressBar) -> None:
        """Show a bar."""
        with self._lock:
            self._bars.append(bar)
            if not bar.in_background:
                bar.on_change = self.tick
            self._restart_ticker()
        if bar.at_once:
            self.tick()

    def close(self, bar: ProgressBar) -> None:
        """Remove a bar. The terminal shows the enclosing task, or is clear."""
        with self._lock, suppress(OSError):
            self._bars = [other for other in self._bars if other is not bar]
            self._restart_ticker()
            if self._live is None:
                return
            if self._innermost() is not None:
                self._live.refresh()
                return
            live, self._live = self._live, None
            live.stop()

    def tick(self) -> None:
        """Redraw the bar, or print its line if that is due."""
        with self._lock, suppress(OSError):  # a task does not fail because its progress cannot be written
            if (bar := self._innermost()) is None:
                return
            if on_terminal():
                self._draw()
                return
            since_last = None if self._last_line is None else self._clock() - self._last_line
            state = bar.state()
            long_enough = bar.at_once or state.elapsed >= SHOW_SECONDS
            if long_enough and line_is_due(self._elapsed(), since_last):
                self._last_line = self._clock()
                sys.stderr.write(f"{plain_line(state)}\n")
                sys.stderr.flush()

    def _innermost(self) -> ProgressBar | None:
        """Innermost bar that is old enough to be shown; in a long command, at least the outermost."""
        shown = [bar for bar in self._bars if bar.at_once or bar.state().elapsed >= SHOW_SECONDS]
        if not shown and self._bars and self._elapsed() >= SHOW_SECONDS:
            shown = self._bars[:1]
        return shown[-1] if shown else None

    def _elapsed(self) -> float:
        """Seconds since the start of the command, or of the outermost bar outside of commands."""
        return self._bars[0].state().elapsed if self._began is None else self._clock() - self._began

    def _restart_ticker(self) -> None:
        """Run the drawing thread, unless the innermost task disables it, as a measurement does."""
        self._stop_ticking.set()
        if self._bars and self._bars[-1].in_background:
            self._stop_ticking = threading.Event()
            ticking = {"args": (self._stop_ticking,), "name": "freescale-progress", "daemon": True}
            threading.Thread(target=self._tick_until, **ticking).start()

    def _tick_until(self, stopped: threading.Event) -> None:
        while not stopped.wait(_TICK_SECONDS):
            self.tick()

    def _draw(self) -> None:
        if self._live is None:
            from rich.console import Console  # deferred: short commands do not need rich
            from rich.live import Live

            console = Console(stderr=True, force_terminal=True)
            # Print results above the bar, unless stdout is redirected.
            self._live = Live(
                console=console,
                get_renderable=self._rendered,
                auto_refresh=False,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
            console.show_cursor(True)  # a killed process must not leave the cursor hidden
        self._live.refresh()

    def _rendered(self) -> "Text":
        from rich.text import Text

        bar = self._innermost()
        if bar is None or self._live is None:
            return Text()
        state = bar.state()
        text, columns, figures = fit_line(state, self._live.console.width)
        line = Text(text, no_wrap=True, overflow="ellipsis")
        if state.fraction is None:
            line.append(f" {_SPINNER[int(state.elapsed / _TICK_SECONDS) % len(_SPINNER)]} ", "bar.pulse")
        elif columns:
            filled, utf = round(state.fraction * columns), self._live.console.encoding.startswith("utf")
            line.append(" ").append(("━" if utf else "#") * filled, "bar.complete")
            line.append(("─" if utf else "-") * (columns - filled), "bar.back")
        return line.append(f"{' ' * (1 + bool(columns))}{figures}")


_display = ProgressDisplay()
_quiet = False


@contextmanager
def progress(
    text: str,
    *,
    total: float | None = None,
    unit: str = "",
    at_once: bool = False,
    in_background: bool = True,
) -> Iterator[ProgressBar]:
    """Show the progress of a task. Without a total, show the completed amount and the speed.

    `at_once`: show it immediately. `in_background=False`: draw only on updates, to not disturb a measurement.
    """
    bar = ProgressBar(text, total, unit, at_once=at_once, in_background=in_background)
    if _quiet or launched_rank():
        yield bar
        return
    _display.open(bar)
    try:
        yield bar
    finally:
        _display.close(bar)


def track(
    items: Iterable[T],
    text: str,
    *,
    total: float | None = None,
    unit: str = "",
    size: Callable[[T], float] = lambda _: 1,
    in_background: bool = True,
) -> Iterator[T]:
    """Iterate over items and show the progress. `size`: the amount per item."""
    amount = len(items) if total is None and isinstance(items, Sized) else total
    with progress(text, total=amount, unit=unit, in_background=in_background) as bar:
        for item in items:
            yield item
            bar.advance(size(item))


@contextmanager
def session() -> Iterator[None]:
    """Scope of a command: on exit, remove all bars and reset `--quiet`."""
    _display.begin()
    try:
        yield
    finally:
        set_quiet(False)
        _display.end()


def set_quiet(quiet: bool) -> None:
    """Disable or enable progress."""
    global _quiet
    _quiet = quiet


def on_terminal() -> bool:
    """Whether stderr is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def launched_rank() -> int:
    """Rank from torchrun, SLURM or the FreeScale launcher; 0 if none of them started this process."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
