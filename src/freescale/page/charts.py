"""Lines, bars and points between two axes."""

from collections.abc import Sequence
from dataclasses import dataclass

from freescale.page.axes import COLOURS, Axis, Frame
from freescale.page.document import escape


@dataclass(frozen=True)
class Series:
    """Points of one line or set of bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Lines through points; hovering a point shows its values."""
    frame = _frame(series, x, y)
    marks = []
    for colour, one in zip(COLOURS, series, strict=False):
        points = [(frame.px(a), frame.py(b)) for a, b in zip(one.x, one.y, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= 32:
            for (px, py), a, b in zip(points, one.x, one.y, strict=True):
                tip = f"{one.name}: {frame.x_text(a)}, {frame.y_text(b)}"
                marks.append(
                    f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"><title>{escape(tip)}</title></circle>'
                )
    return frame.draw("".join(marks), [one.name for one in series] if len(series) > 1 else [])


def histogram(edges: Sequence[float], counts: Sequence[float], x: Axis, y: Axis) -> str:
    """Bars between edges."""
    frame = Frame(list(edges), [*counts, 0.0], x, y)
    floor = frame.py(frame.y_low)
    bars = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        left, right, top = frame.px(low), frame.px(high), frame.py(count)
        tip = f"{frame.x_text(low)} to {frame.x_text(high)}: {frame.y_text(count)}"
        bars.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(0.5, right - left - 1):.1f}" '
            f'height="{max(0.0, floor - top):.1f}" fill="{COLOURS[0]}"><title>{escape(tip)}</title></rect>'
        )
    return frame.draw("".join(bars), [])


def scatter(points: Series, line: Series, x: Axis, y: Axis) -> str:
    """Points, and a line to compare them with."""
    frame = _frame([points, line], x, y)
    marks = [
        f'<circle cx="{frame.px(a):.1f}" cy="{frame.py(b):.1f}" r="3" fill="{COLOURS[0]}" fill-opacity="0.5">'
        f"<title>{escape(points.name)}: {frame.x_text(a)}, {frame.y_text(b)}</title></circle>"
        for a, b in zip(points.x, points.y, strict=True)
    ]
    path = " ".join(f"{frame.px(a):.1f},{frame.py(b):.1f}" for a, b in zip(line.x, line.y, strict=True))
    marks.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[1]}" stroke-width="2"/>')
    return frame.draw("".join(marks), [points.name, line.name])


def _frame(series: Sequence[Series], x: Axis, y: Axis) -> Frame:
    return Frame([value for one in series for value in one.x], [value for one in series for value in one.y], x, y)
