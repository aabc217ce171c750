"""`freescale tables`: the dynamic ids of a training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from freescale.cli.options import parse, print_json, say


@dataclass(frozen=True, kw_only=True)
class TablesOptions:
    """Print what the tables with dynamic ids hold in the newest checkpoint: load, age, hottest and coldest ids.

    freescale tables runs/latest
    """

    run: tyro.conf.Positional[Path]
    """Folder of a training."""
    json: bool = False
    """Print JSON."""


def run_tables(argv: Sequence[str], prog: str) -> int:
    """Print the tables."""
    from freescale.train.slot_summary import summarize_tables

    options = parse(TablesOptions, argv, prog)
    summary = summarize_tables(options.run)
    if options.json:
        print_json(summary)
    else:
        say(f"step {summary['step']}", *(line for name, t in summary["tables"].items() for line in _lines(name, t)))
    return 0


def _lines(name: str, table: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {table['ids']:,} ids in {table['slots']:,} slots, load {table['load']:.1%}"]
    lines.append(f"  fullest bucket: {table['fullest_bucket']:.1%} of its slots")
    if not table["ids"]:
        return lines
    median, most = table["steps_since_use"]
    lines.append(f"  steps since the last use: {median:,.0f} in the median, {most:,.0f} at most")
    lines.append(f"  most used (id, steps): {_pairs(table['hottest'])}")
    lines.append(f"  longest not used (id, steps ago): {_pairs(table['coldest'])}")
    return lines


def _pairs(pairs: list[list[int]]) -> str:
    return ", ".join(f"{id_} {number:,}" for id_, number in pairs)
