"""The plan that is printed before training states what overlap will hold, and it is what overlap then holds."""

from pathlib import Path

import numpy as np

from freescale.data.loader import Loader
from freescale.train.build import build, events_per_rank, expected_overlap_memory
from freescale.train.step import LearningRates
from tests.support.datasets import histories, write_dataset
from tests.support.ranks import Ranks, World
from tests.support.training import joined, small


def planned_and_held(world: World, data: str, folder: str) -> tuple[tuple[int, ...], list[str]]:
    """Return the expected bytes, and the lines that state what was held."""
    config, here = small(data), joined(world)
    loader = Loader(config.data, seed=config.seed, rank=world.rank, world_size=world.ranks)
    trainer = build(config, here, Path(folder), quiet=True)
    tables = trainer.components.tables
    assert tables is not None
    events = events_per_rank(config, here, loader)
    rates = LearningRates(dense=0.01, tables=0.1)
    batches = list(loader)
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        trainer.components.step.run(batch, rates, following=following)
    trainer.components.step.synchronize()
    return tuple(expected_overlap_memory(config, tables.tables, events=events)), trainer.components.step.report()


def test_the_memory_of_overlap_is_planned_as_it_is_held(groups: dict[int, Ranks], tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(8, 12, 120).tolist()
    write_dataset(tmp_path / "data", histories(lengths, items=3000), rows_per_group=4, items=3000)
    for (ids, rows, gradients), (line,) in groups[2].run(planned_and_held, str(tmp_path / "data"), str(tmp_path)):
        words = line.replace(",", "").split()
        held = [float(words[at - 1]) * 1e6 for at, word in enumerate(words) if word == "MB"]
        for expected, found in zip((rows, gradients, ids), held, strict=True):
            assert 0.4 * expected < found < 1.5 * expected, line
