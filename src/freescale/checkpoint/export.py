"""An exported model: safetensors, the vocabulary, the config, and a list of all files.

export.json                        every file with its size, checksum and tensors
model.safetensors                  the dense model and replicated tables
tables-00000-of-00002.safetensors  rows of sharded tables, one file per rank
config.toml, vocabulary.parquet
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from freescale.errors import DataError, StorageError, reason, storage_errors

LIST = "export.json"


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], first_rows: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Write a file, read it back, and describe it. `first_rows`: the first row of each part of a sharded table."""
    tensors_on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _save(path, tensors_on_cpu, {name: str(row) for name, row in (first_rows or {}).items()})
    for name, tensor, _ in _read_tensors(path):
        if not torch.equal(tensor, tensors_on_cpu[name]):
            raise DataError(f"'{name}' was not read back as it was written", where=str(path), remedy="check the disk")
    return describe(path) | {"tensors": {name: list(tensor.shape) for name, tensor in tensors_on_cpu.items()}}


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file with default permissions; safetensors makes it readable by its owner only."""
    with storage_errors(path):
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(tensors, path, metadata=metadata)
        except SafetensorError as error:
            remedy = "check that there is space and the folder is writable"
            raise StorageError(reason(error), where=str(path), remedy=remedy) from error
        path.chmod(mode)


def describe(path: Path) -> dict[str, Any]:
    """Return size and checksum of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_list(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the list of files last: an export without it is incomplete."""
    (folder / LIST).write_text(json.dumps({"format": 1, "files": dict(files)}, indent=1) + "\n")


def read(folder: Path) -> dict[str, Tensor]:
    """Read an export after verifying every file against the list; sharded tables are concatenated."""
    try:
        return _read(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        what = f"the export cannot be read: {reason(error)}"
        raise DataError(what, where=str(folder), remedy="export again") from error


def _read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    shards: dict[str, list[tuple[int, Tensor]]] = {}
    for name, entry in json.loads((folder / LIST).read_text())["files"].items():
        path = folder / name
        if path.parent != folder or not path.exists() or describe(path)["sha256"] != entry["sha256"]:
            raise DataError(f"{name} is missing or was changed", where=str(folder), remedy="export again")
        if path.suffix != ".safetensors":
            continue
        for key, tensor, row in _read_tensors(path):
            if row is None:
                tensors[key] = tensor
            else:
                shards.setdefault(key, []).append((row, tensor))
    by_row = {key: sorted(parts, key=lambda part: part[0]) for key, parts in shards.items()}
    return tensors | {key: torch.cat([tensor for _, tensor in parts]) for key, parts in by_row.items()}


def _read_tensors(path: Path) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield the tensors of a file, with the first row of each that is part of a sharded table."""
    with safe_open(path, framework="pt") as file:
        rows = file.metadata() or {}
        for name in file.keys():  # noqa: SIM118  not a dict
            yield name, file.get_tensor(name), int(rows[name]) if name in rows else None
