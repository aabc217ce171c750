"""What the commands share: parsing their options with tyro and printing results."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

T = TypeVar("T")
_WIDTH = 120
"""Of tables that go into a file or another program."""


def parse(schema: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse a dataclass of options from the command line; a wrong option exits with 2 and says which."""
    return tyro.cli(schema, args=list(argv), prog=prog)


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)
) -> None:
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
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
