"""Counts what a training step asks of a virtual GPU, for several models and sizes of batches."""

import inspect
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from freescale import deterministic
from freescale.config import FeatureConfig, RunConfig
from freescale.data.loader import Loader
from freescale.models import retrieval
from freescale.train.build import build
from freescale.train.step import LearningRates
from tests.support.datasets import histories, write_dataset
from tests.support.feature_log import with_features, write_feature_log
from tests.support.ranks import World
from tests.support.training import joined, small
from tests.support.vgpu.checks import reports_of

DEFERRED = "freescale-deferred"
_ITEMS, _USERS = 40, 137
_BATCH, _WHOLE_BATCHES = 24, 2
"""Samples of a batch, and the batches of an epoch that are used: with twice the samples they are whole, too."""


def _retrieval(folder: Path, **changes: Any) -> RunConfig:
    return small(folder / "plain", **changes)


def _retrieval_dynamic(folder: Path, **changes: Any) -> RunConfig:
    item = FeatureConfig(ids="dynamic", rows=64, eviction="lru")
    return replace(small(folder / "plain", **changes), features={"item": item})


def _ranking(folder: Path, **changes: Any) -> RunConfig:
    return small(folder / "plain", task={"kind": "ranking", "labels": ("label_click",)}, **changes)


def _ranking_features(folder: Path, **changes: Any) -> RunConfig:
    return with_features(folder / "candidates", **changes)


def _ranking_anchors(folder: Path, **changes: Any) -> RunConfig:
    return with_features(folder / "anchors", anchors="labeled", **changes)


def _retrieval_features(folder: Path, **changes: Any) -> RunConfig:
    return with_features(folder / "anchors", task="retrieval", **changes)


VARIANTS: dict[str, tuple[Callable[..., RunConfig], int]] = {
    "retrieval": (_retrieval, 1),
    "retrieval-2x": (_retrieval, 2),
    "retrieval-dynamic": (_retrieval_dynamic, 1),
    "retrieval-features": (_retrieval_features, 1),
    "ranking": (_ranking, 1),
    "ranking-features": (_ranking_features, 1),
    "ranking-features-2x": (_ranking_features, 2),
    "ranking-anchors": (_ranking_anchors, 1),
}
"""By name: its config, and the factor of the samples of a batch."""


def write_logs(folder: Path) -> None:
    """Write the logs that the variants read."""
    lengths = np.random.default_rng(0).choice([1, 2, 3, 5, 8, 20, 60], _USERS).tolist()
    plain = histories(lengths, items=_ITEMS, candidates=True)
    write_dataset(folder / "plain", plain, rows_per_group=4, items=_ITEMS)
    write_feature_log(folder / "candidates", lengths, candidates=True)
    write_feature_log(folder / "anchors", lengths, candidates=False)


class CountedRun:
    """A run on this rank whose steps are counted one by one, each with all its deferred work."""

    def __init__(self, world: World, folder: str, variant: str, precision: str) -> None:
        configured, factor = VARIANTS[variant]
        data = {"global_batch": _BATCH * factor}
        self.config = configured(Path(folder), data=data, train={"precision": precision}, tables={"overlap": "on"})
        run = Path(folder) / f"run-{variant}"
        self._components = build(self.config, joined(world, timeout=300), run, quiet=True).components
        self._rates = LearningRates(dense=self.config.train.lr, tables=self.config.tables.lr)
        loader = list(Loader.from_run(self.config, rank=world.rank, world_size=world.ranks))[:_WHOLE_BATCHES]
        self._batches = itertools.pairwise(itertools.cycle(loader))

    def step(self) -> dict[str, Any]:
        """Run a step and return its counts."""
        from tests.support.vgpu import device

        step, tables = self._components.step, self._components.tables
        batch, following = next(self._batches)
        device.launches.clear()
        device.waits.clear()
        step.run(batch, self._rates, following=following)
        step.synchronize()
        waits, launches = device.waits.copy(), device.launches.copy()
        deferred = sum(n for (thread, _, _), n in waits.items() if thread == DEFERRED)
        return {
            "main_syncs": sum(waits.values()) - deferred,
            "deferred_syncs": deferred,
            "launches": sum(launches.values()),
            "loss_launches": sum(n for (_, line, _), n in launches.items() if _is_of_loss(line)),
            "layers": self.config.model.layers,
            "tables": 0 if tables is None else len(tables.tables),
            "events": int(batch.history.offsets[-1]),
            "syncs_by_line": _table(waits),
            "launches_by_line": _table(launches),
        }

    def close(self) -> None:
        self._components.step.close()


def count_step(world: World, folder: str, variant: str, precision: str, steps: int) -> dict[str, Any]:
    """Train on this rank; return the counts of the last step, and the reports of all steps."""
    with reports_of(world) as reports:
        run = CountedRun(world, folder, variant, precision)
        *_, counted = [run.step() for _ in range(steps)]
        run.close()
    return counted | {"reports": len(reports)}


def _is_of_loss(line: str) -> bool:
    """Return whether a line is one of dropout or of the retrieval loss, with the sums that only it uses."""
    file, _, number = line.partition(":")
    if file == "models/keyed.py":
        return True
    begin = inspect.getsourcelines(retrieval.sampled_softmax)[1]
    end_of_sums = inspect.getsourcelines(deterministic.sum_by_key)[1]
    of_loss = {inspect.getfile(retrieval.sampled_softmax): begin <= int(number or 0)}
    of_loss[deterministic.__file__] = int(number or 0) < end_of_sums
    return any(path.endswith(f"/freescale/{file}") and found for path, found in of_loss.items())


def _table(counts: Counter[tuple[str, str, str]]) -> list[list[Any]]:
    return [[*key, count] for key, count in counts.most_common()]
