"""Axes, grid and the map from values to pixels."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from freescale.page import svg

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8a5a00", "#6b4fa0", "#008b8b", "#5a5a5a")
_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND, _CHARACTER = 76, 20, 16, 52, 180, 7.0


class Size(NamedTuple):
    """Of a chart without its legend."""

    width: int
    height: int


_SIZE = Size(640, 320)


class Axis(NamedTuple):
    """What an axis shows."""

    label: str
    log: bool = False
    percent: bool = False
    tight: bool = False
    """Spans the values only. Otherwise a linear y axis begins at 0."""
    whole: bool = False
    """Has ticks at whole numbers only."""


class Frame:
    """Axes, grid and the map from values to pixels."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], x: Axis, y: Axis, size: Size = _SIZE) -> None:
        self._x, self._y, self._size = x, y, size
        self._x_low, self._x_high = _limits(xs, x, from_zero=False)
        self.y_low, self._y_high = _limits(ys, y, from_zero=True)
        self._y_ticks = labelled(ticks(self.y_low, self._y_high, y.log), percent=y.percent)
        widest = max((len(text) for _, text in self._y_ticks), default=0)
        self.left, self.right = (_LEFT if y.label else 14 + _CHARACTER * widest), size.width - _RIGHT
        self.top, self.floor = _TOP, size.height - _BOTTOM
        self.px = _scale(self._x_low, self._x_high, x.log, self.left, self.right)
        self.py = _scale(self.y_low, self._y_high, y.log, self.floor, self.top)
        """Where a value is: from the left, from the top."""
        self.percent = y.percent
        self.x_text, self.y_text = partial(number, percent=x.percent), partial(number, percent=y.percent)
        """A value as the axis writes it."""

    def draw(self, marks: Sequence[str], legend: Sequence[str] = ()) -> str:
        """The chart, with finished marks in it."""
        left, right, floor, (width, height), parts = self.left, self.right, self.floor, self._size, []
        found = ticks(self._x_low, self._x_high, self._x.log)
        shown = [tick for tick in found if not self._x.whole or tick == round(tick)]
        for tick, text in labelled(shown, percent=self._x.percent):
            px = self.px(tick)
            parts += [svg.line(px, self.top, px, floor), svg.text(px, floor + 18, text)]
        for tick, text in self._y_ticks:
            py = self.py(tick)
            parts += [svg.line(left, py, right, py), svg.text(left - 8, py + 4, text, anchor="end")]
        parts += [*marks, svg.line(left, floor, right, floor, kind="axis")]
        parts.append(svg.text((left + right) / 2, height - 10, self._x.label))
        if self._y.label:
            parts.append(svg.upright((self.top + floor) / 2, self._y.label))
        for row, (colour, name) in enumerate(zip(COLOURS, legend, strict=False)):
            top = self.top + 8 + 18 * row
            parts += [svg.block(width, top, 12, 12, colour, name), svg.text(width + 18, top + 10, name, anchor="start")]
        return svg.drawing(width + (_LEGEND if legend else 0), height, parts)


def _limits(values: Sequence[float], axis: Axis, *, from_zero: bool) -> tuple[float, float]:
    log = axis.log
    values = [value for value in values if value > 0 or not log] or [1.0]
    low, high = min(values), max(values)
    if axis.tight and not log:
        room = 0.04 * (high - low) if from_zero else 0.0
        around = (abs(low) or 1.0) * 0.1
        return (low - room, high + room) if high - low > 1e-9 * around else (low - around, high + around)
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
    raw = (high - low) / 6
    size = 10 ** math.floor(math.log10(raw))
    size *= next(m for m in (1, 2, 2.5, 5, 10) if m * size >= raw)
    first = math.ceil(low / size - 1e-9)
    return [size * i for i in range(first, math.floor(high / size + 1e-9) + 1)]


def labelled(values: Sequence[float], *, percent: bool) -> list[tuple[float, str]]:
    """Ticks with their texts, which have as many digits as it takes to tell them apart."""
    texts: list[str] = []
    for digits in range(10):
        texts = [number(value, percent, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return list(zip(values, texts, strict=True))


def number(value: float, percent: bool = False, more_digits: int = 0) -> str:
    """A value in few characters."""
    if percent:
        return f"{100 * value:.{3 + more_digits}g}%"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if suffix == "k" else 1):
            return f"{value / size:.{3 + more_digits}g}{suffix}"
    return f"{value:,.{4 + more_digits}g}" if value < 1000 else f"{value:,.0f}"
