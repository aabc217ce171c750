"""Writes the help of every command down: `python docs/reference/commands.py` makes the page beside it."""

import contextlib
import io
import os
from pathlib import Path

os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}  # before anybody asks how wide the terminal is

from freescale.cli.main import COMMANDS
from freescale.cli.main import main as freescale

_HEAD = """# Commands

`freescale COMMAND --help` says the same. Exit codes: 0 done, 1 failed, 2 wrong use or config, 3 unusable data, 4 faulty
install, 5 a rank lost, 6 NaN or overflow, 7 a file or folder that may not be used, 130 interrupted. `--json` prints
what a program can read; errors go to stderr and say what, where, and the remedy.

A command that takes longer than two seconds shows its progress on stderr: on a terminal a bar with the time left,
elsewhere a line after ten seconds and then every thirty; `--quiet` turns it off. Results go to stdout, so
`> result.json` holds nothing else. Of several ranks only rank 0 shows progress. Benchmarks draw between their
measurements, never during one.
"""


def page() -> str:
    """All commands, in the order of `freescale --help`."""
    parts = [_HEAD]
    for name in COMMANDS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            freescale([*name.split(), "--help"])
        lines = "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())
        parts.append(f"## freescale {name}\n\n```\n{lines}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
