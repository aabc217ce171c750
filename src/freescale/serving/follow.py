"""Follows published versions of a model without a restart. Needs what `serve.py` needs; fsspec for remote addresses.

    import serve
    follower = Follower("s3://models/mine", serve)
    follower.poll()                                # now and then, from any thread
    follower.model.recommend(...)

A version is checked before it answers: its checksums, its base, and for full versions its example. One that fails is
refused with the reason in `error`, and the version before it keeps answering.
"""

import hashlib
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

LATEST = "LATEST"


def version_name(version: int) -> str:
    """Return the folder of a version."""
    return f"v{version:06d}"


def apply_delta(weights: dict[str, torch.Tensor], delta: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return new weights. `rows/TABLE` lists the rows that TABLE and its ids have in the delta; the rest is whole."""
    result = dict(weights)
    for name, value in delta.items():
        if name.startswith("rows/"):
            continue
        table = f"tables.{name.removesuffix('.ids')}" if name.endswith(".ids") else name
        if (rows := delta.get(f"rows/{table}")) is not None:
            changed = weights[name].clone()
            changed.view(-1, *value.shape[1:])[rows.long()] = value
            value = changed
        result[name] = value
    return result


class Follower:
    """The newest version of a model, or one that was chosen by `go_back`."""

    def __init__(self, address: str, serve: Any) -> None:
        """Follow an address. `serve`: the module of serve.py."""
        self._address, self._serve, self._lock = address, serve, threading.Lock()
        self._cache = tempfile.TemporaryDirectory(prefix="freescale-model-")
        self._weights: dict[str, torch.Tensor] = {}
        self._full = self.version = -1
        self._digest, self.error = "", ""
        self.model: Any = None
        """Answers requests. A request that has begun is finished by the version that it began with."""

    def poll(self) -> bool:
        """Load the newest version; return whether there was a new one that could be loaded."""
        with self._lock:
            try:
                return self._follow(json.loads(self._read(LATEST)))
            except Exception as error:  # whatever is wrong with a version, the old one keeps answering
                self.error = str(error)
                return False

    def go_back(self, version: int) -> None:
        """Load an earlier version, which stays until `poll`."""
        with self._lock:
            facts = self._facts(version)
            while facts["base"] is not None and facts["base"] != self.version:
                facts = self._facts(facts["base"])
            self._load(facts["version"] if facts["base"] is None else self.version + 1, version)

    def _follow(self, latest: dict[str, Any]) -> bool:
        if latest["version"] == self.version:
            return False
        newer = self._full == latest["full"] and self.version < latest["version"]
        self._load(self.version + 1 if newer else latest["full"], latest["version"])
        self.error = ""
        return True

    def _load(self, first: int, last: int) -> None:
        """Load versions in order, and answer by the last one when all of them are valid."""
        weights, digest, model, full = self._weights, self._digest, self.model, self._full
        facts: dict[str, Any] = {}
        for version in range(first, last + 1):
            facts = self._facts(version)
            folder = self._fetch(version, facts)
            if facts["base"] is None:
                model, full = self._serve.Recommender(folder, _same_programs(model, facts)), version
                model.check()
                weights = self._serve.read_safetensors(folder / "weights.safetensors")
            elif (facts["base"], facts["base_digest"]) != (version - 1, digest):
                raise ValueError(f"version {version} does not follow the version before it")
            else:
                weights = apply_delta(weights, self._serve.read_safetensors(folder / "delta.safetensors"))
            digest = _digest(self._read(f"{version_name(version)}/version.json"))
        if last != full:
            model = self._serve.Recommender(model.folder, model.programs, weights)
            model.facts["step"] = facts["step"]
        self._weights, self._digest, self._full, self.version, self.model = weights, digest, full, last, model

    def _facts(self, version: int) -> dict[str, Any]:
        facts = json.loads(self._read(f"{version_name(version)}/version.json"))
        if facts["version"] != version:
            raise ValueError(f"{version_name(version)} describes itself as version {facts['version']}")
        return facts

    def _fetch(self, version: int, facts: dict[str, Any]) -> Path:
        """Copy the files of a version and verify them."""
        folder = Path(self._cache.name) / version_name(version)
        folder.mkdir(exist_ok=True)
        for name, digest in facts["files"].items():
            content = self._read(f"{version_name(version)}/{name}")
            if _digest(content) != digest:
                raise ValueError(f"{name} of version {version} was changed or is incomplete")
            (folder / name).write_bytes(content)
        return folder

    def _read(self, name: str) -> bytes:
        if "://" not in self._address:
            return (Path(self._address) / name).read_bytes()
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(self._address)
        filesystem.invalidate_cache()
        return bytes(filesystem.cat_file(f"{root}/{name}"))


def _same_programs(model: Any, facts: dict[str, Any]) -> Any:
    """Return the programs of a model if those of a version are the same: loading them takes seconds."""
    files = [] if model is None else [f"{name}.pt2" for name in model.programs]
    same = files and all(facts["files"].get(name) == model.facts["files"][name]["sha256"] for name in files)
    return model.programs if same else None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
