"""A checkpoint is complete or absent, and holds the state of the moment at which it was requested."""

import json
from pathlib import Path

import pytest
import torch

from freescale.checkpoint import checkpoints, export
from freescale.checkpoint.tensor_files import CheckpointError, LocalRows
from freescale.errors import DataError
from freescale.transport.world import new_group
from tests.support.ranks import Ranks, World


def saved(world: World, folder: str, steps: int, keep: int) -> list[str]:
    """Save several steps, changing the tensor right after each save returns."""
    place = checkpoints.CheckpointWriter(Path(folder), keep=keep, transport=new_group(timeout=30))
    weight = torch.zeros(200_000)
    for step in range(1, steps + 1):
        weight += 1.0
        place.wait()
        place.save(step, {"weight": LocalRows.whole(weight, replicated=True)}, {"said": "so"})
        weight += 0.5  # training goes on while the file is written
        weight -= 0.5
        weight.mul_(-1.0).mul_(-1.0)
        weight[:] = weight.sign() * step
    place.close()
    return [path.name for path in checkpoints.complete_checkpoints(Path(folder))]


def loaded(_world: World, path: str) -> list[float]:
    weight = torch.full((200_000,), -7.0)
    facts = checkpoints.load(Path(path), {"weight": LocalRows.whole(weight, replicated=True)})
    assert facts["said"] == "so"
    return [float(weight.min()), float(weight.max())]


def refused(world: World, folder: str) -> list[str]:
    """Rank 1 has no place to write to at step 1, and has one at step 2."""
    link = Path(folder) / f"seen by {world.rank}"
    (Path(folder) / "file").touch()
    (Path(folder) / "folder").mkdir(exist_ok=True)
    place = checkpoints.CheckpointWriter(link, keep=2, transport=new_group(timeout=30))
    weight = {"weight": LocalRows.whole(torch.ones(5), replicated=False)} if world.rank else {}
    said = []
    for step in (1, 2):
        link.unlink(missing_ok=True)
        link.symlink_to("file" if world.rank and step == 1 else "folder")
        place.save(step, weight, {})
        try:
            place.wait()
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    place.close()
    return said


def test_the_newest_checkpoints_are_kept_and_hold_the_state_at_the_request(
    groups: dict[int, Ranks], tmp_path: Path
) -> None:
    groups[2].run(saved, str(tmp_path), 4, 2)
    assert [path.name for path in checkpoints.complete_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    for path, value in zip(checkpoints.complete_checkpoints(tmp_path), (3.0, 4.0), strict=True):
        assert groups[2].run(loaded, str(path)) == [[value, value]] * 2


def test_incomplete_checkpoints_are_ignored_and_removed(groups: dict[int, Ranks], tmp_path: Path) -> None:
    groups[2].run(saved, str(tmp_path), 1, 5)
    unfinished = tmp_path / "step-00000009.writing"
    unfinished.mkdir()
    (unfinished / "facts.json").write_text("{}")
    (tmp_path / "step-00000008").mkdir()  # renamed by hand, without its facts
    assert [path.name for path in checkpoints.complete_checkpoints(tmp_path)] == ["step-00000001"]
    groups[2].run(saved, str(tmp_path), 2, 5)
    assert not unfinished.exists()


def test_a_failed_write_of_one_rank_raises_on_all_and_the_next_save_is_tried(
    groups: dict[int, Ranks], tmp_path: Path
) -> None:
    for first, second in groups[2].run(refused, str(tmp_path)):
        assert "step 1 was not written: the disk refused its part to rank 1" in first
        assert second == ""
    assert [path.name for path in checkpoints.complete_checkpoints(tmp_path / "folder")] == ["step-00000002"]


def test_an_export_is_read_back_and_a_changed_byte_is_detected(tmp_path: Path) -> None:
    whole = torch.randn(7, 3)
    files = {"model.safetensors": export.write_tensors(tmp_path / "model.safetensors", {"bias": torch.ones(2)})}
    for rank, rows in ((1, slice(4, 7)), (0, slice(0, 4))):
        name = f"tables-{rank}.safetensors"
        files[name] = export.write_tensors(tmp_path / name, {"tables.item": whole[rows]}, {"tables.item": rows.start})
    export.write_list(tmp_path, files)
    read = export.read(tmp_path)
    assert torch.equal(read["tables.item"], whole)
    assert torch.equal(read["bias"], torch.ones(2))
    assert set(json.loads((tmp_path / export.LIST).read_text())["files"]) == set(files)
    content = bytearray((tmp_path / "tables-0.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "tables-0.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"tables-0.safetensors is missing or was changed"):
        export.read(tmp_path)
