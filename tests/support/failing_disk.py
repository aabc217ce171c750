"""Builds a library that makes file operations fail (see `failing_disk.c`)."""

import subprocess
from pathlib import Path


def failing_disk_at(folder: Path) -> Path:
    """The library, built into a folder."""
    library, source = folder / "disk.so", Path(__file__).parent / "failing_disk.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library
