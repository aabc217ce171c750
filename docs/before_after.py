"""Draws the README's picture from the measured step: `python docs/before_after.py` writes it beside itself."""

import json
from pathlib import Path
from typing import Any

from freescale import page
from freescale.bubbles.report import COLOURS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "step.json"
PICTURE = Path(__file__).with_suffix(".svg").with_stem("before-after")
PRESET, RANKS = "heavy", 4
SHOWN = {
    "TorchRec": "TorchRec's plain loop",
    "TorchRec SparseDist": "TorchRec SparseDist",
    "everything": "FreeScale",
    "compute alone": "compute alone",
}
_STYLE = "text { font: 13px system-ui, sans-serif; fill: #1d2530; } .grid { stroke: #e3e7eb; }"
_LINE, _COLUMN, _PER_LINE = 20, 150, 6


def picture(results: list[dict[str, Any]]) -> str:
    """Bars of the report's page in its colours, as a file of its own; seconds of less than a pixel are left out."""
    ways = next(one["ways"] for one in results if (one["preset"], one["ranks"]) == (PRESET, RANKS))
    causes = {one["way"]: one.get("causes_ms", {"forward": one["step_ms"]}) for one in ways}
    bars = [page.Bar(name, causes[way]) for way, name in SHOWN.items()]
    least = max(sum(bar.values.values()) for bar in bars) / 400
    seen = {cause: colour for cause, colour in COLOURS.items() if any(b.values.get(cause, 0) > least for b in bars)}
    drawn = page.stacked_bars(bars, seen, rows="", axis="ms per step")
    (height,) = [int(part.split('"')[0].split()[3]) for part in drawn.split('viewBox="')[1:]]
    keys = [_key(place, height, cause, colour) for place, (cause, colour) in enumerate(seen.items())]
    whole = height + _LINE * (1 + (len(seen) - 1) // _PER_LINE) + 8
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {whole}" role="img">'
    shapes = drawn.split(">", 1)[1].removesuffix("</svg>")
    back = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{frame}<style>{_STYLE}</style>{back}{shapes}{''.join(keys)}</svg>\n"


def _key(place: int, top: float, cause: str, colour: str) -> str:
    x, y = 20 + _COLUMN * (place % _PER_LINE), top + _LINE * (place // _PER_LINE)
    return (
        f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/><text x="{x + 18}" y="{y + 11}">{cause}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(json.loads(RESULTS.read_text())["results"]))
