"""Tile sizes of the attention kernels, by kernel, operands, width of a head and architecture.

The table is checked without a GPU: benchmarks/kernels.py compiles every entry. `freescale bench attention --tune`
measures tiles on a GPU and stores the fastest in a file of the user's cache folder, which replaces entries of the table
on that device. A file of another device or of other versions is refused. Tiles change the order of additions, so the
results before and after tuning are equal to rounding.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
import triton

from freescale.errors import storage_errors
from freescale.log import info_once, warning_once

Operands = Literal["16-bit", "tf32", "fp32"]
KERNELS = ("forward", "backward_rows", "backward_columns")
WIDTHS = (16, 32, 64, 128, 256)
"""Of a head, rounded up to a power of 2."""
_SHAPES = ((16, 16), (32, 32), (64, 32), (64, 64), (128, 32), (128, 64), (128, 128))
_WARPS, _STAGES = (4, 8), (1, 2, 3)
_FORMAT = 1
_MIN_GAIN = 0.03  # a tile replaces that of the table if it is this much faster: less is noise
_REMEDY = "`freescale bench attention --device cuda --tune` measures it anew"


class Tile(NamedTuple):
    """How a kernel divides its work."""

    block: int
    """Rows of a tile: queries, or keys in `backward_columns`. A program accumulates their results."""
    tile: int
    """Columns of a tile: keys, or queries in `backward_columns`. A program loads one tile after the other."""
    warps: int
    """Of a program."""
    stages: int
    """Tiles that are loaded at a time, the current one included."""


class TileKey(NamedTuple):
    """What a tile is for."""

    kernel: str
    operands: Operands
    width: int
    """Of a head, rounded up to a power of 2."""


class DeviceProfile(NamedTuple):
    """What tiles depend on."""

    name: str
    architecture: int
    """10 times the compute capability, as in sm_90. 0 for other devices than NVIDIA's."""


INTERPRETER = DeviceProfile("Triton's interpreter", 90)

_TENSOR_CORES = (80, 90, 100)
"""Architectures with a table of their own. Others have less shared memory and use `_SMALL`."""


def _small(key: TileKey) -> Tile:
    """Return a tile for CUDA cores, or for any GPU: it fits into 64 KiB of shared memory."""
    half = key.operands == "16-bit"
    block = 32 if key.width <= (128 if half else 64) else 16
    if key.kernel == ("backward_columns" if half else "forward"):
        return Tile(block, block, 4, 1)
    return Tile(block, block, 8, 1 if key.kernel == "backward_columns" and key.width <= 32 else 2)


def table_tile(key: TileKey, architecture: int) -> Tile:
    """Return the tile of the table. Tensor cores take tiles of 64 rows; IEEE products of fp32 run on CUDA cores."""
    if key.operands != "16-bit" or architecture not in _TENSOR_CORES:
        return _small(key)
    tile = 64 if key.width <= 64 and architecture >= 90 else 32  # wide rows leave fewer registers for the scores
    if key.kernel == "forward":
        return Tile(64, tile, 4 if key.width <= 64 or (key.width == 128 and architecture == 100) else 8, 2)
    return Tile(64, tile, 8, 1 if key.kernel == "backward_rows" else 2)


def device_profile(device: torch.device) -> DeviceProfile:
    """Return the profile of a device; on a CPU that of Triton's interpreter, which uses the table of Hopper."""
    if device.type == "cpu":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    is_nvidia = torch.version.hip is None
    return DeviceProfile(torch.cuda.get_device_name(device), 10 * major + minor if is_nvidia else 0)


@lru_cache
def select_tile(key: TileKey, device: torch.device) -> Tile:
    """Return the tile for a device: tuned, else of the table."""
    profile = device_profile(device)
    tuned = {} if profile == INTERPRETER else _tuned_tiles(profile)
    return tuned.get(key) or table_tile(key, profile.architecture)


@lru_cache
def _tuned_tiles(profile: DeviceProfile) -> dict[TileKey, Tile]:
    path = tiles_path(profile)
    found = read_tiles(path, profile)
    if isinstance(found, str):
        warning_once(f"attention: tiles of the built-in table, because {path} is not used: {found}; {_REMEDY}")
        return {}
    if found:
        info_once(f"attention: tiles of {path}")
    return found


def candidates(key: TileKey) -> list[Tile]:
    """Return the tiles that tuning measures. Some may not fit on a device."""
    shapes = _SHAPES[:4] if key.operands == "fp32" else _SHAPES[1:]
    stages = (1,) if key.kernel == "backward_rows" else _STAGES  # its loop has loops inside and is not pipelined
    return [Tile(*shape, warps, depth) for shape in shapes for warps in _WARPS for depth in stages]


def fastest_tile(seconds: Mapping[Tile, float], default: Tile) -> Tile:
    """Return the fastest tile; `default` unless another one is clearly faster."""
    best = min(seconds, key=lambda tile: (seconds[tile], tile))
    known = seconds.get(default)
    return best if known is None or seconds[best] < (1 - _MIN_GAIN) * known else default


def tiles_path(profile: DeviceProfile) -> Path:
    """Return the file with the tuned tiles of a device."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9]+", "-", profile.name).strip("-").lower()
    return folder / "freescale" / f"attention-{name}.json"


def write_tiles(path: Path, profile: DeviceProfile, tiles: Mapping[TileKey, Tile]) -> None:
    """Store tuned tiles. Those of other keys stay, unless the file is refused."""
    known = read_tiles(path, profile)
    merged = {**({} if isinstance(known, str) else known), **tiles}
    entries = [{**key._asdict(), **tile._asdict()} for key, tile in sorted(merged.items())]
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}.tmp")
        written.write_text(json.dumps({**_stamp(profile), "tiles": entries}, indent=1) + "\n")
        written.replace(path)
    select_tile.cache_clear()
    _tuned_tiles.cache_clear()


def read_tiles(path: Path, profile: DeviceProfile) -> dict[TileKey, Tile] | str:
    """Return the tuned tiles of a file, none if there is no file, or why it is refused."""
    try:
        content = json.loads(path.read_text())
        stamp = {name: content[name] for name in _stamp(profile)}
        entries = [
            (TileKey(*(entry[name] for name in TileKey._fields)), Tile(*(entry[name] for name in Tile._fields)))
            for entry in content["tiles"]
        ]
    except FileNotFoundError:
        return {}
    except OSError as error:
        return f"it cannot be read: {error}"
    except (ValueError, KeyError, TypeError):
        return "it is damaged"
    wrong = [name for name, value in _stamp(profile).items() if stamp[name] != value]
    if wrong:
        return "it was measured with another " + " and another ".join(wrong)
    return dict(entries) if all(_is_valid(*entry) for entry in entries) else "it is damaged"


def _is_valid(key: TileKey, tile: Tile) -> bool:
    known_key = key.kernel in KERNELS and key.operands in get_args(Operands) and key.width in WIDTHS
    return known_key and tile[:2] in _SHAPES and tile.warps in _WARPS and tile.stages in _STAGES


def _stamp(profile: DeviceProfile) -> dict[str, object]:
    """Return what must be equal for tiles to be valid."""
    return {
        "format": _FORMAT,
        "device": profile.name,
        "architecture": profile.architecture,
        "version of triton": triton.__version__,
        "version of the kernels": _kernels_version(),
    }


@lru_cache
def _kernels_version() -> str:
    source = Path(__file__).with_name("triton_kernels.py").read_bytes()
    return hashlib.sha256(source).hexdigest()[:16]
