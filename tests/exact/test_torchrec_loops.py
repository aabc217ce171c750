"""The TorchRec loops that we compare with give our training result, but for the order of additions."""

from pathlib import Path

from freescale.bench.step_comparison import PLAIN, SPARSE_DIST, LossDifference, compare_losses
from freescale.config import RunConfig
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small


def losses_compared(world: World, config: RunConfig, folder: str) -> list[LossDifference]:
    return compare_losses(config, joined(world), Path(folder), steps=12)


def test_the_torchrec_loops_give_our_training_result(groups: dict[int, Ranks], log: Path, tmp_path: Path) -> None:
    """Few items: negatives are often right by chance, which a model sees by rows that are the same."""
    found, _ = groups[2].run(losses_compared, small(log), str(tmp_path))
    off = {one.variant: one.largest_relative for one in found if one.precision == "fp32"}
    assert set(off) == {PLAIN, SPARSE_DIST}
    assert max(off.values()) < 1e-5
