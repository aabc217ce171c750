"""What the commands share: parsing their options with tyro and printing results."""

import json
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

T = TypeVar("T")


def parse(schema: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse a dataclass of options from the command line; a wrong option exits with 2 and says which."""
    return tyro.cli(schema, args=list(argv), prog=prog)


def print_json(result: Any) -> None:
    """Print a result for a program to read."""
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
