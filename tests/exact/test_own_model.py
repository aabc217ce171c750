"""Promise: a model of one's own, with several tables of several widths, is trained as exactly as ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from freescale.data.batch import Batch
from freescale.models.protocol import Model, Rows
from tests.ranks import Ranks, World
from tests.training import Arrays, apart, placed, small, whole


@dataclass(frozen=True)
class Pairs:
    """The last item of each user, and how long the history is."""

    ids: dict[str, Tensor]
    target: Tensor

    @property
    def count(self) -> int:
        return len(self.target)


class Length(nn.Module):
    """Learns the length of a history from its user and its last item: two tables, of widths 4 and 8."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {"user": (137, 4), "item": (56, 8)}
        self.mix = nn.Linear(12, 1)

    def prepare(self, batch: Batch) -> Pairs:
        found = batch.history.lengths > 0
        last = batch.history["item_id"][batch.history.offsets[1:][found] - 1]
        return Pairs(
            {"user": batch.scalars["user_id"][found], "item": last}, batch.history.lengths[found].double().log()
        )

    def forward(self, inputs: Pairs, rows: Mapping[str, Rows]) -> Tensor:
        x = torch.cat([rows["user"].each(), rows["item"].each()], dim=1)
        return (self.mix(x)[:, 0] - inputs.target).square().sum()


def own() -> Model:
    torch.manual_seed(0)
    return Length()


def placed_own(world: World, folder: str, path: str, place: str) -> tuple[list[float], Arrays]:
    return placed(world, small(path, train={"micro_batches": 2}), folder, place, 20, model=own())


def test_one_rank_is_many_ranks_for_a_model_of_ones_own(groups: dict[int, Ranks], log: Path, tmp_path: Path) -> None:
    ((losses, alone),) = groups[1].run(placed_own, str(tmp_path), str(log), "equal")
    assert losses[-1] < losses[0]
    for count in (2, 4):
        for place in ("unequal", "last rank empty"):
            results = groups[count].run(placed_own, str(tmp_path), str(log), place)
            assert np.allclose(losses, np.sum([part for part, _ in results], axis=0), rtol=1e-9)
            assert apart(whole([alone]), whole([held for _, held in results])) < 1e-9
