"""Generate config.md from the config schema: `python docs/reference/config.py`."""

import dataclasses
import inspect
from pathlib import Path
from typing import get_origin, get_type_hints

from freescale.config import RECIPES, RunConfig
from freescale.config.load import field_docs, sections, toml_value, type_name

_HEAD = """# Config

A run is a TOML file of these tables. Every field is also a flag (`--train.epochs 3`). An unknown key is an error with
the closest valid key. `freescale config tiny` prints a complete file with this documentation as comments.

Recipes: {recipes}.
"""


def page() -> str:
    """All tables, in the order of the file."""
    recipes = ", ".join(f"`{name}`" for name in RECIPES)
    return "\n".join([_HEAD.format(recipes=recipes), *(_section(name, schema) for name, schema in sections(RunConfig))])


def _section(name: str, schema: type) -> str:
    docs, hints = field_docs(schema), get_type_hints(schema)
    rows = [
        f"| `{f.name}` | {type_name(hints[f.name])} | `{toml_value(f.default)}` | {_cell(docs[f.name])} |"
        for f in dataclasses.fields(schema)
        if not (dataclasses.is_dataclass(hints[f.name]) or get_origin(hints[f.name]) is dict)
    ]
    heading = f"[{name}]" if name else "Top level"
    table = "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])
    return f"## {heading}\n\n{inspect.cleandoc(schema.__doc__ or '')}\n\n{table}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("_", "\\_").replace("[", "\\[")


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
