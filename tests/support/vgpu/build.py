"""Compiles `guard.cpp` once per source and torch version, which takes 20 seconds."""

import hashlib
import importlib.util
import os
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

_SOURCE = Path(__file__).with_name("guard.cpp")
_BUILT = Path(__file__).parents[3] / "build" / "vgpu"


def guard() -> ModuleType:
    """Return the compiled module."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = _BUILT / key / "vgpu_guard.so"
    if not library.exists():
        _compile(library)
    spec = importlib.util.spec_from_file_location("vgpu_guard", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    part = library.with_suffix(f".{os.getpid()}")  # several ranks may compile at once
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", "-w", str(_SOURCE), "-o", str(part)]
    command += [f"-I{path}" for path in includes]
    command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python", f"-Wl,-rpath,{root / 'lib'}"]
    subprocess.run(command, check=True)
    part.replace(library)
