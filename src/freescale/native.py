"""C files of this package: compiled on first use, loaded through ctypes, not kept on disk."""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-shared", "-fPIC")


def compile_and_load(source: Path, definitions: Sequence[str] = ()) -> ctypes.CDLL | str:
    """Compile and load a C file (a third of a second); return the reason if that fails."""
    compiler, *options = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler) is None:
        return "no C compiler was found"
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / f"{source.stem}.so"
        command = [compiler, *options, *_FLAGS, *definitions, "-o", built, source, "-lm"]
        environment = {**os.environ, "TMPDIR": folder}  # an interrupted compiler leaves no files elsewhere
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        if run.returncode:
            return f"{compiler} failed: {(run.stderr.strip().splitlines() or ['no message'])[0]}"
        try:
            return ctypes.CDLL(str(built))
        except OSError as error:
            return f"the compiled file cannot be loaded: {error}"
