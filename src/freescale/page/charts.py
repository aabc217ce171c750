"""Charts with two axes: lines, histograms, scatter plots, and training curves with gaps and marks."""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from freescale.page import markup

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a00", "#6b4fa0", "#008b8b", "#5a5a5a")
_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND, _CHARACTER = 76, 20, 16, 52, 180, 7.0
_MOST_POINTS, _MOST_DOTS = 600, 40
_APART = 16.0
"""Minimum distance in pixels between two labelled marks."""


class ChartSize(NamedTuple):
    """Size of a chart without its legend, in pixels."""

    width: int
    height: int


_SIZE = ChartSize(640, 320)


class Axis(NamedTuple):
    """Label and scale of an axis."""

    label: str
    log: bool = False
    percent: bool = False
    tight: bool = False
    """Span only the values. By default a linear y axis begins at 0."""
    whole: bool = False
    """Ticks only at integers."""


class ChartFrame:
    """Axes, grid and the mapping from values to pixels."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], x: Axis, y: Axis, size: ChartSize = _SIZE) -> None:
        self._x, self._y, self._size = x, y, size
        self._x_low, self._x_high = _limits(xs, x, from_zero=False)
        self.y_low, self._y_high = _limits(ys, y, from_zero=True)
        self._y_ticks = label_ticks(ticks(self.y_low, self._y_high, y.log), percent=y.percent)
        widest = max((len(text) for _, text in self._y_ticks), default=0)
        self.left, self.right = (_LEFT if y.label else 14 + _CHARACTER * widest), size.width - _RIGHT
        self.top, self.floor = _TOP, size.height - _BOTTOM
        self.px = _scale(self._x_low, self._x_high, x.log, self.left, self.right)
        self.py = _scale(self.y_low, self._y_high, y.log, self.floor, self.top)
        """Map a value to pixels from the left and from the top."""
        self.percent = y.percent
        self.x_text, self.y_text = partial(format_number, percent=x.percent), partial(format_number, percent=y.percent)
        """Format a value as on the axis."""

    def draw(self, marks: Sequence[str], legend: Sequence[str] = ()) -> str:
        """Render the chart with these marks."""
        left, right, floor, (width, height), parts = self.left, self.right, self.floor, self._size, []
        x_ticks = ticks(self._x_low, self._x_high, self._x.log)
        shown = [tick for tick in x_ticks if not self._x.whole or tick == round(tick)]
        for tick, text in label_ticks(shown, percent=self._x.percent):
            px = self.px(tick)
            parts += [markup.line(px, self.top, px, floor), markup.text(px, floor + 18, text)]
        for tick, text in self._y_ticks:
            py = self.py(tick)
            parts += [markup.line(left, py, right, py), markup.text(left - 8, py + 4, text, anchor="end")]
        parts += [*marks, markup.line(left, floor, right, floor, kind="axis")]
        parts.append(markup.text((left + right) / 2, height - 10, self._x.label))
        if self._y.label:
            parts.append(markup.vertical_text((self.top + floor) / 2, self._y.label))
        for row, (colour, name) in enumerate(zip(COLOURS, legend, strict=False)):
            top = self.top + 8 + 18 * row
            parts += [
                markup.block(width, top, 12, 12, colour, name),
                markup.text(width + 18, top + 10, name, anchor="start"),
            ]
        return markup.drawing(width + (_LEGEND if legend else 0), height, parts)


def _limits(values: Sequence[float], axis: Axis, *, from_zero: bool) -> tuple[float, float]:
    log = axis.log
    values = [value for value in values if value > 0 or not log] or [1.0]
    low, high = min(values), max(values)
    if axis.tight and not log:
        margin = 0.04 * (high - low) if from_zero else 0.0
        around = (abs(low) or 1.0) * 0.1
        return (low - margin, high + margin) if high - low > 1e-9 * around else (low - around, high + around)
    if log:
        return 10 ** math.floor(math.log10(low)) if from_zero else low, max(high, low * 1.01)
    low = min(0.0, low) if from_zero else low
    return low, high * 1.05 if high > low else low + 1.0


def _scale(low: float, high: float, log: bool, begin: float, end: float) -> Callable[[float], float]:
    def transform(value: float) -> float:
        return math.log10(max(value, low)) if log else value

    span = transform(high) - transform(low) or 1.0
    return lambda value: begin + (end - begin) * (transform(value) - transform(low)) / span


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round tick values of an axis."""
    if log:
        powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        steps = (1,) if len(powers) > 2 else (1, 2, 5)
        values = [m * 10.0**p for p in range(powers.start - 1, powers.stop) for m in steps]
        return [value for value in values if low * 0.999 <= value <= high * 1.001]
    raw = (high - low) / 6
    size = 10 ** math.floor(math.log10(raw))
    size *= next(m for m in (1, 2, 2.5, 5, 10) if m * size >= raw)
    first = math.ceil(low / size - 1e-9)
    return [size * i for i in range(first, math.floor(high / size + 1e-9) + 1)]


def label_ticks(values: Sequence[float], *, percent: bool) -> list[tuple[float, str]]:
    """Ticks with labels that have as many digits as needed to differ."""
    texts: list[str] = []
    for digits in range(10):
        texts = [format_number(value, percent, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return list(zip(values, texts, strict=True))


def format_number(value: float, percent: bool = False, more_digits: int = 0) -> str:
    """Format a value in few characters."""
    if percent:
        return f"{100 * value:.{3 + more_digits}g}%"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if suffix == "k" else 1):
            return f"{value / size:.{3 + more_digits}g}{suffix}"
    return f"{value:,.{4 + more_digits}g}" if value < 1000 else f"{value:,.0f}"


class Series(NamedTuple):
    """Points of one line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Line chart; tooltips show the values of points."""
    frame = _frame(series, x, y)
    marks = []
    for colour, line in zip(COLOURS, series, strict=False):
        marks.append(_line(frame, line, colour))
        if len(line.x) <= 32:
            marks += _points(frame, line, 4, colour)
    return frame.draw(marks, [line.name for line in series] if len(series) > 1 else [])


def histogram(edges: Sequence[float], counts: Sequence[float], x: Axis, y: Axis) -> str:
    """Histogram with one bar between each two edges."""
    frame = ChartFrame(list(edges), [*counts, 0.0], x, y)
    floor, bars = frame.py(frame.y_low), []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        left, right, top = frame.px(low), frame.px(high), frame.py(count)
        tooltip = f"{frame.x_text(low)} to {frame.x_text(high)}: {frame.y_text(count)}"
        bars.append(markup.block(left, top, max(0.5, right - left - 1), max(0.0, floor - top), COLOURS[0], tooltip))
    return frame.draw(bars)


def scatter(points: Series, line: Series, x: Axis, y: Axis) -> str:
    """Scatter plot with a reference line."""
    frame = _frame([points, line], x, y)
    marks = [*_points(frame, points, 3, f"{COLOURS[0]}80"), _line(frame, line, COLOURS[1])]
    return frame.draw(marks, [points.name, line.name])


def _line(frame: ChartFrame, series: Series, colour: str) -> str:
    return markup.path(zip(map(frame.px, series.x), map(frame.py, series.y), strict=True), colour)


def _points(frame: ChartFrame, series: Series, size: float, colour: str) -> list[str]:
    return [
        markup.dot(frame.px(a), frame.py(b), size, colour, f"{series.name}: {frame.x_text(a)}, {frame.y_text(b)}")
        for a, b in zip(series.x, series.y, strict=True)
    ]


def _frame(series: Sequence[Series], x: Axis, y: Axis) -> ChartFrame:
    return ChartFrame([v for line in series for v in line.x], [v for line in series for v in line.y], x, y)


_CURVE_SIZE = ChartSize(480, 250)


class Mark(NamedTuple):
    """An event at a step, such as a restart."""

    at: float
    label: str
    tooltip: str
    colour: str


def curve_chart(
    series: Sequence[Series],
    colours: Mapping[str, str],
    x: Axis,
    y: Axis,
    *,
    marks: Sequence[Mark] = (),
    spans: Sequence[float] = (),
) -> str:
    """Line chart over steps, with gaps at NaN. Empty if there is no finite value.

    `colours`: colour of each line by name. `spans`: values that the x axis must include.
    """
    series = [downsample(line) for line in series if line.x]
    finite = [value for line in series for value in line.y if math.isfinite(value)]
    if not finite:
        return ""
    frame = ChartFrame([*spans, *(value for line in series for value in line.x)], finite, x, y, _CURVE_SIZE)
    shapes = []
    for line in series:
        colour = colours[line.name]
        segments = list(_segments(line))
        shapes += [markup.path([(frame.px(a), frame.py(b)) for a, b in segment], colour) for segment in segments]
        dots = len(line.x) <= _MOST_DOTS
        lone = [point for segment in segments for point in segment if dots or len(segment) == 1]
        shapes += [markup.dot(frame.px(a), frame.py(b), 2.5, colour, line.name) for a, b in lone]
    return frame.draw([*shapes, *_areas(frame, series), *_marks(frame, marks)])


def assign_colours(names: Sequence[str]) -> Mapping[str, str]:
    """Colour of each line, in order."""
    return dict(zip(names, COLOURS, strict=False))


def downsample(series: Series, most: int = _MOST_POINTS) -> Series:
    """At most `most` points sorted by x: the minimum and maximum of each range."""
    points = sorted(zip(series.x, series.y, strict=True), key=lambda point: point[0])
    if len(points) > most:
        size = -(-2 * len(points) // most)
        parts = [points[first : first + size] for first in range(0, len(points), size)]
        points = [point for part in parts for point in _extremes(part)]
    return Series(series.name, [a for a, _ in points], [b for _, b in points])


def _extremes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return [points[0]]
    ends = min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])
    return sorted(set(ends))


def _segments(series: Series) -> Iterator[list[tuple[float, float]]]:
    """Split a line at points without a finite value."""
    segment: list[tuple[float, float]] = []
    for point in zip(series.x, series.y, strict=True):
        if math.isfinite(point[1]):
            segment.append(point)
        elif segment:
            yield segment
            segment = []
    if segment:
        yield segment


def _areas(frame: ChartFrame, series: Sequence[Series]) -> Iterator[str]:
    """Tooltip areas around every x at which a line has a point."""
    xs = sorted({value for line in series for value in line.x})
    places = [frame.px(x) for x in xs]
    edges = [frame.left, *((a + b) / 2 for a, b in itertools.pairwise(places)), frame.right]
    for x, (left, right) in zip(xs, itertools.pairwise(edges), strict=True):
        lines = [f"step {x:,.0f}", *(_value_text(frame, line, x) for line in series)]
        yield markup.area(left, frame.top, right - left, frame.floor - frame.top, "\n".join(lines))


def _value_text(frame: ChartFrame, series: Series, x: float) -> str:
    """Value of a line at x or at the nearest point, as text."""
    place = bisect.bisect_left(series.x, x)
    nearest = min(range(max(0, place - 1), min(len(series.x), place + 1)), key=lambda i: abs(series.x[i] - x))
    value = series.y[nearest]
    text = format_number(value, frame.percent, 2) if math.isfinite(value) else "not finite"
    elsewhere = "" if series.x[nearest] == x else f" (step {series.x[nearest]:,.0f})"
    return f"{series.name}: {text}{elsewhere}"


def _marks(frame: ChartFrame, marks: Sequence[Mark]) -> Iterator[str]:
    labelled = -math.inf
    for mark in sorted(marks, key=lambda mark: mark.at):
        px = min(max(frame.px(mark.at), frame.left), frame.right)
        yield markup.mark(px, frame.top, frame.floor, mark.colour, mark.tooltip)
        if px - labelled >= _APART:
            yield markup.text(px, frame.top - 4, mark.label)
            labelled = px
