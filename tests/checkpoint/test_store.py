"""Promise: a checkpoint is complete or not there, and what it holds is the moment at which it was asked for."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from freescale.checkpoint import export, store
from freescale.errors import DataError, FreeScaleError
from tests.ranks import RankError, Ranks, World


def saved(world: World, folder: str, steps: int, keep: int) -> list[str]:
    """Save several steps, changing the tensor right after each save returns."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    place = store.Store(Path(folder), keep=keep, rank=world.rank, group=group)
    weight = torch.zeros(200_000)
    for step in range(1, steps + 1):
        weight += 1.0
        place.save(step, {"weight": weight}, {"step": step, "ranks": world.ranks})
        weight += 0.5  # training goes on while the file is written
        weight -= 0.5
        weight.mul_(-1.0).mul_(-1.0)
        weight[:] = weight.sign() * step
    place.close()
    return [path.name for path in store.complete(Path(folder))]


def loaded(_world: World, path: str) -> list[float]:
    weight = torch.full((200_000,), -7.0)
    store.load(Path(path), {"weight": weight})
    return [float(weight.min()), float(weight.max())]


def test_the_newest_few_are_kept_and_hold_what_was_there_when_asked(groups: dict[int, Ranks], tmp_path: Path) -> None:
    groups[2].run(saved, str(tmp_path), 4, 2)
    assert [path.name for path in store.complete(tmp_path)] == ["step-00000003", "step-00000004"]
    for path, value in zip(store.complete(tmp_path), (3.0, 4.0), strict=True):
        assert groups[2].run(loaded, str(path)) == [[value, value]] * 2


def test_what_was_never_finished_is_ignored_and_cleared_away(groups: dict[int, Ranks], tmp_path: Path) -> None:
    groups[2].run(saved, str(tmp_path), 1, 5)
    unfinished = tmp_path / "step-00000009.writing"
    unfinished.mkdir()
    (unfinished / "facts.json").write_text("{}")
    (tmp_path / "step-00000008").mkdir()  # renamed by hand, without its facts
    assert [path.name for path in store.complete(tmp_path)] == ["step-00000001"]
    groups[2].run(saved, str(tmp_path), 2, 5)
    assert not unfinished.exists()


def test_a_damaged_or_foreign_checkpoint_is_refused_with_the_remedy(groups: dict[int, Ranks], tmp_path: Path) -> None:
    groups[1].run(saved, str(tmp_path), 1, 5)
    (path,) = store.complete(tmp_path)
    (data,) = path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(RankError, match=r"does not fit this run or is damaged(.|\n)*remedy"):
        groups[1].run(loaded, str(path))
    (path / "facts.json").write_text("{")
    with pytest.raises(FreeScaleError, match="cannot be read"):
        store.read_facts(path)


def test_an_export_is_read_back_whole_and_a_changed_byte_is_seen(tmp_path: Path) -> None:
    whole = torch.randn(7, 3)
    files = {"model.safetensors": export.write_tensors(tmp_path / "model.safetensors", {"bias": torch.ones(2)})}
    for rank, rows in ((1, slice(4, 7)), (0, slice(0, 4))):
        name = f"tables-{rank}.safetensors"
        files[name] = export.write_tensors(tmp_path / name, {"tables.item": whole[rows]}, {"tables.item": rows.start})
    export.write_list(tmp_path, files, {})
    read = export.read(tmp_path)
    assert torch.equal(read["tables.item"], whole)
    assert torch.equal(read["bias"], torch.ones(2))
    assert set(json.loads((tmp_path / export.LIST).read_text())["files"]) == set(files)
    content = bytearray((tmp_path / "tables-0.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "tables-0.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"tables-0.safetensors is missing or was changed"):
        export.read(tmp_path)
