"""Curves over the steps of a run: lines that may have gaps, marks at some steps, and the values under the pointer."""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from freescale.page import svg
from freescale.page.axes import COLOURS, Axis, Frame, Size, number
from freescale.page.charts import Series

_SIZE = Size(480, 250)
_MOST_POINTS, _MOST_DOTS = 600, 40
_APART = 16.0
"""Pixels between two marks that are both labelled."""


class Mark(NamedTuple):
    """Something that happened at a step."""

    at: float
    label: str
    says: str
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
    """Lines through points, with gaps where a value is NaN. Empty if there is no finite value.

    `colours`: of each line, by name. `spans`: values that the x axis reaches in any case.
    """
    series = [thinned(one) for one in series if one.x]
    finite = [value for one in series for value in one.y if math.isfinite(value)]
    if not finite:
        return ""
    frame = Frame([*spans, *(value for one in series for value in one.x)], finite, x, y, _SIZE)
    shapes = []
    for one in series:
        colour = colours[one.name]
        pieces = list(_pieces(one))
        shapes += [svg.path([(frame.px(a), frame.py(b)) for a, b in piece], colour) for piece in pieces]
        dots = len(one.x) <= _MOST_DOTS
        lone = [point for piece in pieces for point in piece if dots or len(piece) == 1]
        shapes += [svg.dot(frame.px(a), frame.py(b), 2.5, colour, one.name) for a, b in lone]
    return frame.draw([*shapes, *_areas(frame, series), *_marks(frame, marks)])


def colours_of(names: Sequence[str]) -> Mapping[str, str]:
    """The colour of each line, in the order of the series."""
    return dict(zip(names, COLOURS, strict=False))


def thinned(series: Series, most: int = _MOST_POINTS) -> Series:
    """The points in order of x, at most so many of them: of each stretch, the lowest and the highest."""
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


def _pieces(series: Series) -> Iterator[list[tuple[float, float]]]:
    """The line without the points that have no value, cut there."""
    piece: list[tuple[float, float]] = []
    for point in zip(series.x, series.y, strict=True):
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _areas(frame: Frame, series: Sequence[Series]) -> Iterator[str]:
    """A stripe around every x that any line has a point at, which says the values there."""
    xs = sorted({value for one in series for value in one.x})
    places = [frame.px(x) for x in xs]
    edges = [frame.left, *((a + b) / 2 for a, b in itertools.pairwise(places)), frame.right]
    for x, (left, right) in zip(xs, itertools.pairwise(edges), strict=True):
        lines = [f"step {x:,.0f}", *(_said(frame, one, x) for one in series)]
        yield svg.area(left, frame.top, right - left, frame.floor - frame.top, "\n".join(lines))


def _said(frame: Frame, series: Series, x: float) -> str:
    """The value of a line at x, or at the point that is nearest to it."""
    place = bisect.bisect_left(series.x, x)
    nearest = min(range(max(0, place - 1), min(len(series.x), place + 1)), key=lambda i: abs(series.x[i] - x))
    value = series.y[nearest]
    text = number(value, frame.percent, 2) if math.isfinite(value) else "not finite"
    elsewhere = "" if series.x[nearest] == x else f" (step {series.x[nearest]:,.0f})"
    return f"{series.name}: {text}{elsewhere}"


def _marks(frame: Frame, marks: Sequence[Mark]) -> Iterator[str]:
    labelled = -math.inf
    for mark in sorted(marks, key=lambda mark: mark.at):
        px = min(max(frame.px(mark.at), frame.left), frame.right)
        yield svg.mark(px, frame.top, frame.floor, mark.colour, mark.says)
        if px - labelled >= _APART:
            yield svg.text(px, frame.top - 4, mark.label)
            labelled = px
