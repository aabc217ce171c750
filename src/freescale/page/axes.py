"""Axes, grid and the map from values to pixels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from freescale.page.document import escape

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a00", "#6b4fa0", "#008b8b", "#5a5a5a")
WIDTH, _HEIGHT, _LEGEND = 640, 320, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 16, 52


@dataclass(frozen=True)
class Axis:
    """What an axis shows."""

    label: str
    log: bool = False
    percent: bool = False


class Frame:
    """Axes, grid and the map from values to pixels."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], x: Axis, y: Axis) -> None:
        self._x, self._y = x, y
        self._x_low, self._x_high = _limits(xs, x.log, from_zero=False)
        self.y_low, self._y_high = _limits(ys, y.log, from_zero=True)
        self._to_x = _scale(self._x_low, self._x_high, x.log, _LEFT, WIDTH - _RIGHT)
        self._to_y = _scale(self.y_low, self._y_high, y.log, _HEIGHT - _BOTTOM, _TOP)

    def px(self, value: float) -> float:
        """Where a value is, from the left."""
        return self._to_x(value)

    def py(self, value: float) -> float:
        """Where a value is, from the top."""
        return self._to_y(value)

    def x_text(self, value: float) -> str:
        """A value as the axis writes it."""
        return number(value, self._x.percent)

    def y_text(self, value: float) -> str:
        """A value as the axis writes it."""
        return number(value, self._y.percent)

    def draw(self, marks: str, legend: Sequence[str]) -> str:
        """The chart, with finished marks in it."""
        floor, right = _HEIGHT - _BOTTOM, WIDTH - _RIGHT
        width = WIDTH + (_LEGEND if legend else 0)
        parts = [f'<svg viewBox="0 0 {width} {_HEIGHT}" width="{width}" role="img">']
        for tick in ticks(self._x_low, self._x_high, self._x.log):
            px = self.px(tick)
            parts.append(f'<line class="grid" x1="{px:.1f}" y1="{_TOP}" x2="{px:.1f}" y2="{floor}"/>')
            parts.append(f'<text x="{px:.1f}" y="{floor + 18}" text-anchor="middle">{self.x_text(tick)}</text>')
        for tick in ticks(self.y_low, self._y_high, self._y.log):
            py = self.py(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{py:.1f}" x2="{right}" y2="{py:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{self.y_text(tick)}</text>')
        parts.append(marks)
        parts.append(f'<line class="axis" x1="{_LEFT}" y1="{floor}" x2="{right}" y2="{floor}"/>')
        parts.append(
            f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(self._x.label)}</text>'
        )
        middle = (_TOP + floor) / 2
        parts.append(
            f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(self._y.label)}</text>'
        )
        for row, (colour, name) in enumerate(zip(COLOURS, legend, strict=False)):
            top = _TOP + 8 + 18 * row
            parts.append(f'<rect x="{WIDTH}" y="{top}" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{WIDTH + 18}" y="{top + 10}">{escape(name)}</text>')
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


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round values to name on an axis."""
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


def number(value: float, percent: bool = False) -> str:
    """A value in few characters."""
    if percent:
        return f"{100 * value:.3g}%"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if suffix == "k" else 1):
            return f"{value / size:.3g}{suffix}"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
