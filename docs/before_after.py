"""Draws the picture of the README from the kept measurement: `python docs/before_after.py` writes before-after.svg."""

import json
import re
from pathlib import Path
from typing import Any

from freescale import page
from freescale.bubbles.report import COLOURS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "step.json"
PRESET, RANKS = "heavy", 4
"""Of the lanes that were measured, the one that is drawn."""
WAYS = {"TorchRec": "TorchRec", "TorchRec SparseDist": "TorchRec SparseDist", "everything": "FreeScale"}
SEEN_MS, PER_ROW, COLUMN, LINE = 5.0, 5, 180, 22


def kept() -> list[dict[str, Any]]:
    """Every way to train, as measured."""
    results = json.loads(RESULTS.read_text())["results"]
    (one,) = [r for r in results if (r["preset"], r["world_size"], r["compute"]) == (PRESET, RANKS, "emulated")]
    return one["variants"]


def picture(ways: list[dict[str, Any]]) -> str:
    """The bars of the page about a step, for compute alone and three ways; what the colours mean stands above."""
    by_name = {one["variant"]: one for one in ways}
    alone = page.StackedBar("compute alone", {"forward": by_name["compute alone"]["step_ms"]})
    bars = [page.StackedBar(name, by_name[way]["causes_ms"]) for way, name in WAYS.items()] + [alone]
    seen = {cause: c for cause, c in COLOURS.items() if any(bar.values.get(cause, 0) > SEEN_MS for bar in bars)}
    drawn = page.stacked_bars(bars, seen, rows="", axis="ms per step")
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawn)[0])
    legend, top = _legend(seen), 12 + LINE * -(-len(seen) // PER_ROW)
    bars_below = drawn.replace("<svg ", f'<svg y="{top}" height="{height}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + height}" role="img" aria-label='
        '"Where a step goes: TorchRec\'s loops, FreeScale and compute alone" font-family="system-ui, sans-serif" '
        'font-size="12">\n<style>.grid { stroke: #e3e7eb } text { fill: #1d2530 }</style>\n'
        f'<rect width="{width}" height="{top + height}" fill="#fff"/>\n{legend}\n{bars_below}\n</svg>\n'
    )


def _legend(colours: dict[str, str]) -> str:
    shapes = []
    for place, (cause, colour) in enumerate(colours.items()):
        x, y = 20 + COLUMN * (place % PER_ROW), 10 + LINE * (place // PER_ROW)
        shapes.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        shapes.append(f'<text x="{x + 18}" y="{y + 11}">{cause}</text>')
    return "\n".join(shapes)


if __name__ == "__main__":
    Path(__file__).with_name("before-after.svg").write_text(picture(kept()))
