"""HTML elements of a page and SVG shapes of a chart. All text is escaped here."""

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2530; background: #fff; }
body { max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p.lead { color: #4a5563; margin: 0 0 0.3rem; }
table { border-collapse: collapse; margin-bottom: 1.2rem; }
th, td { padding: 0.25rem 0.9rem 0.25rem 0; text-align: right; } td.number { white-space: nowrap; }
th { border-bottom: 1px solid #9aa5b1; font-weight: 600; vertical-align: bottom; } .words { text-align: left; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #1d2530; }
p.legend span { display: inline-block; margin-right: 1.1rem; font-size: 13px; }
h1, p, .legend span { overflow-wrap: anywhere; } .table { overflow-x: auto; }
p.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 0.4rem; border: 1px solid #c3cad2; }
.grid { stroke: #e3e7eb; } .axis { stroke: #6b7785; }
.area { fill: transparent; } .area:hover { fill: #1d253014; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1.2rem; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; } figure p { margin: 0.1rem 0; }
figure svg { width: 100%; }
@media (max-width: 700px) {
  svg text { font-size: 16px; } figure svg text { font-size: 12px; }
  table { font-size: 13px; } th, td { padding-right: 0.5rem; }
}
"""


def document(title: str, lead: str, *parts: str) -> str:
    """Build a page from rendered parts. Each line of `lead` is a paragraph."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    leads = "".join(f'<p class="lead">{escape(line)}</p>' for line in lead.splitlines())
    body = "\n".join([f"<h1>{escape(title)}</h1>{leads}", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n</body></html>\n'


def section(heading: str, explanation: str, *parts: str) -> str:
    """Section with a heading."""
    return f"<h2>{escape(heading)}</h2><p>{escape(explanation)}</p>" + "".join(parts)


def figure(title: str, *parts: str, note: str = "") -> str:
    """Figure with a caption, for a grid."""
    noted = f"<p>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{noted}{''.join(parts)}</figure>"


def grid(figures: Sequence[str]) -> str:
    """Responsive grid of figures."""
    return f'<div class="charts">{"".join(figures)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> str:
    """Table. `words`: indices of left-aligned text columns; the others are right-aligned numbers."""
    kinds = ["words" if column in words else "number" for column in range(len(header))]

    def line(cells: Sequence[str], tag: str) -> str:
        shown = (f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="table"><table><thead>{line(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def escape(value: str) -> str:
    """Escape text for HTML."""
    return html.escape(str(value))


def drawing(width: float, height: float, shapes: Iterable[str]) -> str:
    """SVG element with these shapes."""
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img">{"".join(shapes)}</svg>'


def text(x: float, y: float, words: str, *, anchor: str = "middle") -> str:
    """Text at a position."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def vertical_text(y: float, words: str) -> str:
    """Vertical text at the left edge, read from bottom to top."""
    return f'<text transform="translate(16 {y:.1f}) rotate(-90)" text-anchor="middle">{escape(words)}</text>'


def area(x: float, y: float, width: float, height: float, tooltip: str) -> str:
    """Invisible rectangle with a tooltip."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="area" {place}><title>{escape(tooltip)}</title></rect>'


def mark(x: float, top: float, floor: float, colour: str, tooltip: str) -> str:
    """Dashed vertical line with a tooltip."""
    place = f'x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{floor:.1f}"'
    visible = f'<line {place} stroke="{colour}" stroke-width="1.5" stroke-dasharray="4 3"/>'
    return f'<g>{visible}<line {place} stroke="transparent" stroke-width="9"/><title>{escape(tooltip)}</title></g>'


def line(x1: float, y1: float, x2: float, y2: float, *, kind: str = "grid") -> str:
    """Straight line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def block(x: float, y: float, width: float, height: float, colour: str, tooltip: str) -> str:
    """Rectangle with a tooltip."""
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(tooltip)}</title></rect>'


def dot(x: float, y: float, size: float, colour: str, tooltip: str) -> str:
    """Point with a tooltip."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}"><title>{escape(tooltip)}</title></circle>'


def path(points: Iterable[tuple[float, float]], colour: str) -> str:
    """Polyline through points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'
