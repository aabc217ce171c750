"""Self-contained pages: HTML with inline SVG, no script, no network. Every text from outside is escaped here.

Charts are drawn by hand because they are few and must open offline on any machine; a library would bring megabytes.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a00", "#6b4fa0")
_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 16, 52
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2530; background: #fff; }
body { max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p.lead { color: #4a5563; margin-top: 0; }
table { border-collapse: collapse; } th, td { padding: 0.25rem 0.9rem 0.25rem 0; text-align: right; }
th { border-bottom: 1px solid #9aa5b1; font-weight: 600; } td:first-child, th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #1d2530; }
.grid { stroke: #e3e7eb; } .axis { stroke: #6b7785; }
"""


@dataclass(frozen=True)
class Series:
    """Points of one line or set of bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Axis:
    """What an axis shows."""

    label: str
    log: bool = False
    percent: bool = False


def document(title: str, lead: str, *parts: str) -> str:
    """Wrap finished parts into a page."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{_text(title)}</h1><p class='lead'>{_text(lead)}</p>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def section(heading: str, explanation: str, *parts: str) -> str:
    """A headed part of a page."""
    return f"<h2>{_text(heading)}</h2><p>{_text(explanation)}</p>" + "".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table."""
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def line_chart(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Lines through points; hovering a point shows its values."""
    frame = _Frame(series, x, y)
    marks = []
    for colour, one in zip(COLOURS, series, strict=False):
        points = [(frame.px(a), frame.py(b)) for a, b in zip(one.x, one.y, strict=True)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(points) <= 32:
            for (px, py), a, b in zip(points, one.x, one.y, strict=True):
                tip = f"{one.name}: {frame.x_text(a)}, {frame.y_text(b)}"
                marks.append(
                    f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"><title>{_text(tip)}</title></circle>'
                )
    return frame.draw("".join(marks), [one.name for one in series] if len(series) > 1 else [])


def histogram(edges: Sequence[float], counts: Sequence[float], x: Axis, y: Axis) -> str:
    """Bars between edges."""
    frame = _Frame([Series("", list(edges), [*counts, 0.0])], x, y)
    floor = frame.py(frame.y_low)
    bars = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        left, right, top = frame.px(low), frame.px(high), frame.py(count)
        tip = f"{frame.x_text(low)} to {frame.x_text(high)}: {frame.y_text(count)}"
        bars.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(0.5, right - left - 1):.1f}" '
            f'height="{max(0.0, floor - top):.1f}" fill="{COLOURS[0]}"><title>{_text(tip)}</title></rect>'
        )
    return frame.draw("".join(bars), [])


class _Frame:
    """Axes, grid and the map from values to pixels."""

    def __init__(self, series: Sequence[Series], x: Axis, y: Axis) -> None:
        self._x, self._y = x, y
        xs = [value for one in series for value in one.x]
        ys = [value for one in series for value in one.y]
        self._x_low, self._x_high = _limits(xs, x.log, from_zero=False)
        self.y_low, self._y_high = _limits(ys, y.log, from_zero=True)
        self._to_x = _scale(self._x_low, self._x_high, x.log, _LEFT, _WIDTH - _RIGHT)
        self._to_y = _scale(self.y_low, self._y_high, y.log, _HEIGHT - _BOTTOM, _TOP)

    def px(self, value: float) -> float:
        return self._to_x(value)

    def py(self, value: float) -> float:
        return self._to_y(value)

    def x_text(self, value: float) -> str:
        return _number(value, self._x.percent)

    def y_text(self, value: float) -> str:
        return _number(value, self._y.percent)

    def draw(self, marks: str, legend: Sequence[str]) -> str:
        floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">']
        for tick in _ticks(self._x_low, self._x_high, self._x.log):
            px = self.px(tick)
            parts.append(f'<line class="grid" x1="{px:.1f}" y1="{_TOP}" x2="{px:.1f}" y2="{floor}"/>')
            parts.append(f'<text x="{px:.1f}" y="{floor + 18}" text-anchor="middle">{self.x_text(tick)}</text>')
        for tick in _ticks(self.y_low, self._y_high, self._y.log):
            py = self.py(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{py:.1f}" x2="{right}" y2="{py:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{self.y_text(tick)}</text>')
        parts.append(marks)
        parts.append(f'<line class="axis" x1="{_LEFT}" y1="{floor}" x2="{right}" y2="{floor}"/>')
        parts.append(
            f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{_text(self._x.label)}</text>'
        )
        middle = (_TOP + floor) / 2
        parts.append(
            f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{_text(self._y.label)}</text>'
        )
        for row, (colour, name) in enumerate(zip(COLOURS, legend, strict=False)):
            top = _TOP + 8 + 18 * row
            parts.append(f'<rect x="{_LEFT + 12}" y="{top}" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{_LEFT + 30}" y="{top + 10}">{_text(name)}</text>')
        return "".join(parts) + "</svg>"


def _limits(values: Sequence[float], log: bool, *, from_zero: bool) -> tuple[float, float]:
    values = [value for value in values if value > 0 or not log] or [1.0]
    low, high = min(values), max(values)
    if log:
        return 10 ** math.floor(math.log10(low)) if from_zero else low, max(high, low * 1.01)
    low = min(0.0, low) if from_zero else low
    return low, high * 1.05 if high > low else low + 1.0


def _scale(low: float, high: float, log: bool, begin: float, end: float) -> Callable[[float], float]:
    def bend(value: float) -> float:
        return math.log10(max(value, low)) if log else value

    span = bend(high) - bend(low) or 1.0
    return lambda value: begin + (end - begin) * (bend(value) - bend(low)) / span


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        steps = (1,) if len(powers) > 2 else (1, 2, 5)
        return [
            m * 10.0**p
            for p in range(powers.start - 1, powers.stop)
            for m in steps
            if low * 0.999 <= m * 10.0**p <= high * 1.001
        ]
    raw = (high - low) / 5
    size = 10 ** math.floor(math.log10(raw))
    size *= next(m for m in (1, 2, 5, 10) if m * size >= raw)
    first = math.ceil(low / size - 1e-9)
    return [size * i for i in range(first, math.floor(high / size + 1e-9) + 1)]


def _number(value: float, percent: bool = False) -> str:
    if percent:
        return f"{100 * value:.3g}%"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if suffix == "k" else 1):
            return f"{value / size:.3g}{suffix}"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _text(value: str) -> str:
    return html.escape(str(value))
