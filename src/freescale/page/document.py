"""The frame of a page: headings, explanations, tables."""

import html
from collections.abc import Sequence

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
    """Wrap finished parts into a page. Each line of `lead` is a paragraph."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    leads = "".join(f'<p class="lead">{escape(line)}</p>' for line in lead.splitlines())
    body = "\n".join([f"<h1>{escape(title)}</h1>{leads}", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n</body></html>\n'


def section(heading: str, explanation: str, *parts: str) -> str:
    """A headed part of a page."""
    return f"<h2>{escape(heading)}</h2><p>{escape(explanation)}</p>" + "".join(parts)


def figure(title: str, *parts: str, note: str = "") -> str:
    """A titled part of a grid, such as a chart."""
    noted = f"<p>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{noted}{''.join(parts)}</figure>"


def grid(figures: Sequence[str]) -> str:
    """Figures beside each other, as many as there is room for."""
    return f'<div class="charts">{"".join(figures)}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> str:
    """A plain table. `words`: columns of text; the others are numbers and stand at the right."""
    kinds = ["words" if column in words else "number" for column in range(len(header))]

    def line(cells: Sequence[str], tag: str) -> str:
        shown = (f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="table"><table><thead>{line(header, "th")}</thead><tbody>{body}</tbody></table></div>'


def escape(value: str) -> str:
    """Make text from outside harmless."""
    return html.escape(str(value))
