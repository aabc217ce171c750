"""Groups of real ranks, started once for all proofs, and a log with very unequal histories."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.ranks import Ranks
from tests.support import histories, write_dataset


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, Ranks]]:
    started = {count: Ranks(count) for count in (1, 2, 4)}
    yield started
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """137 users, 40 items: every item is in many samples of a batch, and on many ranks."""
    lengths = np.random.default_rng(0).choice([1, 2, 3, 5, 8, 20, 60], 137).tolist()
    path = tmp_path_factory.mktemp("log") / "data"
    write_dataset(path, histories(lengths, items=40, candidates=True), rows_per_group=4, items=40)
    return path
