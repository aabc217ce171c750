"""What the commands share: parsing their options with tyro and printing results."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from freescale.errors import UsageError

T = TypeVar("T")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""An option without a value, and without an opposite."""
_WIDTH = 120
"""Of tables that go into a file or another program."""


def parse(schema: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse a dataclass of options from the command line; a wrong option exits with 2 and says which."""
    return tyro.cli(schema, args=list(argv), prog=prog)


def require_gpu(device: str) -> None:
    """Refuse to go on with cuda where there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no GPU is here", remedy="leave out --device cuda, or see `freescale doctor --device cuda`")


def write_page(path: Path, text: str) -> None:
    """Write a page, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def say(*lines: str) -> None:
    """Print lines for people."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def print_table(title: str, header: list[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> None:
    """Print a table for people. `words`: columns of text; the others are numbers and stand at the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column in words else "right")
    for row in rows:
        table.add_row(*row)
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH
    Console(file=sys.stdout, width=wide).print(table)


def print_json(result: Any) -> None:
    """Print a result for a program to read."""
    say(json.dumps(result, indent=1))
