"""This version reads checkpoints of older versions, on any world size.

`format-1` was written by two ranks of version 0.1 after four steps: `python -m tests.checkpoint.test_format`, once. It
is never written again; a new format gets a folder of its own.
"""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from freescale import log
from freescale.checkpoint.run_folder import checkpoint_path
from freescale.train.build import build
from tests.support.datasets import histories, write_dataset
from tests.support.in_process import ListHandler
from tests.support.ranks import Ranks, World
from tests.support.training import Arrays, held, joined, small, whole

KEPT = Path(__file__).resolve().parent / "format-1"
LENGTHS = [3, 9, 1, 20, 4, 4, 7, 30, 2, 5, 6, 11] * 4
ABSOLUTE_SUMS = {"dense": 141.90757751464844, "tables": 461.92010498046875}


def config(folder: Path) -> object:
    write_dataset(folder, histories(LENGTHS, items=40), rows_per_group=4, items=40)
    model, train = {"layers": 1, "heads": 1}, {"precision": "fp32", "max_steps": 4, "save_every": 4}
    return small(folder, model=model, train=train, data={"oov_rows": 4})


def written(world: World, run: object, folder: str) -> None:
    trainer = build(run, joined(world), Path(folder))  # type: ignore[arg-type]
    trainer.fit()
    trainer.close()


def resumed(world: World, run: object, folder: str) -> tuple[int, Arrays, list[str]]:
    """Steps done, what this rank holds, and what it logged."""
    trainer = build(run, joined(world), Path(folder))  # type: ignore[arg-type]
    log._logged.clear()  # a rank logs the same text once
    with log.handled_by(handler := ListHandler()):
        trainer.checkpoints.resume()
    return trainer.progress.done, held(trainer), handler.messages


def absolute_sums(arrays: Arrays) -> dict[str, float]:
    kinds = {"dense": [n for n in arrays if n.startswith("dense.")], "tables": [n for n in arrays if "dense." not in n]}
    return {kind: float(sum(np.abs(arrays[name]).sum() for name in names)) for kind, names in kinds.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_format_1_can_be_read(groups: dict[int, Ranks], tmp_path: Path, ranks: int) -> None:
    shutil.copytree(KEPT, checkpoint_path(tmp_path / "run" / "checkpoints", 4))
    found = groups[ranks].run(resumed, config(tmp_path / "data"), str(tmp_path / "run"))
    assert {done for done, _, _ in found} == {4}
    assert absolute_sums(whole([arrays for _, arrays, _ in found])) == pytest.approx(ABSOLUTE_SUMS, rel=1e-6)
    anew = f"resumed on {ranks} ranks a checkpoint of 2: torch's random generators start anew"
    assert [anew in logged for _, _, logged in found] == [ranks != 2] * ranks


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        two = Ranks(2)
        two.run(written, config(Path("data")), "run")
        shutil.copytree(checkpoint_path(Path("run/checkpoints"), 4), KEPT)
        sums = absolute_sums(whole([arrays for _, arrays, _ in two.run(resumed, config(Path("data")), "run")]))
        two.close()
    raise SystemExit(f"ABSOLUTE_SUMS = {sums}")
