"""Lines, bars and points between two axes."""

from collections.abc import Sequence
from typing import NamedTuple

from freescale.page import svg
from freescale.page.axes import COLOURS, Axis, Frame


class Series(NamedTuple):
    """Points of one line or set of bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Lines through points; hovering a point shows its values."""
    frame = _frame(series, x, y)
    marks = []
    for colour, one in zip(COLOURS, series, strict=False):
        marks.append(_line(frame, one, colour))
        if len(one.x) <= 32:
            marks += _points(frame, one, 4, colour)
    return frame.draw(marks, [one.name for one in series] if len(series) > 1 else [])


def histogram(edges: Sequence[float], counts: Sequence[float], x: Axis, y: Axis) -> str:
    """Bars between edges."""
    frame = Frame(list(edges), [*counts, 0.0], x, y)
    floor, bars = frame.py(frame.y_low), []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        left, right, top = frame.px(low), frame.px(high), frame.py(count)
        says = f"{frame.x_text(low)} to {frame.x_text(high)}: {frame.y_text(count)}"
        bars.append(svg.block(left, top, max(0.5, right - left - 1), max(0.0, floor - top), COLOURS[0], says))
    return frame.draw(bars)


def scatter(points: Series, line: Series, x: Axis, y: Axis) -> str:
    """Points, and a line to compare them with."""
    frame = _frame([points, line], x, y)
    marks = [*_points(frame, points, 3, f"{COLOURS[0]}80"), _line(frame, line, COLOURS[1])]
    return frame.draw(marks, [points.name, line.name])


def _line(frame: Frame, series: Series, colour: str) -> str:
    return svg.path(zip(map(frame.px, series.x), map(frame.py, series.y), strict=True), colour)


def _points(frame: Frame, series: Series, size: float, colour: str) -> list[str]:
    return [
        svg.dot(frame.px(a), frame.py(b), size, colour, f"{series.name}: {frame.x_text(a)}, {frame.y_text(b)}")
        for a, b in zip(series.x, series.y, strict=True)
    ]


def _frame(series: Sequence[Series], x: Axis, y: Axis) -> Frame:
    return Frame([value for one in series for value in one.x], [value for one in series for value in one.y], x, y)
