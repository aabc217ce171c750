"""Timelines, stacked bars and heat maps.

The caller chooses the colours. Many rows are drawn thinner, and labelled only as densely as labels fit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from freescale.page import markup
from freescale.page.charts import format_number, ticks
from freescale.page.markup import escape

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 92, 20, 6, 44
_HEIGHT, _TEXT, _CHARACTER = 420, 14, 6.5
_PALE, _DEEP = (247, 247, 247), (178, 24, 43)
_SHADES = 24


class TimelineSegment(NamedTuple):
    """A coloured segment of a row."""

    begin: float
    end: float
    colour: str
    tooltip: str


class StackedBar(NamedTuple):
    """A row of named values that add up."""

    name: str
    values: Mapping[str, float]


class Lane(NamedTuple):
    """A row of a timeline."""

    name: str
    segments: Sequence[TimelineSegment]


def legend(colours: Mapping[str, str]) -> str:
    """Legend of colours."""
    parts = [f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items()]
    return f'<p class="legend">{"".join(parts)}</p>'


def stacked_bars(bars: Sequence[StackedBar], colours: Mapping[str, str], *, rows: str, axis: str) -> str:
    """Horizontal stacked bars, one row each."""
    lanes = []
    for bar in bars:
        begin, segments = 0.0, []
        for name, colour in colours.items():
            value = bar.values.get(name, 0.0)
            segments.append(TimelineSegment(begin, begin + value, colour, f"{bar.name}: {name} {value:.2f}"))
            begin += value
        lanes.append(Lane(bar.name, segments))
    return timeline(lanes, rows=rows, axis=axis)


def timeline(lanes: Sequence[Lane], *, rows: str, axis: str) -> str:
    """Timeline with one row per lane."""
    frame = _Rows([lane.name for lane in lanes], max((p.end for lane in lanes for p in lane.segments), default=1.0))
    segments = [
        (row, segment) for row, lane in enumerate(lanes) for segment in lane.segments if segment.end > segment.begin
    ]
    marks = [frame.block(row, segment.begin, segment.end, segment.colour, segment.tooltip) for row, segment in segments]
    scale = [frame.tick(at) for at in ticks(0.0, frame.most, log=False)]
    return frame.draw([*scale, *marks], rows=rows, axis=axis)


def heat_map(
    names: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], *, rows: str, axis: str, unit: str
) -> str:
    """Heat map: darker cells for larger values, no cell for NaN. Equal neighbours in a row are merged."""
    frame = _Rows(names, float(len(columns)))
    most = max((value for row in values for value in row if not math.isnan(value)), default=0.0) or 1.0
    marks = []
    for row, row_values in enumerate(values):
        shades = [None if math.isnan(value) else round(_SHADES * value / most) for value in row_values]
        begin = 0
        for end in range(1, len(shades) + 1):
            if end == len(shades) or shades[end] != shades[begin]:
                label = columns[begin] if end - begin == 1 else f"{columns[begin]} to {columns[end - 1]}"
                tooltip = f"{rows} {names[row]}, {label}: {row_values[begin]:.2f} {unit}"
                shade = shades[begin]
                if shade is not None:
                    marks.append(frame.block(row, begin, end, _shade(shade / _SHADES), tooltip))
                begin = end
    every = max(1, -(-len(columns) // 10))
    marks += [frame.column(place + 0.5, columns[place]) for place in range(0, len(columns), every)]
    scale = {f"{most * part:.3g} {unit}": _shade(part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)}
    return legend(scale) + frame.draw(marks, rows=rows, axis=axis)


class _Rows:
    """Layout of stacked rows, with labels at the left and a scale below."""

    def __init__(self, names: Sequence[str], most: float) -> None:
        self._names, self.most = names, most or 1.0
        self._height = min(22.0, max(3.0, _HEIGHT / max(1, len(names))))
        self._floor = _TOP + self._height * len(names)
        self._left = max(_LEFT, 40 + _CHARACTER * max(map(len, names), default=0))

    def block(self, row: int, begin: float, end: float, colour: str, tooltip: str) -> str:
        left, height = self._px(begin), self._height - (2.0 if self._height > 8 else 0.0)
        return markup.block(left, _TOP + row * self._height, self._px(end) - left, height, colour, tooltip)

    def tick(self, at: float) -> str:
        px = self._px(at)
        return markup.line(px, _TOP, px, self._floor) + self.column(at, format_number(at))

    def column(self, at: float, name: str) -> str:
        return markup.text(self._px(at), self._floor + 16, name)

    def draw(self, marks: Sequence[str], *, rows: str, axis: str) -> str:
        every = max(1, -(-_TEXT // int(self._height)))
        places = [(_TOP + (row + 0.5) * self._height + 4, name) for row, name in enumerate(self._names)]
        named = [markup.text(self._left - 8, top, name, anchor="end") for top, name in places[::every]]
        middle, bottom = (self._left + _WIDTH - _RIGHT) / 2, self._floor + _BOTTOM
        titles = [markup.vertical_text(max(_TOP + self._floor, 60) / 2, rows), markup.text(middle, bottom - 6, axis)]
        return markup.drawing(_WIDTH, bottom, [*marks, *named, *titles])

    def _px(self, value: float) -> float:
        return self._left + (_WIDTH - self._left - _RIGHT) * value / self.most


def _shade(part: float) -> str:
    return "#" + "".join(f"{round(low + (high - low) * part):02x}" for low, high in zip(_PALE, _DEEP, strict=True))
