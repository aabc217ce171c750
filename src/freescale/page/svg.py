"""Shapes of a drawing. Every text from outside is escaped here."""

from collections.abc import Iterable

from freescale.page.document import escape


def drawing(width: float, height: float, shapes: Iterable[str]) -> str:
    """Shapes in a frame of their own."""
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img">{"".join(shapes)}</svg>'


def text(x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def upright(y: float, words: str) -> str:
    """Words at the left edge, read from below."""
    return f'<text transform="translate(16 {y:.1f}) rotate(-90)" text-anchor="middle">{escape(words)}</text>'


def area(x: float, y: float, width: float, height: float, says: str) -> str:
    """An invisible rectangle that says something when it is hovered over."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="area" {place}><title>{escape(says)}</title></rect>'


def mark(x: float, top: float, floor: float, colour: str, says: str) -> str:
    """A dashed upright line that says something when it is hovered over."""
    place = f'x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{floor:.1f}"'
    seen = f'<line {place} stroke="{colour}" stroke-width="1.5" stroke-dasharray="4 3"/>'
    return f'<g>{seen}<line {place} stroke="transparent" stroke-width="9"/><title>{escape(says)}</title></g>'


def line(x1: float, y1: float, x2: float, y2: float, *, kind: str = "grid") -> str:
    """A straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def block(x: float, y: float, width: float, height: float, colour: str, says: str) -> str:
    """A rectangle that says something when it is hovered over."""
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(says)}</title></rect>'


def dot(x: float, y: float, size: float, colour: str, says: str) -> str:
    """A point that says something when it is hovered over."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}"><title>{escape(says)}</title></circle>'


def path(points: Iterable[tuple[float, float]], colour: str) -> str:
    """Straight lines from point to point."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
