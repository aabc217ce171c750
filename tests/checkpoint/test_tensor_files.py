"""Any world size reads what any other wrote; changed files are refused; reading executes no code."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freescale.checkpoint import checkpoints, tensor_files
from freescale.checkpoint.tensor_files import CheckpointError, DamagedError, LocalRows
from freescale.embedding.row_order import Owners, RowOrder
from freescale.errors import ConfigError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def dealt(whole: torch.Tensor, rank: int, ranks: int, owners: Owners = "block") -> LocalRows:
    """The rows of a rank, as tables are dealt: the last ranks may have none. Positions without a row are 0."""
    order = RowOrder.of(len(whole), owners)
    block = -(-order.positions // ranks)
    first = min(rank * block, order.positions)
    at = torch.from_numpy(order.rows_at(np.arange(first, min(first + block, order.positions))))
    padded = torch.cat([whole, torch.zeros_like(whole[:1]) if len(whole) else whole])
    return LocalRows(padded[at], first, order)


def written(folder: Path, tensors: dict[str, torch.Tensor], ranks: int, owners: Owners = "block") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        tensor_files.write(folder, rank, {name: dealt(whole, rank, ranks, owners) for name, whole in tensors.items()})
    tensor_files.write_json(folder / "facts.json", {"format": 1, "step": 7, "ranks": ranks})


@settings(max_examples=60)
@given(
    rows=st.integers(0, 50),
    width=st.sampled_from([(), (3,), (2, 5)]),
    dtype=st.sampled_from(DTYPES),
    wrote=st.integers(1, 9),
    reads=st.integers(1, 9),
    piece=st.integers(1, 300),
    owners=st.tuples(*[st.sampled_from(["block", "zigzag"])] * 2),
)
def test_any_world_size_and_order_of_rows_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    width: tuple[int, ...],
    dtype: torch.dtype,
    wrote: int,
    reads: int,
    piece: int,
    owners: tuple[Owners, Owners],
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    whole = (torch.randn(rows, *width, dtype=torch.float64) * 50).to(dtype)
    before, tensor_files._CHUNK_BYTES = tensor_files._CHUNK_BYTES, piece
    try:
        written(folder, {"table": whole}, wrote, owners[0])
    finally:
        tensor_files._CHUNK_BYTES = before
    for rank in range(reads):
        part, expected = (dealt(values, rank, reads, owners[1]) for values in (torch.zeros_like(whole), whole))
        checkpoints.load(folder, {"table": part})
        assert torch.equal(part.local, expected.local)


def test_scalars_and_empty_tensors_are_restored(tmp_path: Path) -> None:
    kept = {"step": torch.tensor(41.0), "none": torch.empty(0, 4)}
    tensor_files.write(tmp_path, 0, {name: LocalRows.whole(value, replicated=True) for name, value in kept.items()})
    found = {name: LocalRows.whole(torch.zeros_like(value), replicated=True) for name, value in kept.items()}
    tensor_files.read(tmp_path, 1, found)
    assert found["step"].local == 41.0


def saved(folder: Path) -> dict[str, LocalRows]:
    """A checkpoint of two ranks, and tensors to read it into."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"table": torch.randn(9, 4, generator=generator), "sum": torch.randn(9, generator=generator)}
    written(folder, tensors, 2)
    return {name: dealt(torch.zeros_like(whole), 0, 1) for name, whole in tensors.items()}


def test_every_flipped_bit_is_detected(tmp_path: Path, whole_form: bool) -> None:
    parts = saved(tmp_path / "whole")
    random, bits = np.random.default_rng(0), 150 if whole_form else 40
    for name in sorted(path.name for path in (tmp_path / "whole").iterdir()):
        content = (tmp_path / "whole" / name).read_bytes()
        for bit in random.choice(len(content) * 8, min(bits, len(content) * 8), replace=False).tolist():
            changed = tmp_path / "changed"
            shutil.copytree(tmp_path / "whole", changed, dirs_exist_ok=True)
            broken = bytearray(content)
            broken[bit // 8] ^= 1 << bit % 8
            (changed / name).write_bytes(broken)
            with pytest.raises(CheckpointError):
                checkpoints.load(changed, parts)
    checkpoints.load(tmp_path / "whole", parts)


def test_every_truncated_or_missing_file_is_detected(tmp_path: Path) -> None:
    parts = saved(tmp_path)
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        for length in (0, 1, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(DamagedError):
                checkpoints.load(tmp_path, parts)
        path.unlink()
        with pytest.raises(DamagedError):
            checkpoints.load(tmp_path, parts)
        path.write_bytes(content)
    checkpoints.load(tmp_path, parts)


def test_a_mismatch_is_distinguished_from_damage(tmp_path: Path) -> None:
    saved(tmp_path)
    for name, other, said in (
        ("table", torch.zeros(9, 5), r"'table' is float32\[9, 4\], where this run has float32\[9, 5\]"),
        ("table", torch.zeros(10, 4), r"float32\[10, 4\]"),
        ("table", torch.zeros(9, 4, dtype=torch.float64), r"float64\[9, 4\]"),
        ("bias", torch.zeros(3), r"3 of 3 rows of 'bias' are missing"),
    ):
        with pytest.raises(CheckpointError, match=said) as raised:
            checkpoints.load(tmp_path, {name: LocalRows.whole(other, replicated=True)})
        assert not isinstance(raised.value, DamagedError)
        assert raised.value.exit_code == ConfigError.exit_code, "no restart would help"
    tensor_files.write_json(tmp_path / "facts.json", {"format": 2, "step": 7, "ranks": 2})
    with pytest.raises(CheckpointError, match="install the version that wrote it"):
        checkpoints.read_facts(tmp_path)


def test_rows_that_two_ranks_wrote_are_refused(tmp_path: Path) -> None:
    parts = saved(tmp_path)
    for rank in range(2):
        tensor_files.write(tmp_path, rank, {"table": LocalRows(torch.ones(6, 4), 3 * rank, RowOrder(9, 1))})
    with pytest.raises(CheckpointError, match="3 of 9 rows of 'table' are there twice"):
        checkpoints.load(tmp_path, {"table": parts["table"]})


class Planted:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_planted_pickle_is_never_executed(tmp_path: Path) -> None:
    parts, mark = saved(tmp_path / "checkpoint"), tmp_path / "mark"
    for path in sorted((tmp_path / "checkpoint").iterdir()):
        content = path.read_bytes()
        path.write_bytes(pickle.dumps(Planted(mark)))
        with pytest.raises(CheckpointError):
            checkpoints.load(tmp_path / "checkpoint", parts)
        torch.save(Planted(mark), path)
        with pytest.raises(CheckpointError):
            checkpoints.load(tmp_path / "checkpoint", parts)
        path.write_bytes(content)
    assert not mark.exists()
