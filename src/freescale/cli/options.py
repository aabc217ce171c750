"""What the commands share: parsing options, checking them, and printing results."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from freescale import config
from freescale.errors import FreeScaleError, UsageError, storage_errors
from freescale.log import logger
from freescale.progress import set_quiet

T = TypeVar("T")
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A flag without a value and without a negated form."""
_WIDTH = 120
"""Width of tables that are not printed on a terminal."""


def parse(schema: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse a dataclass of options from the command line; a wrong option is named and exits with 2.

    A field `quiet` decides whether the command shows progress.
    """
    options = tyro.cli(schema, args=list(argv), prog=prog)
    set_quiet(getattr(options, "quiet", False))
    return options


def run_parser(prog: str, text: str) -> argparse.ArgumentParser:
    """Return a parser for a command that takes a recipe or a TOML file, with any field of the config as a flag."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=text, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("source", help=f"a .toml file or a recipe: {', '.join(config.RECIPES)}")
    parser.add_argument("--data", help="folder of the data set (data.path)")
    parser.add_argument("--quiet", action="store_true", help="show no progress, only results, warnings and errors")
    return parser


def parse_run(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, demo_data: Callable[[], Path] | None = None
) -> tuple[argparse.Namespace, config.RunConfig]:
    """Return the command's own options, and the config with all other flags applied.

    `demo_data`: returns a data set for the recipe `tiny` if none is given.
    """
    options, overrides = parser.parse_known_args(list(argv))
    set_quiet(options.quiet)
    if options.data is not None:
        overrides = ["--data.path", options.data, *overrides]
    run_config = config.resolve(options.source, overrides, prog=f"{parser.prog} {options.source}")
    if not run_config.data.path and options.source == "tiny" and demo_data is not None:
        run_config = replace(run_config, data=replace(run_config.data, path=str(demo_data())))
    if not run_config.data.path:
        raise UsageError("no data is given", remedy=f"{parser.prog} {options.source} --data FOLDER")
    return options, run_config


def check_all(*checks: Callable[[], object]) -> None:
    """Run every check, log all errors in this order, and raise the last: none may hide another."""
    errors: list[FreeScaleError] = []
    for check in checks:
        try:
            check()
        except FreeScaleError as error:
            errors.append(error)
    for error in errors[:-1]:
        logger.error("%s", error)
    if errors:
        raise errors[-1]


def require_at_least(options: object, **least: int) -> None:
    """Refuse numbers below their limit, all in one error. A field with its default value is not checked."""
    errors = []
    for name, limit in least.items():
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value == getattr(type(options), name, None):
            continue
        numbers = value if isinstance(value, tuple) else (value,)
        errors += [f"{flag} {number} is below {limit}" for number in numbers if number < limit]
        errors += [] if numbers else [f"{flag} has no number"]
    if errors:
        raise UsageError("; ".join(errors), remedy="give larger numbers, or leave the flags out")


def require_gpu(device: str) -> None:
    """Refuse cuda on a machine without a GPU."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "this machine has no GPU", remedy="leave out --device cuda, or see `freescale doctor --device cuda`"
        )


def create_folder_of(path: Path) -> None:
    """Create the folder of an output, before the work whose result goes there."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)


def write_page(path: Path, text: str) -> None:
    """Write a page, and create its folder."""
    create_folder_of(path)
    with storage_errors(path):
        path.write_text(text, encoding="utf-8")


def say(*lines: str) -> None:
    """Print human-readable lines."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def print_table(title: str, header: list[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> None:
    """Print a human-readable table. `words`: columns of text; the others are numbers and right-aligned."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column in words else "right")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH
    Console(file=sys.stdout, width=width).print(table)


def print_json(result: Any) -> None:
    """Print a result as JSON."""
    say(json.dumps(result, indent=1))
