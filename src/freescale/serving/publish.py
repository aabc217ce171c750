"""Publish versions of a trained model: full ones, and between them deltas with the rows that have changed.

LATEST         the newest version and its full one; replaced atomically, last
v000005/       a full version: an export, see `package`, and version.json
v000006/       a delta: changed rows and ids of tables, dense weights, and version.json with the version it builds on

A version never changes. One that LATEST does not name was not finished, and is written anew.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freescale.checkpoint import export
from freescale.errors import DataError
from freescale.serving.follow import LATEST, apply_delta, version_name
from freescale.serving.package import Format, served_weights, write_package
from freescale.serving.serve import read_safetensors
from freescale.storage import StorageFolder
from freescale.train.trained_model import TrainedModel


class Published(NamedTuple):
    """A version that was published."""

    version: int
    is_full: bool
    bytes: int
    rows: int
    """Changed rows of a delta."""


def publish(trained: TrainedModel, address: str, format: Format, *, full_every: int) -> Published | None:  # noqa: A002
    """Publish the model as the next version; None if the newest version has its step already."""
    store = StorageFolder(address)
    latest = _latest(store)
    with tempfile.TemporaryDirectory(prefix="freescale-publish-") as place:
        folder = Path(place) / "version"
        folder.mkdir()
        chain = _chain(store, latest, Path(place))
        if chain and chain[-1]["step"] == trained.step:
            return None
        version, facts = (latest["version"] + 1 if latest else 0), {"step": trained.step, "format": format}
        before = None if not chain or len(chain) >= full_every else _weights(store, chain, Path(place))
        delta = None if before is None else find_delta(before, served_weights(trained))
        if delta is None:
            write_package(trained, folder, format)
            facts |= {"base": None}
        else:
            export.write_tensors(folder / "delta.safetensors", delta)
            facts |= {"base": version - 1, "base_digest": chain[-1]["digest"]}
        files = {path.name: export.describe(path)["sha256"] for path in sorted(folder.iterdir())}
        size = sum(path.stat().st_size for path in folder.iterdir())
        (folder / "version.json").write_text(json.dumps({"version": version, **facts, "files": files}, indent=1) + "\n")
        store.upload(folder, version_name(version))
    full = version if delta is None else chain[0]["version"]
    store.replace(LATEST, json.dumps({"version": version, "full": full}).encode())
    rows = 0 if delta is None else sum(len(value) for name, value in delta.items() if name.startswith("rows/"))
    return Published(version, delta is None, size, rows)


def find_delta(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return what `apply_delta` turns the weights before into those now; None if they have other shapes."""
    if {name: value.shape for name, value in before.items()} != {name: value.shape for name, value in now.items()}:
        return None
    delta: dict[str, Tensor] = {}
    for name, value in now.items():
        if name.endswith(".ids"):
            continue  # with its table
        if not name.startswith("tables."):
            delta[name] = value
            continue
        changed = (_bits(value) != _bits(before[name])).flatten(1).any(1)
        ids = f"{name.removeprefix('tables.')}.ids"
        if ids in now:
            changed |= (now[ids] != before[ids]).flatten()
        rows = changed.nonzero()[:, 0]
        delta |= {f"rows/{name}": rows.int(), name: value[rows]}
        if ids in now:
            delta[ids] = now[ids].flatten()[rows]
    return delta


def _bits(values: Tensor) -> Tensor:
    """Return values as integers, by which NaN equals itself and -0 is not 0."""
    return values.contiguous().view(torch.int32)


def _latest(store: StorageFolder) -> dict[str, Any] | None:
    raw = store.read(LATEST)
    if raw is None:
        return None
    try:
        latest = json.loads(raw)
        return {"version": int(latest["version"]), "full": int(latest["full"])}
    except (ValueError, KeyError, TypeError) as error:
        remedy = "restore it from the newest complete version"
        raise DataError(f"{LATEST} cannot be read: {error}", where=store.address, remedy=remedy) from error


def _chain(store: StorageFolder, latest: Mapping[str, int] | None, place: Path) -> list[dict[str, Any]]:
    """Return version.json of the newest full version and of the deltas after it."""
    chain = []
    for version in range(latest["full"], latest["version"] + 1) if latest else ():
        (place / "version.json").write_bytes(_require(store, f"{version_name(version)}/version.json"))
        digest = export.describe(place / "version.json")["sha256"]
        chain.append(json.loads((place / "version.json").read_text()) | {"digest": digest})
    return chain


def _weights(store: StorageFolder, chain: list[dict[str, Any]], place: Path) -> dict[str, Tensor]:
    """Return the weights of the newest version."""
    weights: dict[str, Tensor] = {}
    for facts in chain:
        name = "weights.safetensors" if facts["base"] is None else "delta.safetensors"
        path = place / f"{facts['version']}.safetensors"
        path.write_bytes(_require(store, f"{version_name(facts['version'])}/{name}"))
        if export.describe(path)["sha256"] != facts["files"][name]:
            what = f"{name} of version {facts['version']} was changed or is incomplete"
            raise DataError(what, where=store.address, remedy="publish to another address")
        read = read_safetensors(path)
        weights = read if facts["base"] is None else apply_delta(weights, read)
    return weights


def _require(store: StorageFolder, name: str) -> bytes:
    content = store.read(name)
    if content is None:
        remedy = "publish to another address"
        raise DataError(f"{name} is missing, which {LATEST} needs", where=store.address, remedy=remedy)
    return content
