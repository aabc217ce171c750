"""Axes, grid and the map from values to pixels."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from freescale.page import svg

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a00", "#6b4fa0", "#008b8b", "#5a5a5a")
WIDTH, _HEIGHT, _LEGEND = 640, 320, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 16, 52


class Axis(NamedTuple):
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
        self.px = _scale(self._x_low, self._x_high, x.log, _LEFT, WIDTH - _RIGHT)
        self.py = _scale(self.y_low, self._y_high, y.log, _HEIGHT - _BOTTOM, _TOP)
        """Where a value is: from the left, from the top."""
        self.x_text, self.y_text = partial(number, percent=x.percent), partial(number, percent=y.percent)
        """A value as the axis writes it."""

    def draw(self, marks: Sequence[str], legend: Sequence[str] = ()) -> str:
        """The chart, with finished marks in it."""
        floor, right, parts = _HEIGHT - _BOTTOM, WIDTH - _RIGHT, []
        for tick in ticks(self._x_low, self._x_high, self._x.log):
            px = self.px(tick)
            parts += [svg.line(px, _TOP, px, floor), svg.text(px, floor + 18, self.x_text(tick))]
        for tick in ticks(self.y_low, self._y_high, self._y.log):
            py = self.py(tick)
            parts += [svg.line(_LEFT, py, right, py), svg.text(_LEFT - 8, py + 4, self.y_text(tick), anchor="end")]
        parts += [*marks, svg.line(_LEFT, floor, right, floor, kind="axis")]
        parts.append(svg.text((_LEFT + right) / 2, _HEIGHT - 10, self._x.label))
        parts.append(svg.upright((_TOP + floor) / 2, self._y.label))
        for row, (colour, name) in enumerate(zip(COLOURS, legend, strict=False)):
            top = _TOP + 8 + 18 * row
            parts += [svg.block(WIDTH, top, 12, 12, colour, name), svg.text(WIDTH + 18, top + 10, name, anchor="start")]
        return svg.drawing(WIDTH + (_LEGEND if legend else 0), _HEIGHT, parts)


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
        found = [m * 10.0**p for p in range(powers.start - 1, powers.stop) for m in steps]
        return [value for value in found if low * 0.999 <= value <= high * 1.001]
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
