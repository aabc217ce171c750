"""Checkpoints go to torch.distributed.checkpoint and TorchRec and back, and every bit stays what it was."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder

from freescale.checkpoint import checkpoints
from freescale.checkpoint.checkpoints import CheckpointWriter
from freescale.checkpoint.conversion import TrainedCheckpoint, convert
from freescale.checkpoint.dcp_folder import DcpFolder
from freescale.cli.main import main
from freescale.config import RunConfig, TablesConfig, save
from freescale.embedding.ids import UniqueIds
from freescale.embedding.row_order import Owners
from freescale.embedding.sharded import ShardedTables, shard_tables
from freescale.embedding.tables import Table
from freescale.errors import DataError, FreeScaleError, UsageError
from freescale.integrations.zero_collision import ZeroCollisionTable
from freescale.transport.world import new_group
from tests.exact.test_dynamic_ids import dynamic, write_drifting
from tests.exact.test_resume import pieces, train
from tests.support.ranks import Ranks, World
from tests.support.torchrec_model import ITEMS, SHOPS, USERS, batches, sharded
from tests.support.training import Arrays, joined, same, small, whole

TABLES = {"item": (ITEMS, 16), "user": (USERS, 16), "shop": (SHOPS, 4)}
RENAMES = ("model.=model.over.",)


def everything(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint of either format, whole."""
    checkpoint = DcpFolder(path) if (path / ".metadata").exists() else TrainedCheckpoint(path)
    return checkpoint.read_rows({n: range((t.size or (1,))[0]) for n, t in checkpoint.tensors.items()})


def bitwise(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def torchrec_model(world: World, *, trained: bool) -> tuple[Any, torch.optim.Optimizer]:
    """A model of TorchRec with state in both optimizers."""
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    model = sharded(world, EmbeddingCollectionSharder(fused_params=fused))
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if "embeddings" not in name])
    for batch in batches(world, 1 if trained else 2, 4 if trained else 1, 0.3):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return model, optimizer


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tables = model.fused_optimizer.state_dict()
    return {"model": model.state_dict(), "tables": tables, "dense": optimizer.state_dict(), "step": 4}


def save_torchrec(world: World, folder: str) -> None:
    dcp.save(state_of(*torchrec_model(world, trained=True)), checkpoint_id=folder)


def load_torchrec(world: World, folder: str, again: str) -> int:
    """Load into another training of the same model, and save what was loaded; gives the step."""
    model, optimizer = torchrec_model(world, trained=False)
    state = state_of(model, optimizer) | {"step": 0}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["tables"])
    optimizer.load_state_dict(state["dense"])
    dcp.save(state_of(model, optimizer), checkpoint_id=again)
    return int(state["step"])


def our_model(world: World, owners: Owners) -> tuple[nn.Module, ShardedTables]:
    """The dense part and the tables of the same model, as FreeScale shards them."""
    tables = [Table(name, *size, owners=owners) for name, size in TABLES.items()]
    config = RunConfig(tables=TablesConfig(owners=owners))
    here = joined(world)
    dense = nn.Sequential(nn.Linear(3 * 16 + 4, 16), nn.Tanh(), nn.Linear(16, 1))
    return dense, shard_tables(tables, config, here, here.transport, torch.float32)


def save_ours(world: World, folder: str, owners: Owners, loaded_from: str = "") -> dict[str, Tensor]:
    """Save the model, new or after loading a checkpoint; gives the rows of all ids, as ranks exchange them."""
    dense, tables = our_model(world, owners)
    tensors = checkpoints.model_tensors(dense, tables, rank=world.rank, world_size=world.ranks)
    if loaded_from:
        checkpoints.load(Path(loaded_from), tensors, tables)
    writer = CheckpointWriter(Path(folder) / "checkpoints", keep=1, transport=new_group(timeout=60))
    writer.save(7, tensors, {})
    writer.close()
    ids = {name: torch.arange(rows) for name, (rows, _) in TABLES.items()}
    return tables.read({name: UniqueIds(all_ids, all_ids) for name, all_ids in ids.items()})


@pytest.mark.parametrize(("ranks", "owners"), [(1, "zigzag"), (2, "block"), (4, "zigzag")])
def test_torchrec_to_ours_to_torchrec_is_bit_for_bit(
    groups: dict[int, Ranks], tmp_path: Path, ranks: int, owners: Owners
) -> None:
    theirs, example, ours, again, back = (tmp_path / n for n in ("theirs", "example", "ours", "again", "back"))
    groups[ranks].run(save_torchrec, str(theirs))
    groups[ranks].run(save_ours, str(example), owners)
    summary = convert(theirs, ours, like=example, renames=RENAMES)
    assert summary.kept == []
    assert sorted(name for name in summary.converted if name.startswith("tables.")) == sorted(
        f"tables.{name}{kind}" for name in TABLES for kind in ("", ".sum")
    )
    before = everything(theirs)
    for read in groups[ranks].run(save_ours, str(again), owners, str(ours / "checkpoints" / "step-00000007")):
        for name, rows in read.items():
            collection = "narrow" if name == "shop" else "wide"
            assert torch.equal(rows, before[f"model.{collection}.embeddings.{name}.weight"])
    convert(again, back, like=theirs, renames=RENAMES)
    assert bitwise(everything(back), before)
    for step in groups[ranks].run(load_torchrec, str(back), str(tmp_path / "loaded")):
        assert step == 4
    assert bitwise(everything(tmp_path / "loaded"), before)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dcp_to_ours_to_dcp_is_bit_for_bit(groups: dict[int, Ranks], tmp_path: Path, ranks: int) -> None:
    groups[ranks].run(save_torchrec, str(tmp_path / "theirs"))
    assert main(["checkpoint", "convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    theirs, back = (DcpFolder(tmp_path / name) for name in ("theirs", "back"))
    assert (theirs.tensors, theirs.paths) == (back.tensors, back.paths)
    assert bitwise(everything(theirs.folder), everything(back.folder))
    for name in theirs.objects:
        assert theirs.read_object(name) == back.read_object(name), name
    assert groups[ranks].run(load_torchrec, str(tmp_path / "back"), str(tmp_path / "loaded")) == [4] * ranks
    assert bitwise(everything(tmp_path / "loaded"), everything(theirs.folder))


def of_all_kinds() -> dict[str, Any]:
    kinds = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8)
    tensors = {str(kind): torch.arange(6).view(3, 2).to(kind) for kind in (*kinds, torch.uint8, torch.bool)}
    odd = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "view": torch.arange(9.0).view(3, 3).T,
        "none": None,
    }
    return {"kinds": tensors, "odd": odd, "list": [torch.ones(2), {"x": 1}], "text": "as it is"}


def save_grid(world: World, folder: str) -> None:
    """A matrix in columns, one in rows and columns, and values of every kind."""
    flat, grid = init_device_mesh("cpu", (world.ranks,)), init_device_mesh("cpu", (2, world.ranks // 2))
    matrix = torch.arange(35.0).view(5, 7)
    parts = {"columns": distribute_tensor(matrix, flat, [Shard(1)])}
    parts["grid"] = distribute_tensor(matrix + 1, grid, [Shard(0), Shard(1)])
    dcp.save({**of_all_kinds(), **parts}, checkpoint_id=folder)


def test_every_kind_of_value_and_of_sharding_goes_through(groups: dict[int, Ranks], tmp_path: Path) -> None:
    groups[4].run(save_grid, str(tmp_path / "theirs"))
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    matrix = torch.arange(35.0).view(5, 7)
    expected: dict[str, Any] = {**of_all_kinds(), "columns": matrix, "grid": matrix + 1}
    read: dict[str, Any] = {**of_all_kinds(), "columns": torch.zeros(5, 7), "grid": torch.zeros(5, 7), "text": ""}
    for tensor in [*read["kinds"].values(), read["odd"]["scalar"], read["odd"]["view"], read["list"][0]]:
        tensor.zero_()
    dcp.load(read, checkpoint_id=tmp_path / "back", no_dist=True)
    for name, value in expected["kinds"].items():
        assert torch.equal(read["kinds"][name], value), name
    assert torch.equal(read["odd"]["scalar"], expected["odd"]["scalar"])
    assert torch.equal(read["odd"]["view"], expected["odd"]["view"])
    assert read["odd"]["empty"].shape == (0, 3)
    assert torch.equal(read["list"][0], torch.ones(2))
    assert (read["text"], read["list"][1], read["odd"]["none"]) == ("as it is", {"x": 1}, None)
    assert torch.equal(read["columns"], matrix)
    assert torch.equal(read["grid"], matrix + 1)


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drifting(tmp_path_factory.mktemp("drifting") / "data")


@pytest.mark.parametrize("owners", ["zigzag", pytest.param("block", marks=pytest.mark.whole)])
def test_a_training_resumes_bitwise_from_what_came_back_from_dcp(
    groups: dict[int, Ranks], drifting: Path, tmp_path: Path, owners: Owners
) -> None:
    config = dynamic(drifting, train={"precision": "fp32"}, tables={"owners": owners})
    whole_run = pieces([groups[2]], config, tmp_path / "whole", [])
    groups[2].run(train, config, str(tmp_path / "run"), False, 9)
    save(config, tmp_path / "run" / "config.toml")
    convert(tmp_path / "run", tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "back")
    assert (tmp_path / "back" / "config.toml").read_text() == (tmp_path / "run" / "config.toml").read_text()
    assert bitwise(everything(tmp_path / "run"), everything(tmp_path / "back"))
    assert TrainedCheckpoint(tmp_path / "run").facts == TrainedCheckpoint(tmp_path / "back").facts
    resumed: list[Arrays] = groups[2].run(train, config, str(tmp_path / "back"), True, 0)
    assert same(whole(resumed), whole_run)


def test_dynamic_tables_go_to_a_model_with_a_zero_collision_table_and_back(
    groups: dict[int, Ranks], drifting: Path, tmp_path: Path
) -> None:
    config = dynamic(drifting, eviction="lfu", admit_after=2, train={"precision": "fp32"})
    groups[2].run(train, config, str(tmp_path / "run"), False, 5)
    table = ZeroCollisionTable(128, eviction="lfu", admit_after=2)
    key = "rec.embeddings.artist.weight"
    state = {"rec": {"slots": table.state_dict()}, "rows": torch.zeros(table.rows, 8), "sums": torch.zeros(table.rows)}
    dcp.save({"rec": state["rec"], key: state["rows"], f"{key}.artist.momentum1": state["sums"]},
             checkpoint_id=tmp_path / "example", no_dist=True)  # fmt: skip
    renames = ("tables.artist.=rec.slots.",)
    summary = convert(tmp_path / "run", tmp_path / "theirs", like=tmp_path / "example", renames=renames)
    assert summary.kept == ["rec.slots._extra_state"]
    dcp.load({"rec": {"slots": (loaded := table.state_dict())}}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    table.load_state_dict(loaded)
    table.set_extra_state(torch.tensor(5))
    before = everything(tmp_path / "run")
    ids = before["tables.artist.ids"]
    (used,) = (ids != -1).nonzero(as_tuple=True)
    table.eval()
    assert torch.equal(table(ids[used]), used)
    assert torch.equal(everything(tmp_path / "theirs")[key], before["tables.artist"])
    back = convert(tmp_path / "theirs", tmp_path / "back", like=tmp_path / "run", renames=renames)
    assert len([name for name in back.converted if name.startswith("tables.artist")]) == 10
    assert bitwise(everything(tmp_path / "back"), before)


def test_tables_are_never_converted_in_part_or_to_another_size(tmp_path: Path, log: Path, groups: Any) -> None:
    config = small(log, train={"precision": "fp32", "max_steps": 2})
    groups[2].run(train, config, str(tmp_path / "run"), False, 0)
    key, rows = "m.embeddings.item.weight", everything(tmp_path / "run")["tables.item"]
    attempts = {
        "converted in part": {key: rows},
        "int64": {key: rows.long(), f"{key}.item.momentum1": rows[:, 0]},
        "of the example is": {key: rows[1:], f"{key}.item.momentum1": rows[1:, 0]},
        "would both become": {key: rows, "n.embedding_bags.item.weight": rows},
        "no tensor of the source has a place": {"other": rows},
    }
    for number, (said, state) in enumerate(attempts.items()):
        dcp.save(state, checkpoint_id=tmp_path / f"{number}", no_dist=True)
        with pytest.raises(UsageError, match=said):
            convert(tmp_path / f"{number}", tmp_path / "out", like=tmp_path / "run")
    with pytest.raises(UsageError, match="exists already"):
        convert(tmp_path / "0", tmp_path / "1")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*partial*"))


def test_a_damaged_folder_is_an_error_and_never_other_values(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(600.0).view(20, 30), "b": {"c": 3}}, checkpoint_id=tmp_path / "good", no_dist=True)
    good, generator = everything(tmp_path / "good"), torch.Generator().manual_seed(0)
    outcomes = set()
    for attempt in range(400):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        path = tmp_path / "bad" / (".metadata" if attempt % 2 else "__0_0.distcp")
        raw = bytearray(path.read_bytes())
        at, value = torch.randint(len(raw), (1,), generator=generator), torch.randint(1, 256, (1,), generator=generator)
        raw[int(at)] ^= int(value)
        path.write_bytes(raw if attempt % 20 else raw[: int(at)])
        try:
            found = everything(tmp_path / "bad")
            assert "a" not in found or torch.equal(found["a"], good["a"])
            outcomes.add("harmless")
        except DataError:
            outcomes.add("refused")
        except FreeScaleError as error:
            raise AssertionError(error) from error
    assert outcomes == {"harmless", "refused"}


def test_a_chunk_outside_of_its_tensor_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(600.0).view(20, 30)}, checkpoint_id=tmp_path / "bad", no_dist=True)
    path = tmp_path / "bad" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size([20, 150])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match="a chunk of 'a' is outside of it"):
        everything(tmp_path / "bad")
