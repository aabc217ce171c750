"""Ranks with a virtual GPU each, started once."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def gpus() -> Iterator[Ranks]:
    ranks = Ranks(2, on_virtual_gpus=True)
    yield ranks
    ranks.close()
