"""Ranks that do not answer are named by all others, and few questions go to the store for it."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from freescale.transport import base
from freescale.transport.base import Peers


class CountingStore(dist.HashStore):
    """A store that counts the keys that ranks ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Counter[int]()

    def check(self, keys: Sequence[str]) -> bool:
        self.asked[threading.get_ident()] += len(keys)
        return super().check(list(keys))


def named_by(store: dist.Store, ranks: int, failing: Sequence[int], *, late: Sequence[int] = ()) -> list[list[int]]:
    """Return whom each failing rank names. Those in `late` fail when half of the grace period is over."""

    started = threading.Barrier(len(failing))

    def ask(rank: int) -> list[int]:
        started.wait(30)
        time.sleep(base._GRACE_SECONDS / 2 if rank in late else 0.0)
        return Peers(rank, ranks, store).unresponsive_ranks("")

    with ThreadPoolExecutor(len(failing)) as pool:
        return [*pool.map(ask, failing)]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_GRACE_SECONDS", 1.5)


def test_all_name_the_ranks_that_report_nothing() -> None:
    store = CountingStore()
    failing = [rank for rank in range(40) if rank not in (3, 17, 39)]
    assert named_by(store, 40, failing, late=[5, 6]) == [[3, 17, 39]] * len(failing)
    *others, asking = sorted(store.asked.values())
    assert asking > 40, "one rank asks for all"
    assert max(others) < 4 * asking / 10


def test_nobody_is_named_when_every_rank_reports() -> None:
    assert named_by(dist.HashStore(), 6, range(6)) == [[]] * 6


def test_a_rank_that_reports_late_is_not_named_by_those_that_fail_later() -> None:
    store = dist.HashStore()
    assert named_by(store, 3, [0]) == [[1, 2]]
    assert named_by(store, 3, [1, 2]) == [[], []]


def test_ranks_ask_for_all_when_the_one_that_asked_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_ANSWER_SECONDS", 0.2)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.add(base._ASKED, 1)
    assert named_by(store, 4, [1, 2]) == [[0, 3]] * 2
