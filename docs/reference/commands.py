"""Generate commands.md from the help of every command: `python docs/reference/commands.py`."""

import contextlib
import io
import os
from pathlib import Path

os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}  # before the terminal width is read

from freescale.cli.main import COMMANDS
from freescale.cli.main import main as freescale

_HEAD = """# Commands

`freescale COMMAND --help` prints the same. Exit codes: 0 success, 1 failure, 2 invalid usage or config, 3 unusable
data, 4 broken install, 5 lost rank, 6 NaN or Inf, 7 inaccessible file or folder, 130 interrupted. `--json` prints
machine-readable output. Errors go to stderr with what, where and a remedy.

A command that takes longer than two seconds shows its progress on stderr: on a terminal a bar with the remaining time,
elsewhere a line after ten seconds and then every thirty. `--quiet` disables it. Only results go to stdout. Only rank 0
shows progress. Benchmarks draw between measurements, never during one.
"""


def page() -> str:
    """All commands, in the order of `freescale --help`."""
    parts = [_HEAD]
    for name in COMMANDS:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            freescale([*name.split(), "--help"])
        lines = "\n".join(line.rstrip() for line in output.getvalue().strip().splitlines())
        parts.append(f"## freescale {name}\n\n```\n{lines}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
