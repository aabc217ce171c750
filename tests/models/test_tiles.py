"""Tiles of the attention kernels: the table, and tuned tiles in a file that fits one device and one version."""

import json
import logging
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch

from freescale.errors import StorageError
from freescale.models.attention import tiles
from freescale.models.attention.tiles import KERNELS, WIDTHS, DeviceProfile, Operands, Tile, TileKey
from freescale.models.attention.triton_launch import KernelConfig

H100 = DeviceProfile("NVIDIA H100 80GB HBM3", 90)
KEY = TileKey("forward", "16-bit", 64)
TUNED = {KEY: Tile(128, 64, 8, 2)}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tiles.tiles_path(H100)


def test_16_bit_operands_get_tiles_of_tensor_cores_and_exact_fp32_does_not() -> None:
    for kernel, width, architecture in product(KERNELS, WIDTHS, (80, 90, 100)):
        tile = tiles.table_tile(TileKey(kernel, "16-bit", width), architecture)
        assert tile.block >= 64, "a warp group multiplies 64 rows"
        assert tile.warps >= 4
        assert tile.block % tile.tile == 0
        assert tiles.table_tile(TileKey(kernel, "fp32", width), architecture).block <= 32


@pytest.fixture
def _torch_setting() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("_torch_setting")
def test_fp32_stays_ieee_unless_tf32_is_allowed() -> None:
    def precision(dtype: torch.dtype, *, allowed: bool) -> tuple[str, str]:
        torch.backends.cuda.matmul.allow_tf32 = allowed
        config = KernelConfig.for_queries("forward", torch.empty(1, 1, 64, dtype=dtype))
        return config.operands, config.constants["PRECISION"]

    assert precision(torch.float32, allowed=False) == ("fp32", "ieee")
    assert precision(torch.float32, allowed=True) == ("tf32", "tf32")
    assert precision(torch.bfloat16, allowed=True) == precision(torch.float16, allowed=False) == ("16-bit", "ieee")


def test_unknown_architectures_get_small_tiles() -> None:
    for kernel, operands, width in product(KERNELS, get_args(Operands), WIDTHS):
        assert tiles.table_tile(TileKey(kernel, operands, width), 120).block <= 32


def test_the_fastest_tile_is_chosen_unless_the_table_is_as_fast() -> None:
    default, other, third = Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(128, 64, 8, 2)
    assert tiles.fastest_tile({default: 1.0, other: 0.9, third: 0.8}, default) == third
    assert tiles.fastest_tile({default: 1.0, other: 0.99, third: 1.2}, default) == default
    assert tiles.fastest_tile({default: float("inf"), other: 0.9, third: float("inf")}, default) == other


def test_candidates_include_the_sizes_of_tensor_cores_and_no_tile_twice() -> None:
    for kernel, operands, width in product(KERNELS, get_args(Operands), WIDTHS):
        found = tiles.candidates(TileKey(kernel, operands, width))
        assert len(set(found)) == len(found)
        assert {64, 32} <= {tile.block for tile in found}
        assert (128 in {tile.block for tile in found}) == (operands != "fp32")


def test_tuned_tiles_are_stored_by_device_and_replace_the_table(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "device_profile", lambda _: H100)
    device = torch.device("cuda", 0)
    tiles.write_tiles(path, H100, {})
    assert tiles.select_tile(KEY, device) == tiles.table_tile(KEY, 90) != TUNED[KEY]
    tiles.write_tiles(path, H100, TUNED)
    assert tiles.select_tile(KEY, device) == TUNED[KEY]
    assert path != tiles.tiles_path(DeviceProfile("NVIDIA A100-SXM4-80GB", 80))
    tiles.select_tile.cache_clear()


def test_tuning_another_width_keeps_what_was_stored(path: Path) -> None:
    other = {KEY._replace(width=128): Tile(64, 32, 4, 2)}
    tiles.write_tiles(path, H100, TUNED)
    tiles.write_tiles(path, H100, other)
    assert tiles.read_tiles(path, H100) == {**TUNED, **other}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("name", ["format", "device", "architecture", "version of triton", "version of the kernels"])
def test_a_file_of_another_device_or_version_is_refused_and_replaced(path: Path, name: str) -> None:
    tiles.write_tiles(path, H100, TUNED)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, name: "another"}))
    assert tiles.read_tiles(path, H100) == f"it was measured with another {name}"
    other = {KEY._replace(width=128): Tile(64, 32, 4, 2)}
    tiles.write_tiles(path, H100, other)
    assert tiles.read_tiles(path, H100) == other


@pytest.mark.parametrize(
    "damage",
    ["", "[]", "{}", '{"tiles": 3}', "width: 63", "block: 65", "kernel: join", "operands: fp8", "tile: 128"],
)
def test_a_damaged_file_is_refused(path: Path, damage: str) -> None:
    tiles.write_tiles(path, H100, TUNED)
    if ": " in damage and not damage.startswith("{"):
        name, _, value = damage.partition(": ")
        content = json.loads(path.read_text())
        content["tiles"][0][name] = int(value) if value.isdigit() else value
        content["tiles"][0].update({"block": 64} if name == "tile" else {})
        damage = json.dumps(content)
    path.write_text(damage)
    assert tiles.read_tiles(path, H100) == "it is damaged"


def test_a_refused_file_is_logged_with_the_reason_and_the_table_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiles, "device_profile", lambda _: H100)
    tiles.write_tiles(path, H100, TUNED)
    path.write_text("{")
    with caplog.at_level(logging.WARNING, "freescale"):
        assert tiles.select_tile(KEY, torch.device("cuda", 0)) == tiles.table_tile(KEY, 90)
    tiles.select_tile.cache_clear()
    assert "it is damaged" in caplog.text
    assert "--tune" in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_with_its_path(path: Path) -> None:
    path.parent.parent.mkdir(exist_ok=True)
    path.parent.write_text("a file in the place of the folder")
    with pytest.raises(StorageError, match=path.name):
        tiles.write_tiles(path, H100, TUNED)
