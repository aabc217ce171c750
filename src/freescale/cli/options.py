"""What the commands share: parsing their options with tyro and printing results."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from freescale import config
from freescale.errors import FreeScaleError, UsageError, storage_errors
from freescale.log import logger
from freescale.progress import set_quiet

T = TypeVar("T")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""An option without a value, and without an opposite."""
_WIDTH = 120
"""Of tables that go into a file or another program."""


def parse(schema: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse a dataclass of options from the command line; a wrong option exits with 2 and says which.

    A schema with a field `quiet` is of a command that may take long: the field decides whether it shows progress.
    """
    options = tyro.cli(schema, args=list(argv), prog=prog)
    set_quiet(getattr(options, "quiet", False))
    return options


def run_parser(prog: str, text: str) -> argparse.ArgumentParser:
    """For a command that is given a run: a recipe or a TOML file, with any field of the config as a flag."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=text, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("source", help=f"a .toml file or a recipe: {', '.join(config.RECIPES)}")
    parser.add_argument("--data", help="folder of the data set (data.path)")
    parser.add_argument("--quiet", action="store_true", help="show no progress, only results, notes and errors")
    return parser


def parse_run(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, config.RunConfig]:
    """Its own options, and the config with all others applied."""
    options, overrides = parser.parse_known_args(list(argv))
    set_quiet(options.quiet)
    if options.data is not None:
        overrides = ["--data.path", options.data, *overrides]
    found = config.resolve(options.source, overrides, prog=f"{parser.prog} {options.source}")
    if not found.data.path:
        raise UsageError("no data is given", remedy=f"{parser.prog} {options.source} --data FOLDER")
    return options, found


def check_all(*checks: Callable[[], object]) -> None:
    """Run every check and report all errors, in this order: none may hide another. The last one is raised."""
    wrong: list[FreeScaleError] = []
    for check in checks:
        try:
            check()
        except FreeScaleError as error:
            wrong.append(error)
    for error in wrong[:-1]:
        logger.error("%s", error)
    if wrong:
        raise wrong[-1]


def require_at_least(options: object, **least: int) -> None:
    """Refuse numbers that are too small, all in one error. A field that has its default was not given."""
    wrong = []
    for name, limit in least.items():
        given, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if given == getattr(type(options), name, None):
            continue
        numbers = given if isinstance(given, tuple) else (given,)
        wrong += [f"{flag} {number} is below {limit}" for number in numbers if number < limit]
        wrong += [] if numbers else [f"{flag} has no number"]
    if wrong:
        raise UsageError("; ".join(wrong), remedy="give larger numbers, or leave the flags out")


def require_gpu(device: str) -> None:
    """Refuse to go on with cuda where there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no GPU is here", remedy="leave out --device cuda, or see `freescale doctor --device cuda`")


def write_page(path: Path, text: str) -> None:
    """Write a page, and the folder that it is in."""
    with storage_errors(path):
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
