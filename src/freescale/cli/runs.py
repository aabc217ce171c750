"""`freescale runs`: what was trained here, how far it came, and how good it became."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from freescale.bubbles import flight_recorder
from freescale.cli.options import Flag, parse, print_json, print_table, say
from freescale.train.metrics_logger import METRICS_FILE, read_entries

_BEST = {"ndcg@10": max, "ne": min}
"""Metrics that tell how good a model is, and which of two values is the better one."""
_SILENT_SECONDS = 60.0
"""After which a run that left nothing to say how it ended is taken to be lost."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """List the runs in a folder with their state, their last loss and their best metric, the newest last.

    freescale runs
    """

    folder: tyro.conf.Positional[Path] = Path("runs")
    """Where `freescale train` puts them."""
    json: Flag = False
    """Print the list as JSON."""


@dataclass(frozen=True)
class Run:
    """One of them, in a line."""

    name: str
    state: str
    step: int
    loss: float | None
    best: str
    changed: str


def run(argv: Sequence[str], prog: str) -> int:
    """Print the list."""
    options = parse(Options, argv, prog)
    folders = [path for path in options.folder.glob("*") if (path / METRICS_FILE).exists() and not path.is_symlink()]
    found = [_look_at(path) for path in sorted(folders, key=lambda path: (path / METRICS_FILE).stat().st_mtime)]
    if options.json:
        print_json([asdict(one) for one in found])
        return 0
    if not found:
        say(f"no runs in {options.folder}")
        return 0
    rows = [
        [o.name, o.state, f"{o.step:,}", "" if o.loss is None else f"{o.loss:.4f}", o.best, o.changed] for o in found
    ]
    print_table(str(options.folder), ["run", "state", "step", "loss", "best", "changed"], rows, words=(0, 1, 4, 5))
    return 0


def _look_at(folder: Path) -> Run:
    noted = list(read_entries(folder))
    trained = [entry for entry in noted if entry["kind"] == "train"]
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / METRICS_FILE).stat().st_mtime))
    step, loss = (trained[-1]["step"], trained[-1].get("loss")) if trained else (0, None)
    return Run(
        folder.name, _state(folder, noted), step, loss if isinstance(loss, float) else None, _best(noted), changed
    )


def _state(folder: Path, noted: Sequence[dict[str, Any]]) -> str:
    """As the run noted it at its end; without, as its flight recorders tell."""
    if noted and noted[-1]["kind"] == "end":
        return "done" if noted[-1].get("finished") else "stopped"
    signs = [notes[-1].at for notes in flight_recorder.read(folder).values() if notes]
    return "running" if signs and time.time() - max(signs) / 1e9 < _SILENT_SECONDS else "lost"


def _best(noted: Sequence[dict[str, Any]]) -> str:
    """Of all evaluations; of several labels the first."""
    evaluated = [entry for entry in noted if entry["kind"] == "evaluate"]
    for name in evaluated[0] if evaluated else ():
        values = [entry[name] for entry in evaluated if isinstance(entry.get(name), float)]
        if name.split("/")[0] in _BEST and values:
            return f"{name} {_BEST[name.split('/')[0]](values):.4f}"
    return ""
