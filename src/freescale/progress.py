"""Progress of long work, on stderr: a bar on a terminal, a plain line now and then elsewhere.

    with progress("reading clicks.csv", total=size, unit="B") as bar:
        bar.advance(len(block))

    for batch in track(loader, "evaluating", unit="batches"):
        ...

A command that ends within two seconds shows nothing. Nested work shows one line only, that of the innermost part: other
processes of a run print above a bar by clearing a single line. Rank 0 alone shows progress, and nobody with `--quiet`.
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
"""Shorter work shows nothing on a terminal."""
FIRST_LINE_SECONDS, LINE_SECONDS = 10.0, 30.0
"""Without a terminal: when the first plain line is printed, and the time between lines."""
_TICK_SECONDS = 0.25
_WIDEST_BAR, _NARROWEST_BAR = 40, 8
_FREE = 3
"""Columns at the end of a line: a terminal echoes ^C there, and must not wrap."""
_SPINNER = "|/-\\"


@dataclass(frozen=True)
class ProgressState:
    """A piece of work at one moment."""

    text: str
    unit: str
    done: float
    total: float | None
    elapsed: float
    """Seconds since it began."""
    seconds_left: float | None = None
    details: tuple[str, ...] = ()
    """More figures, the most important first."""

    @property
    def fraction(self) -> float | None:
        """How much of it is done; None where that is unknown, or where it is done in one go."""
        return None if self.total is None or self.total <= 1 else min(1.0, self.done / self.total)


class TerminalLine(NamedTuple):
    """A line of a terminal: text, a bar of so many columns, figures."""

    text: str
    bar: int
    figures: str


def estimate_remaining(done: float, total: float | None, elapsed: float) -> float | None:
    """Seconds that are left when work goes on at its mean speed; None while nothing is known."""
    return None if total is None or done <= 0 else elapsed * max(0.0, total - done) / done


def line_is_due(elapsed: float, since_last: float | None) -> bool:
    """Whether to print a plain line, so many seconds after work began and after the last line, if there was one."""
    return elapsed >= FIRST_LINE_SECONDS if since_last is None else since_last >= LINE_SECONDS


def plain_line(state: ProgressState) -> str:
    """A line of its own, for a file or another program."""
    return f"{state.text}: {', '.join(figures(state))}"


def fit_line(state: ProgressState, width: int) -> TerminalLine:
    """The line for a terminal of `width` columns: figures that do not fit are left out, the least important first."""
    text, room = _shortened(state.text, 2 * width // 5), width - _FREE
    least = _NARROWEST_BAR + 1 if state.fraction is not None else 2  # a bar, or a spinner
    kept: list[str] = []
    for figure in figures(state):
        if len("  ".join([text, *kept, figure])) + least > room:
            break
        kept.append(figure)
    tail = "  ".join(kept)
    columns = room - len(text) - 1 - len(tail) - 2
    return TerminalLine(text, 0 if state.fraction is None else max(0, min(_WIDEST_BAR, columns)), tail)


def figures(state: ProgressState) -> list[str]:
    """How far the work is, the most important figure first."""
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
    """Minutes and seconds, and hours if there are any."""
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
    """A piece of work that tells how far it is."""

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
        """So much more is done."""
        self.update(self._done + amount)

    def update(self, done: float, *, details: Sequence[str] = (), seconds_left: float | None = None) -> None:
        """So much is done. `seconds_left`: where the caller knows it better than the mean speed tells."""
        self._part = done - self._done if seconds_left is None else None
        self._done, self._details, self._changed = done, tuple(details), self._clock()
        mean = estimate_remaining(done, self._total, self._changed - self._began)
        self._left = mean if seconds_left is None else seconds_left
        self.on_change()

    def state(self) -> ProgressState:
        """The work as it is now. Between two advances the time left counts down, but not below what is certain."""
        now, left, least = self._clock(), self._left, 0.0
        if self._part is not None:  # the next part is not done before now
            least = estimate_remaining(self._done + self._part, self._total, now - self._began) or 0.0
        if left is not None:
            left = max(least, left - (now - self._changed))
        return ProgressState(self._text, self._unit, self._done, self._total, now - self._began, left, self._details)


class ProgressDisplay:
    """The bars of this process, innermost last. A thread draws them, so that a long call of a library shows too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        """When the command began whose parts are shown; None where bars belong to no command."""
        self._last_line: float | None = None
        self._bars: list[ProgressBar] = []
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._stop_ticking = threading.Event()

    def begin(self) -> None:
        """Count time from here on: a command begins."""
        self._began, self._last_line = self._clock(), None

    def end(self) -> None:
        """Clear the terminal of bars whose work ended without a word."""
        self._began = None
        for bar in reversed(self._bars):
            self.close(bar)

    def open(self, bar: ProgressBar) -> None:
        """Show a bar from now on."""
        with self._lock:
            self._bars.append(bar)
            if not bar.in_background:
                bar.on_change = self.tick
            self._tick_in_background_if_wanted()
        if bar.at_once:
            self.tick()

    def close(self, bar: ProgressBar) -> None:
        """Show a bar no longer: the terminal is as it was, or shows the work around it."""
        with self._lock, suppress(OSError):
            self._bars = [other for other in self._bars if other is not bar]
            self._tick_in_background_if_wanted()
            if self._live is None:
                return
            if self._innermost() is not None:
                self._live.refresh()
                return
            live, self._live = self._live, None
            live.stop()

    def tick(self) -> None:
        """Draw the bar again, or print its line if that is due."""
        with self._lock, suppress(OSError):  # work does not fail because its progress cannot be written
            if (bar := self._innermost()) is None:
                return
            if on_terminal():
                self._draw()
                return
            since_last = None if self._last_line is None else self._clock() - self._last_line
            state = bar.state()
            begun = bar.at_once or state.elapsed >= SHOW_SECONDS  # before that, a part has nothing to say
            if begun and line_is_due(self._elapsed(), since_last):
                self._last_line = self._clock()
                sys.stderr.write(f"{plain_line(state)}\n")
                sys.stderr.flush()

    def _innermost(self) -> ProgressBar | None:
        """The innermost bar that takes long enough to be shown; in a command that does, at least the outermost."""
        shown = [bar for bar in self._bars if bar.at_once or bar.state().elapsed >= SHOW_SECONDS]
        if not shown and self._bars and self._elapsed() >= SHOW_SECONDS:
            shown = self._bars[:1]
        return shown[-1] if shown else None

    def _elapsed(self) -> float:
        """Seconds since the command began, or the outermost bar where there is no command."""
        return self._bars[0].state().elapsed if self._began is None else self._clock() - self._began

    def _tick_in_background_if_wanted(self) -> None:
        """Work that asks for silence in the background, a measurement, gets it, whatever surrounds it."""
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
            from rich.console import Console  # here: a command that ends at once needs no rich
            from rich.live import Live

            console = Console(stderr=True, force_terminal=True)
            # Results printed meanwhile go above the bar, unless they go into a file.
            self._live = Live(
                console=console,
                get_renderable=self._rendered,
                auto_refresh=False,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
            console.show_cursor(True)  # a process that is killed must not leave a terminal without a cursor
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
    """Show that something goes on, and how far it is. Without a total: how much is done, and how quickly.

    `at_once`: do not wait whether it takes long. Without `in_background`, it is drawn only when it advances, so that a
    measurement is not disturbed.
    """
    bar = ProgressBar(text, total, unit, at_once=at_once, in_background=in_background)
    if _quiet or _rank():
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
    """Give items one by one, and show how many were taken. `size`: by how much an item advances."""
    known = len(items) if total is None and isinstance(items, Sized) else total
    with progress(text, total=known, unit=unit, in_background=in_background) as bar:
        for item in items:
            yield item
            bar.advance(size(item))


@contextmanager
def session() -> Iterator[None]:
    """Around a command: however it ends, no bar is left and the next command is not quiet."""
    _display.begin()
    try:
        yield
    finally:
        set_quiet(False)
        _display.end()


def set_quiet(quiet: bool) -> None:
    """Show nothing from now on, or show it again."""
    global _quiet
    _quiet = quiet


def on_terminal() -> bool:
    """Whether stderr can show a line that changes."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _rank() -> int:
    """As torchrun, SLURM or our launcher says."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
