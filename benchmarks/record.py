"""How results are kept: the command, the machine, the figures."""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def save(out: Path | None, results: list[dict[str, Any]]) -> None:
    """Write results beside the command that made them and the machine that ran it."""
    if out is None:
        return
    words = [word for word in sys.argv[1:] if word not in ("--out", str(out))]
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    packages = {name: version(name) for name in ("numpy", "polars", "pyarrow", "torch")}
    kept = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "machine": machine | packages,
        "results": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(kept, indent=1) + "\n")
